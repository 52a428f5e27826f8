"""Which layers of a model are quantized."""

from __future__ import annotations

from torch import nn

from quire.config.quantization import MAX_INT8_INPUTS, QuantizationScheme, is_quantizable_name
from quire.worker.layers.linear import Linear
from quire.worker.layers.moe import Experts


def plan_quantization(model: nn.Module, scheme: QuantizationScheme) -> list[str]:
    """Have the linear layers and experts inside the decoder's layers quantize their weights when these are loaded, and
    return their names. Embeddings, logits head and routers stay as they are."""
    chosen = {path: module for path, module in model.named_modules() if is_quantizable(path, module, scheme)}
    for module in chosen.values():
        assert isinstance(module, Linear | Experts)
        module.scheme = scheme
    return list(chosen)


def is_quantizable(path: str, module: nn.Module, scheme: QuantizationScheme) -> bool:
    """Whether the module at `path` is one of them."""
    if not isinstance(module, Linear | Experts) or not is_quantizable_name(path):
        return False
    matrices = (module.weight,) if isinstance(module, Linear) else (module.gate_up_proj, module.down_proj)
    return not scheme.quantizes_inputs or all(matrix.shape[-1] <= MAX_INT8_INPUTS for matrix in matrices)
