"""What the weights of a checkpoint take in memory, told from the headers of its files: for `quire info`, without torch.

An estimate where only reading could tell: matrices that end up side by side in one are taken to be stored in one way,
and packing's padding (whole panels of 64 outputs) is left out, as it is of plain weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.checkpoint import CheckpointIndex, TensorInfo
from quire.config.quantization import (
    MAX_INT8_INPUTS,
    WEIGHT_BITS,
    group_size_for,
    is_quantizable_name,
    scheme_of,
)
from quire.config.stored_quantization import StoredScheme

SCALE_BYTES = ZERO_BYTES = 4
WORD_BITS = 32
STEP_INPUTS = 32
"""What a group's size must be a multiple of, unless it is the whole row, to be computed with on a CPU."""
_SUFFIXES: Mapping[str, tuple[str, str, str]] = {
    "int8": ("weight", "weight_scale", "weight_zero_point"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point"),
    "gptq": ("qweight", "scales", "qzeros"),
    "awq": ("qweight", "scales", "qzeros"),
}
"""By layout of StoredScheme: where a matrix' values, scales and zero points are."""
_NOTES = ("weight_shape", "weight_g_idx", "g_idx")


@dataclass(frozen=True)
class WeightMemory:
    """Of all weights."""

    parameters: int
    """Numbers of the model, however they are stored."""
    num_bytes: int
    quantized_parameters: int
    """Those that are kept in integers."""


def weight_memory(
    index: CheckpointIndex, dtype_bytes: int, *, is_tied: bool, method: str | None, stored: StoredScheme | None
) -> WeightMemory:
    """Of a checkpoint in a type of `dtype_bytes`. `method` is the quantization that applies, `stored` how the
    checkpoint's own integers are stored, if it has any."""
    tensors = {name: t for name, t in index.tensors.items() if not (is_tied and name == "lm_head.weight")}
    scheme = scheme_of(method) if method is not None and method in WEIGHT_BITS else None
    parameters = num_bytes = quantized = 0
    for name in list(tensors):
        if name not in tensors:
            continue  # a part of a matrix that was counted
        size, taken = math.prod(tensors[name].shape), None
        matrix = None if stored is None else _take_matrix(tensors, name, stored)
        if matrix is not None and stored is not None:
            size, taken = matrix.size, matrix.num_bytes(stored.bits)
        elif scheme is not None and len(tensors[name].shape) == 2 and is_quantizable_name(name):
            outputs, inputs = tensors[name].shape
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
    """Inputs of one group are no neighbours."""

    @property
    def size(self) -> int:
        return self.outputs * self.inputs

    def num_bytes(self, bits: int) -> int | None:
        """None if it is computed with as plain weights."""
        if self.is_scattered or (self.group_size % STEP_INPUTS and self.group_size < self.inputs):
            return None
        groups = -(-self.inputs // self.group_size)
        return self.size * bits // 8 + self.outputs * groups * (SCALE_BYTES + ZERO_BYTES * self.has_zeros)


def _take_matrix(tensors: dict[str, TensorInfo], name: str, stored: StoredScheme) -> _Matrix | None:
    """The quantized matrix that tensor `name` is a part of, whose parts leave `tensors`; None if it is of none."""
    base, _, suffix = name.rpartition(".")
    values, scales, zeros = _SUFFIXES[stored.layout]
    if suffix not in (values, scales, zeros, *_NOTES) or f"{base}.{scales}" not in tensors:
        return None
    parts = {part: tensors.pop(f"{base}.{part}", None) for part in (values, scales, zeros, *_NOTES)}
    found, scale = parts[values], parts[scales]
    if found is None or scale is None or len(found.shape) != 2:
        return None
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
