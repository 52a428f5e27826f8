"""A quantized matrix, whoever made it and whatever computes with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """What matrices must have in common to stand above one another in one."""

    bits: int
    group_size: int
    has_zeros: bool
    quantizes_inputs: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """w[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g] with g = i // group_size, all in float32.

    Neighbouring inputs of one output form a group; the last one may be short. A group as long as the row is one scale
    per output.
    """

    bits: int
    """4 or 8."""
    values: Tensor
    """[out_features, in_features] int8, from -2^(bits - 1) to 2^(bits - 1) - 1: unsigned formats are shifted."""
    scales: Tensor
    """[out_features, groups] float32."""
    group_size: int
    zeros: Tensor | None = None
    """[out_features, groups] int16, shifted as the values are; None for zeros."""
    quantizes_inputs: bool = False
    """Compute with int8 activations, each row quantized by its own maximum. Only with 8 bits, one scale per output and
    no zeros."""

    def __post_init__(self) -> None:
        out_features, in_features = self.values.shape
        groups = -(-in_features // self.group_size)
        assert self.bits in (4, 8)
        assert self.values.dtype == torch.int8
        assert self.scales.dtype == torch.float32
        assert self.scales.shape == (out_features, groups)
        assert self.zeros is None or (self.zeros.shape == self.scales.shape and self.zeros.dtype == torch.int16)
        assert not self.quantizes_inputs or (self.bits == 8 and groups == 1 and self.zeros is None)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        out_features, in_features = self.values.shape
        return out_features, in_features

    @property
    def kind(self) -> Kind:
        """See Kind."""
        return Kind(self.bits, self.group_size, self.zeros is not None, self.quantizes_inputs)

    @property
    def is_outline(self) -> bool:
        """Whether it says what a matrix is, and has no numbers: those are packed already."""
        return self.values.is_meta

    @staticmethod
    def outline(shape: Sequence[int], kind: Kind) -> QuantizedWeight:
        """A matrix of (out_features, in_features) without its numbers, on the meta device."""
        per_group = (shape[0], -(-shape[1] // kind.group_size))
        return QuantizedWeight(
            bits=kind.bits,
            values=torch.empty(tuple(shape), dtype=torch.int8, device="meta"),
            scales=torch.empty(per_group, dtype=torch.float32, device="meta"),
            group_size=kind.group_size,
            zeros=torch.empty(per_group, dtype=torch.int16, device="meta") if kind.has_zeros else None,
            quantizes_inputs=kind.quantizes_inputs,
        )

    @property
    def num_bytes(self) -> int:
        """Of values and scales, as a kernel that packs them tightly keeps them."""
        per_group = 4 if self.zeros is None else 8
        return self.values.numel() * self.bits // 8 + self.scales.numel() * per_group

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out_features, in_features]: the weights that the integers stand for."""
        w = self.values.float() - self._spread(self.zeros) if self.zeros is not None else self.values.float()
        return (w * self._spread(self.scales)).to(dtype)

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on `device`; an outline stays one."""
        if self.is_outline:
            return self
        zeros = None if self.zeros is None else self.zeros.to(device)
        return dataclasses.replace(self, values=self.values.to(device), scales=self.scales.to(device), zeros=zeros)

    def _spread(self, per_group: Tensor) -> Tensor:
        """[out_features, groups] to [out_features, in_features] float32."""
        return per_group.float().repeat_interleave(self.group_size, dim=1)[:, : self.values.shape[1]]

    @staticmethod
    def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Matrices of one `kind` above one another."""
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
    """Whether they can stand in one matrix, or in several that one kernel computes with."""
    return len({weight.kind for weight in weights}) == 1
