"""Which layers of a model are quantized."""

from __future__ import annotations

import re

from torch import nn

from quire.config.quantization import MAX_INT8_INPUTS, QuantizationScheme
from quire.worker.layers.linear import Linear

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of matrices that choose experts: small, and a wrong choice costs more than a rounded weight."""


_IN_A_LAYER = re.compile(r"(^|\.)layers?\.\d+\.")


def plan_quantization(model: nn.Module, scheme: QuantizationScheme) -> list[str]:
    """Have the linear layers inside the decoder's layers quantize their weights when these are loaded, and return their
    names. Embeddings, logits head, routers and the blocks of experts stay as they are."""
    chosen = {path: module for path, module in model.named_modules() if is_quantizable(path, module, scheme)}
    for module in chosen.values():
        assert isinstance(module, Linear)
        module.scheme = scheme
    return list(chosen)


def is_quantizable(path: str, module: nn.Module, scheme: QuantizationScheme) -> bool:
    """Whether the module at `path` is one of them."""
    if not isinstance(module, Linear) or not _IN_A_LAYER.search(path) or path.rpartition(".")[2] in ROUTERS:
        return False
    return not scheme.quantizes_inputs or module.weight.shape[1] <= MAX_INT8_INPUTS
