"""How weights are quantized: what the operator asks for, without torch.

A *method* is a name of `--quantization`. The first two quantize a plain checkpoint while it is loaded; the others say
how a checkpoint's own weights are stored, and follow from its config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelLoadError

WEIGHT_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Methods that quantize at load, and their bits per weight."""
STORED_METHODS = ("compressed-tensors", "gptq", "awq")
"""Methods of checkpoints whose weights are quantized already."""
METHODS = (*WEIGHT_BITS, *STORED_METHODS)
"""What --quantization takes."""

MAX_INT8_INPUTS = 65536
"""Inputs of a layer whose int8 products add up exactly: 65536 * 255 * 128 is below 2^31."""
GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale at int4: the first that divides a layer's inputs; else the last, with a short end."""
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of matrices that choose experts: small, and a wrong choice costs more than a rounded weight."""
_IN_A_LAYER = re.compile(r"(^|\.)layers?\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class QuantizationScheme:
    """How one matrix is quantized at load."""

    bits: int
    quantizes_inputs: bool
    """Activations become int8, too, each row by its own maximum (W8A8); False dequantizes weights instead."""


def scheme_of(method: str) -> QuantizationScheme:
    """The scheme of a method that quantizes at load."""
    return QuantizationScheme(bits=WEIGHT_BITS[method], quantizes_inputs=method == "int8")


def is_quantizable_name(path: str) -> bool:
    """Whether the module, or the `weight` of one, called that is quantized at load, if it is a matrix: those inside the
    decoder's layers, but for routers."""
    name = path.removesuffix(".weight").rpartition(".")[2]
    return _IN_A_LAYER.search(path) is not None and name not in ROUTERS


def group_size_for(in_features: int) -> int:
    """See GROUP_SIZES."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), GROUP_SIZES[-1])


def quantization_method(asked: str | None, stored: Any, path: Path) -> str | None:
    """The method that applies: that of the checkpoint whose config.json is at `path`, if its weights are quantized,
    else what --quantization asks for. Raises ConfigError if the two contradict each other."""
    if not stored:
        if asked in STORED_METHODS:
            raise ConfigError(
                f"--quantization {asked}: {path} has no quantization_config, so its weights are plain; "
                f"leave the flag out, or quantize them at load with {' or '.join(WEIGHT_BITS)}"
            )
        return asked
    if not isinstance(stored, Mapping):
        raise ModelLoadError(f"{path} has a quantization_config that is no object: {stored!r}")
    method = str(stored.get("quant_method"))
    if asked not in (None, method):
        raise ConfigError(
            f"--quantization {asked}: {path.parent} is quantized already, by {method}; leave the flag out"
        )
    return method
