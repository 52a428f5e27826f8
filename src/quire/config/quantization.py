"""Quantization of weights: the operator's choice, a checkpoint's format, and the memory that they take.

A *method* is a name of `--quantization`. int8 and int4 quantize a plain checkpoint while it is loaded. The others name
the format in which a checkpoint stores quantized weights, and follow from its config.json. No torch is imported.

`weight_memory` estimates for `quire info`, from the headers of a checkpoint's files. It assumes that matrices which are
merged into one are stored in the same way, and leaves out the padding of packed weights (whole panels of 64 outputs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.config.checkpoint import CheckpointIndex, TensorInfo
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError

WEIGHT_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Methods that quantize at load, and their bits per weight."""
STORED_METHODS = ("compressed-tensors", "gptq", "awq", "fp8", "mxfp4")
"""Methods of checkpoints whose weights are quantized already."""
METHODS = (*WEIGHT_BITS, *STORED_METHODS)
"""Values of --quantization."""

MAX_INT8_INPUTS = 65536
"""Largest number of inputs of a layer whose int8 products add up exactly: 65536 * 255 * 128 is below 2^31."""
GROUP_SIZES = (128, 64, 32)
"""Numbers of inputs that share a scale at int4: the first that divides a layer's inputs, else the last, with a short
end."""
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of matrices that choose experts: they are small, and a wrong choice costs more than a rounded weight."""
HEAD_EXPANSION = "kv_b_proj"
"""Name of the matrix of latent attention that is computed with as plain weights, a matrix for each head."""
_IN_A_LAYER = re.compile(r"(^|\.)layers?\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class QuantizationScheme:
    """Quantization of one matrix at load."""

    bits: int
    quantizes_inputs: bool
    """True: activations become int8, too, each row by its own maximum (W8A8). False: weights are dequantized."""


def scheme_of(method: str) -> QuantizationScheme:
    """Returns the scheme of a method that quantizes at load."""
    return QuantizationScheme(bits=WEIGHT_BITS[method], quantizes_inputs=method == "int8")


def is_quantizable_name(path: str) -> bool:
    """Returns whether a module (or its `weight`) of this name is quantized at load if it is a matrix: those inside the
    decoder's layers, except routers, norms and biases of several heads or experts, and the head expansion."""
    name = path.removesuffix(".weight").rpartition(".")[2]
    is_plain = name in (*ROUTERS, HEAD_EXPANSION) or "norm" in name or name.endswith("bias")
    return _IN_A_LAYER.search(path) is not None and not is_plain


def group_size_for(in_features: int) -> int:
    """Returns the first of GROUP_SIZES that divides the number of inputs, else the last."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), GROUP_SIZES[-1])


def quantization_method(asked: str | None, stored: Any, path: Path) -> str | None:
    """Returns the method that applies: that of the checkpoint whose config.json is at `path`, if its weights are
    quantized, else what --quantization asks for. Raises ConfigError if the two contradict each other."""
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


@dataclass(frozen=True, kw_only=True)
class StoredScheme:
    """Format of a checkpoint's quantized matrices."""

    layout: Literal["int8", "packed", "float8-compressed", "gptq", "awq", "float8", "mxfp4"]
    """compressed-tensors' int-quantized, pack-quantized and float-quantized, and the methods that have one layout."""
    bits: int
    zero_offset: int = 0
    """Number added to stored zero points."""
    quantizes_inputs: bool = False
    """True: activations become int8, each row by its own maximum."""
    is_symmetric: bool = False
    """True: zero points, if any, are all 0."""
    is_scattered: bool = False
    """True: the configuration says that inputs of one group are not adjacent ("act order")."""
    block: tuple[int, int] | None = None
    """fp8: outputs and inputs that share a scale; None for one scale an output or a matrix."""


def read_stored_scheme(config: Mapping[str, Any], source: Path) -> StoredScheme:
    """Returns the format in the quantization_config of the checkpoint whose config.json is `source`.

    Raises UnsupportedModelError for an unknown format, with the known ones in its message; ModelLoadError for a
    malformed one.
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


def _fp8(config: Mapping[str, Any], source: Path) -> StoredScheme:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModelError(f"{source}: fp8 in the format {config['fmt']!r}; e4m3 can be read")
    block = config.get("weight_block_size")
    if block is None:
        return StoredScheme(layout="float8", bits=8)
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ModelLoadError(f"{source} has weight_block_size {block!r}, which must be two numbers, as [128, 128]")
    return StoredScheme(layout="float8", bits=8, block=(block[0], block[1]))


def _mxfp4(config: Mapping[str, Any], source: Path) -> StoredScheme:
    return StoredScheme(layout="mxfp4", bits=4)


def _compressed(config: Mapping[str, Any], source: Path) -> StoredScheme:
    groups = list((config.get("config_groups") or {}).values())
    schemes = [(group.get("weights") or {}, group.get("input_activations")) for group in groups]
    if schemes and all(weights.get("type") == "float" and weights.get("num_bits") == 8 for weights, _ in schemes):
        return _compressed_fp8([weights for weights, _ in schemes], config.get("format"), source)
    bits = {weights.get("num_bits") for weights, _ in schemes}
    if not schemes or len(bits) != 1 or any(weights.get("type", "int") != "int" for weights, _ in schemes):
        raise UnsupportedModelError(
            f"{source}: compressed-tensors of one integer type, or of 8-bit floats, can be read; this has {groups}"
        )
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


def _compressed_fp8(schemes: list[Mapping[str, Any]], layout: Any, source: Path) -> StoredScheme:
    """Activations stay as they are, whatever the format says of them: no accuracy is lost."""
    forms = {(weights.get("strategy"), str(weights.get("block_structure"))) for weights in schemes}
    strategy, block = schemes[0].get("strategy"), schemes[0].get("block_structure")
    if layout not in ("float-quantized", "naive-quantized") or len(forms) != 1:
        raise UnsupportedModelError(
            f"{source}: 8-bit floats of compressed-tensors in the format {layout!r} with {sorted(forms)}; "
            "float-quantized with one strategy can be read"
        )
    if strategy in ("tensor", "channel"):
        return StoredScheme(layout="float8-compressed", bits=8)
    if strategy == "block" and isinstance(block, list) and len(block) == 2:
        return StoredScheme(layout="float8-compressed", bits=8, block=(int(block[0]), int(block[1])))
    raise UnsupportedModelError(
        f"{source}: 8-bit floats of compressed-tensors with a scale per {strategy!r}; tensor, channel and block can be "
        "read"
    )


def _bits(bits: Any, source: Path) -> int:
    if bits not in (4, 8):
        raise UnsupportedModelError(f"{source}: weights of {bits!r} bits; those of 4 and 8 can be read")
    return int(bits)


_READERS = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _fp8, "mxfp4": _mxfp4}


SCALE_BYTES = ZERO_BYTES = 4
WORD_BITS = 32
STEP_INPUTS = 32
"""Divisor of every group size that a CPU computes with, unless the group is the whole row."""
_SUFFIXES: Mapping[str, tuple[str, str, str]] = {
    "int8": ("weight", "weight_scale", "weight_zero_point"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point"),
    "gptq": ("qweight", "scales", "qzeros"),
    "awq": ("qweight", "scales", "qzeros"),
    "float8": ("weight", "weight_scale_inv", "weight_zero_point"),
    "float8-compressed": ("weight", "weight_scale", "weight_zero_point"),
    "mxfp4": ("blocks", "scales", "zeros"),
}
"""Names of a matrix' values, scales and zero points, by layout of StoredScheme."""
_NOTES = ("weight_shape", "weight_g_idx", "g_idx", "input_scale", "activation_scale")


@dataclass(frozen=True)
class WeightMemory:
    """Memory of all weights."""

    parameters: int
    """Number of the model's weights, in any form."""
    num_bytes: int
    quantized_parameters: int
    """Number of parameters stored as integers."""


def weight_memory(
    index: CheckpointIndex,
    dtype_bytes: int,
    *,
    is_tied: bool,
    method: str | None,
    stored: StoredScheme | None,
    rename: Callable[[str], str | None] = str,
    transposed: int | None = None,
) -> WeightMemory:
    """Returns the memory of a checkpoint in a type of `dtype_bytes`. `method` is the quantization that applies,
    `stored` the format of the checkpoint's own integers, if it has any, `rename` returns the model's name of a stored
    tensor; None: not read. `transposed`: see tensor_names.TRANSPOSED."""
    tensors = {name: t for found, t in index.tensors.items() if (name := rename(found)) is not None}
    if is_tied:
        tensors.pop("lm_head.weight", None)
    scheme = scheme_of(method) if method is not None and method in WEIGHT_BITS else None
    parameters = num_bytes = quantized = 0
    for name in list(tensors):
        if name not in tensors:
            continue  # part of a matrix that was counted
        size, taken = math.prod(tensors[name].shape), None
        matrix = None if stored is None else _take_matrix(tensors, name, stored)
        if matrix is not None and stored is not None:
            size = matrix.size
            taken = None if f".{HEAD_EXPANSION}." in name else matrix.num_bytes(stored.bits)
        elif scheme is not None and len(shape := tensors[name].shape) in (2, 3) and is_quantizable_name(name):
            outputs, inputs = shape[-2:] if transposed != len(shape) else shape[:-3:-1]
            outputs *= math.prod(shape[:-2])  # experts
            if not (scheme.quantizes_inputs and inputs > MAX_INT8_INPUTS):
                group_size = inputs if scheme.quantizes_inputs else group_size_for(inputs)
                taken = _Matrix(outputs, inputs, group_size).num_bytes(scheme.bits)
        parameters += size
        num_bytes += size * dtype_bytes if taken is None else taken
        quantized += 0 if taken is None else size
    return WeightMemory(parameters, num_bytes, quantized)


@dataclass(frozen=True)
class _Matrix:
    outputs: int
    inputs: int
    group_size: int
    has_zeros: bool = False
    is_scattered: bool = False
    """True: inputs of one group are not adjacent."""
    scale_bytes: int = SCALE_BYTES

    @property
    def size(self) -> int:
        return self.outputs * self.inputs

    def num_bytes(self, bits: int) -> int | None:
        """Returns the size in memory; None if it is computed with as plain weights."""
        if self.is_scattered or (self.group_size % STEP_INPUTS and self.group_size < self.inputs):
            return None
        groups = -(-self.inputs // self.group_size)
        return self.size * bits // 8 + self.outputs * groups * (self.scale_bytes + ZERO_BYTES * self.has_zeros)


def _take_matrix(tensors: dict[str, TensorInfo], name: str, stored: StoredScheme) -> _Matrix | None:
    """Returns the quantized matrix that tensor `name` is a part of and removes its parts from `tensors`; None if there
    is none."""
    joint = "_" if stored.layout == "mxfp4" else "."
    base, _, suffix = name.rpartition(joint)
    values, scales, zeros = _SUFFIXES[stored.layout]
    if suffix not in (values, scales, zeros, *_NOTES) or f"{base}{joint}{scales}" not in tensors:
        return None
    parts = {part: tensors.pop(f"{base}{joint}{part}", None) for part in (values, scales, zeros, *_NOTES)}
    found, scale = parts[values], parts[scales]
    if stored.layout == "mxfp4" and found is not None and scale is not None:
        groups = scale.shape[-1]
        return _Matrix(math.prod(scale.shape[:-1]), groups * STEP_INPUTS, STEP_INPUTS, scale_bytes=1)
    if found is None or scale is None or len(found.shape) != 2:
        return None
    if stored.layout.startswith("float8"):
        return _Matrix(*found.shape, found.shape[1] if stored.block is None else stored.block[1])
    per_word = 1 if stored.layout == "int8" else WORD_BITS // stored.bits
    rows, columns = found.shape
    outputs, inputs = {"gptq": (columns, rows * per_word), "awq": (columns * per_word, rows)}.get(
        stored.layout, (rows, columns * per_word)
    )
    groups = max(1, math.prod(scale.shape) // max(1, outputs))
    return _Matrix(
        outputs,
        inputs,
        max(1, inputs // groups),
        has_zeros=parts[zeros] is not None and not stored.is_symmetric,
        is_scattered=stored.is_scattered,
    )
