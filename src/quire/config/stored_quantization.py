"""What the `quantization_config` of a quantized checkpoint says, and whether its weights can be read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.errors import ModelLoadError, UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class StoredScheme:
    """How a checkpoint stores its quantized matrices."""

    layout: Literal["int8", "packed", "gptq", "awq"]
    """compressed-tensors' int-quantized and pack-quantized, and the methods that have one layout."""
    bits: int
    zero_offset: int = 0
    """What is added to stored zero points."""
    quantizes_inputs: bool = False
    """Activations become int8, each row by its own maximum."""
    is_symmetric: bool = False
    """Zero points, where there are any, are all 0."""
    is_scattered: bool = False
    """Inputs of one group are no neighbours ("act order"), as far as the configuration says."""


def read_stored_scheme(config: Mapping[str, Any], source: Path) -> StoredScheme:
    """What the quantization_config of the checkpoint whose config.json is `source` says.

    Raises UnsupportedModelError for one that cannot be read, saying which can; ModelLoadError for one that is no such
    thing.
    """
    method = config.get("quant_method")
    if method not in _READERS:
        raise UnsupportedModelError(
            f"{source} has a quantization_config of method {method!r}; those that can be read are {', '.join(_READERS)}"
        )
    try:
        return _READERS[method](config, source)
    except (AttributeError, TypeError) as e:  # a word or a list where an object should be
        raise ModelLoadError(f"{source} has a quantization_config that is not understood: {e}") from None


def _gptq(config: Mapping[str, Any], source: Path) -> StoredScheme:
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(f"{source}: GPTQ in the format {version!r}; gptq and gptq_v2 can be read")
    if config.get("dynamic"):
        raise UnsupportedModelError(f"{source}: GPTQ with other bits for some layers ('dynamic') cannot be read")
    zero_offset = 1 if version == "gptq" else 0
    return StoredScheme(
        layout="gptq",
        bits=_bits(config.get("bits"), source),
        zero_offset=zero_offset,
        is_symmetric=bool(config.get("sym")),
        is_scattered=bool(config.get("desc_act")),
    )


def _awq(config: Mapping[str, Any], source: Path) -> StoredScheme:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm" or config.get("bits", config.get("w_bit", 4)) != 4:
        raise UnsupportedModelError(f"{source}: AWQ of version {version!r}; the version gemm with 4 bits can be read")
    return StoredScheme(layout="awq", bits=4)


def _compressed(config: Mapping[str, Any], source: Path) -> StoredScheme:
    groups = list((config.get("config_groups") or {}).values())
    schemes = [(group.get("weights") or {}, group.get("input_activations")) for group in groups]
    bits = {weights.get("num_bits") for weights, _ in schemes}
    if not schemes or len(bits) != 1 or any(weights.get("type", "int") != "int" for weights, _ in schemes):
        raise UnsupportedModelError(f"{source}: compressed-tensors of one integer type can be read; this has {groups}")
    inputs = [inputs for _, inputs in schemes if inputs]
    if any(
        scheme.get("num_bits") != 8 or scheme.get("type") != "int" or not scheme.get("dynamic") for scheme in inputs
    ):
        raise UnsupportedModelError(
            f"{source}: int8 activations by the maximum of each token (dynamic) can be computed with; this has {inputs}"
        )
    if inputs and bits != {8}:
        raise UnsupportedModelError(f"{source}: int8 activations with weights of {bits} bits cannot be computed with")
    layout = config.get("format")
    if layout == "pack-quantized":
        is_scattered = any(weights.get("actorder") == "group" for weights, _ in schemes)
        return StoredScheme(
            layout="packed", bits=_bits(bits.pop(), source), quantizes_inputs=bool(inputs), is_scattered=is_scattered
        )
    if layout in ("int-quantized", "naive-quantized") and bits == {8}:
        return StoredScheme(layout="int8", bits=8, quantizes_inputs=bool(inputs))
    raise UnsupportedModelError(
        f"{source}: compressed-tensors in the format {layout!r}; pack-quantized and int-quantized can be read"
    )


def _bits(bits: Any, source: Path) -> int:
    if bits not in (4, 8):
        raise UnsupportedModelError(f"{source}: weights of {bits!r} bits; those of 4 and 8 can be read")
    return int(bits)


_READERS = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}
