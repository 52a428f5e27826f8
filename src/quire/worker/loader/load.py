"""Builds a model and fills it from safetensors files.

The model is first built without memory (torch's meta device) and every tensor it wants is compared with the headers of
the files, so that a wrong checkpoint is refused in well under a second. Then memory is taken once and each tensor is
read once, in the order of the file, through a memory map.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from quire.config.checkpoint import CheckpointIndex, TensorInfo
from quire.config.hf_config import HFConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError, QuireError, UnsupportedModelError
from quire.logger import init_logger
from quire.worker.layers.rotary import RotaryEmbedding
from quire.worker.layers.weights import checkpoint_tensors
from quire.worker.loader.dummy import fill_with_noise
from quire.worker.models.registry import get_model_class

logger = init_logger(__name__)

HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$")
"""Tensors that older exports hold and nobody needs: they follow from config.json."""
_FLOATING = ("F32", "F16", "BF16", "F64")


def load_model(
    model_config: ModelConfig, load_config: LoadConfig, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The model of `model_config`, ready to run on `device` in `dtype`: no gradients, weights loaded.

    Raises UnsupportedModelError or ModelLoadError, naming file and tensor, before any memory is taken.
    """
    start = time.monotonic()
    hf = dataclasses.replace(model_config.hf_config, max_model_len=model_config.model_len)
    model = _build(hf)
    if load_config.load_format == "dummy":
        _allocate(model, device, dtype)
        fill_with_noise(checkpoint_tensors(model), model_config.seed)
        source = "random weights"
    else:
        index = CheckpointIndex.from_dir(model_config.model_dir)
        stored = match_tensors(checkpoint_tensors(model), index, tied_head=hf.tie_word_embeddings)
        _allocate(model, device, dtype)
        _read_tensors(checkpoint_tensors(model), stored)
        source = str(model_config.model_dir)
    gib = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
    name, seconds = str(dtype).removeprefix("torch."), time.monotonic() - start
    logger.info("Loaded %s from %s: %.2f GiB of %s in %.2f s", hf.architecture, source, gib, name, seconds)
    return model


def match_tensors(wanted: Mapping[str, Tensor], index: CheckpointIndex, *, tied_head: bool) -> dict[str, TensorInfo]:
    """The stored tensor of each wanted one, with its name in the file as `TensorInfo.name`.

    Every wanted tensor must be stored with its shape, and nothing else may be stored that could matter. Raises
    ModelLoadError naming file and tensor. Exports of a bare decoder leave out the leading "model.".
    """
    stored = {name: tensor for name, tensor in index.tensors.items() if not HARMLESS.search(name)}
    if tied_head:
        stored.pop("lm_head.weight", None)
    if stored and not any(name.startswith("model.") for name in stored):
        stored = {name if name in wanted else f"model.{name}": tensor for name, tensor in stored.items()}
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ModelLoadError(f"{index.source} has no tensor {missing[0]}{_and_more(missing)}, which the model needs")
    unexpected = [name for name in stored if name not in wanted]
    if unexpected:
        raise ModelLoadError(
            f"{stored[unexpected[0]].file} holds tensor {unexpected[0]}{_and_more(unexpected)}, which the model that "
            "config.json describes has no place for: the two do not belong together"
        )
    for name, tensor in wanted.items():
        _check_tensor(name, tensor, stored[name])
    return {name: stored[name] for name in wanted}


def _check_tensor(name: str, wanted: Tensor, stored: TensorInfo) -> None:
    if stored.shape != tuple(wanted.shape):
        raise ModelLoadError(
            f"{stored.file}: tensor {name} has shape {list(stored.shape)}, but config.json makes it "
            f"{list(wanted.shape)}"
        )
    if stored.dtype not in _FLOATING:
        raise UnsupportedModelError(
            f"{stored.file}: tensor {name} is {stored.dtype}; only {', '.join(_FLOATING)} weights can be loaded"
        )


def _build(hf: HFConfig) -> nn.Module:
    """The model on the meta device: shapes only."""
    if hf.get("quantization_config"):
        raise UnsupportedModelError(f"{hf.path} has a quantization_config; quantized weights are not implemented")
    if not hf.architecture:
        raise ModelLoadError(f"{hf.path} does not name an architecture in 'architectures'")
    model_class = get_model_class(hf.architecture)
    try:
        with torch.device("meta"):
            model: nn.Module = model_class(hf)
    except QuireError:
        raise
    except Exception as e:  # whatever else a config.json may hold: a word for a number, a list too short
        cause = str(e).partition("\n")[0]
        raise ModelLoadError(f"{hf.path} does not describe a {hf.architecture}: {type(e).__name__}: {cause}") from e
    return model.eval()


def _allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Take the memory: unfilled weights, and the rotary tables.

    Not with nn.Module.to_empty: on meta tensors it makes torch import sympy, which takes a second.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        if isinstance(module, RotaryEmbedding):
            module.allocate(device, dtype)


@torch.no_grad()
def _read_tensors(wanted: Mapping[str, Tensor], stored: Mapping[str, TensorInfo]) -> None:
    """Copy every stored tensor into its place, converting its type."""
    by_file: dict[Path, list[str]] = {}
    for name in sorted(stored, key=lambda name: stored[name].offset):
        by_file.setdefault(stored[name].file, []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in names:
                wanted[name].copy_(file.get_tensor(stored[name].name))


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
