"""A quantized matrix, and how one is made from a plain matrix: rounding to the nearest, in one pass, without data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.config.quantization import QuantizationScheme, group_size_for


class Coding(enum.IntEnum):
    """The numbers that the values of a quantized matrix are. All are exact in bfloat16."""

    INTEGER = 0
    E4M3 = 1
    """torch's float8_e4m3fn, 8 bits."""
    MXFP4 = 2
    """0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, 4 bits, times a power of two for each 32 inputs (Open Compute
    Project, Microscaling Formats, 2023)."""


MXFP4_GROUP = 32
MXFP4_SCALES = range(2, 253)
"""Scales s of MXFP4, 2^(s - 127), whose products with all values are normal numbers of bfloat16."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Kind(NamedTuple):
    """Properties that matrices must have in common to be stacked."""

    bits: int
    group_size: int
    has_zeros: bool
    quantizes_inputs: bool
    coding: Coding = Coding.INTEGER


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """w[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g] with g = i // group_size, all in float32.

    Adjacent inputs of one output form a group; the last one may be short. A group as long as the row is one scale per
    output.
    """

    bits: int
    """4 or 8."""
    values: Tensor
    """[out_features, in_features] int8, from -2^(bits - 1) to 2^(bits - 1) - 1: unsigned formats are shifted. E4M3: the
    floats' bytes. MXFP4: [out_features, in_features / 2], the first of two codes in the low bits."""
    scales: Tensor
    """[out_features, groups] float32; MXFP4: uint8, the powers of two of MXFP4_SCALES."""
    group_size: int
    zeros: Tensor | None = None
    """[out_features, groups] int16, shifted as the values are; None for zeros."""
    quantizes_inputs: bool = False
    """True: compute with int8 activations, each row quantized by its own maximum. Only with 8 bits, one scale per
    output and no zeros."""
    coding: Coding = Coding.INTEGER

    def __post_init__(self) -> None:
        out_features, in_features = self.shape
        groups = -(-in_features // self.group_size)
        assert self.bits == {Coding.E4M3: 8, Coding.MXFP4: 4}.get(self.coding, self.bits)
        assert self.bits in (4, 8)
        assert self.values.dtype == torch.int8
        assert self.scales.dtype == (torch.uint8 if self.coding is Coding.MXFP4 else torch.float32)
        assert self.scales.shape == (out_features, groups)
        assert self.coding is Coding.INTEGER or self.zeros is None
        assert self.coding is not Coding.MXFP4 or self.group_size == MXFP4_GROUP
        assert self.zeros is None or (self.zeros.shape == self.scales.shape and self.zeros.dtype == torch.int16)
        assert not self.quantizes_inputs or (self.bits == 8 and groups == 1 and self.zeros is None)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        out_features, columns = self.values.shape
        return out_features, columns * (2 if self.coding is Coding.MXFP4 else 1)

    @property
    def kind(self) -> Kind:
        return Kind(self.bits, self.group_size, self.zeros is not None, self.quantizes_inputs, self.coding)

    @property
    def is_outline(self) -> bool:
        """True if it only describes a matrix, whose values are packed already."""
        return self.values.is_meta

    @staticmethod
    def outline(shape: Sequence[int], kind: Kind) -> QuantizedWeight:
        """Returns a matrix of (out_features, in_features) without values, on the meta device."""
        per_group, is_mxfp4 = (shape[0], -(-shape[1] // kind.group_size)), kind.coding is Coding.MXFP4
        columns = shape[1] // 2 if is_mxfp4 else shape[1]
        return QuantizedWeight(
            bits=kind.bits,
            values=torch.empty((shape[0], columns), dtype=torch.int8, device="meta"),
            scales=torch.empty(per_group, dtype=torch.uint8 if is_mxfp4 else torch.float32, device="meta"),
            group_size=kind.group_size,
            zeros=torch.empty(per_group, dtype=torch.int16, device="meta") if kind.has_zeros else None,
            quantizes_inputs=kind.quantizes_inputs,
            coding=kind.coding,
        )

    @property
    def num_bytes(self) -> int:
        """Size of values and scales when packed tightly."""
        out_features, in_features = self.shape
        per_group = self.scales.itemsize + (0 if self.zeros is None else 4)
        return out_features * in_features * self.bits // 8 + self.scales.numel() * per_group

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns [out_features, in_features]: the weights that values and scales represent."""
        w, scales = self._numbers(), self.scales
        if self.zeros is not None:
            w = w - self._spread(self.zeros)
        if self.coding is Coding.MXFP4:
            scales = (scales.int() << 23).view(torch.float32)  # the exponent of a float32
        return (w * self._spread(scales)).to(dtype)

    def _numbers(self) -> Tensor:
        """Returns [out_features, in_features] float32: what the values stand for, before scales."""
        if self.coding is Coding.E4M3:
            return self.values.view(torch.float8_e4m3fn).float()
        if self.coding is Coding.MXFP4:
            numbers = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=self.values.device)
            codes = self.values.view(torch.uint8)
            return numbers[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).int()]
        return self.values.float()

    def to(self, device: torch.device) -> QuantizedWeight:
        """Returns the matrix on `device`; an outline stays one."""
        if self.is_outline:
            return self
        zeros = None if self.zeros is None else self.zeros.to(device)
        return dataclasses.replace(self, values=self.values.to(device), scales=self.scales.to(device), zeros=zeros)

    def take_rows(self, order: Tensor) -> QuantizedWeight:
        """Returns the matrix with its outputs in another order. order: [out_features] row numbers."""
        zeros = None if self.zeros is None else self.zeros[order]
        return dataclasses.replace(self, values=self.values[order], scales=self.scales[order], zeros=zeros)

    def split(self, count: int) -> list[QuantizedWeight]:
        """Returns views of `count` matrices that stand one above the other."""
        parts = (None if part is None else part.chunk(count) for part in (self.values, self.scales, self.zeros))
        values, scales, zeros = parts
        assert values is not None
        assert scales is not None
        return [
            dataclasses.replace(self, values=values[i], scales=scales[i], zeros=None if zeros is None else zeros[i])
            for i in range(count)
        ]

    def _spread(self, per_group: Tensor) -> Tensor:
        """Returns [out_features, in_features] float32 of [out_features, groups]."""
        return per_group.float().repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]

    @staticmethod
    def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Returns matrices of one `kind` stacked into one."""
        first = parts[0]
        assert all(part.kind == first.kind for part in parts)
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return dataclasses.replace(
            first,
            values=torch.cat([part.values for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat(zeros) if zeros else None,
        )


def same_kind(weights: Sequence[QuantizedWeight]) -> bool:
    """Returns True if the matrices can form one, or be computed with by one kernel."""
    return len({weight.kind for weight in weights}) == 1


_MAX_INT8 = 127
_TINY = torch.finfo(torch.float32).tiny
"""Smallest usable scale: a group of zeros gets 1 instead."""


def quantize(weight: Tensor, scheme: QuantizationScheme) -> QuantizedWeight:
    """Returns the quantized matrix. weight: [out_features, in_features], finite; on the meta device: an outline."""
    if weight.is_meta:
        return QuantizedWeight.outline(weight.shape, kind_of(weight.shape[1], scheme))
    return quantize_int8(weight) if scheme.bits == 8 else quantize_int4(weight, group_size_for(weight.shape[1]))


def kind_of(in_features: int, scheme: QuantizationScheme) -> Kind:
    """Returns the kind of matrix that `quantize` makes for so many inputs."""
    if scheme.bits == 8:
        return Kind(bits=8, group_size=in_features, has_zeros=False, quantizes_inputs=True)
    return Kind(bits=4, group_size=group_size_for(in_features), has_zeros=False, quantizes_inputs=False)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Returns a matrix with one scale per output and values from -127 to 127; activations are quantized, too."""
    wide = weight.float()
    scales = _usable(wide.abs().amax(dim=1, keepdim=True) / _MAX_INT8)  # [out_features, 1]
    values = (wide / scales).round_().clamp_(-_MAX_INT8, _MAX_INT8).to(torch.int8)
    return QuantizedWeight(bits=8, values=values, scales=scales, group_size=weight.shape[1], quantizes_inputs=True)


def quantize_int4(weight: Tensor, group_size: int) -> QuantizedWeight:
    """Returns a matrix with one scale per group: the element farthest from 0 becomes -8, so that all sixteen values are
    used."""
    (out_features, in_features), groups = weight.shape, -(-weight.shape[1] // group_size)
    padded = functional.pad(weight.float(), (0, groups * group_size - in_features))
    grouped = padded.view(out_features, groups, group_size)
    farthest = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True))  # [out_features, groups, 1]
    scales = _usable(farthest / -8)
    values = (grouped / scales).round_().clamp_(-8, 7).to(torch.int8).view(out_features, -1)[:, :in_features]
    return QuantizedWeight(bits=4, values=values.contiguous(), scales=scales.squeeze(2), group_size=group_size)


def _usable(scales: Tensor) -> Tensor:
    return torch.where(scales.abs() < _TINY, 1.0, scales)
