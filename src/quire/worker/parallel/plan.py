"""Which part of a model each of several workers has. Pure: sizes in, ranges out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.wire.topology import Group, layers_of_stage

UNITS = (64, 32, 16)
"""Outputs that stay together, the best first: panels of quantized weights, cache lines, blocks of packed weights."""


@dataclass(frozen=True)
class Stage:
    """Place of a worker in a pipeline."""

    index: int
    count: int
    partition: tuple[int, ...] = ()
    """Number of layers of each stage; empty: as even as possible."""

    @property
    def is_first(self) -> bool:
        """True for the stage that reads token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that makes logits."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Returns the numbers of its layers. Raises ConfigError if the layers cannot be divided so."""
        try:
            return range(*layers_of_stage(num_layers, self.count, self.index, self.partition))
        except ValueError as e:
            raise ConfigError(f"--pipeline-parallel-size {self.count}: {e}") from None


@dataclass(frozen=True)
class HeadShare:
    """Adjacent heads of one worker: query heads, and the key/value heads that they read. Query head i of the share
    reads key/value head i // (num_heads / num_kv_heads) of it."""

    heads: range
    kv_heads: range
    all_heads: int
    all_kv_heads: int

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return len(self.heads)

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return len(self.kv_heads)

    def rows(self, size: int) -> Tensor:
        """Returns the numbers of the share's rows among `size`, of which all query heads have the same number."""
        return torch.arange(*self._bounds(self.heads, size // self.all_heads), device="cpu")

    def kv_rows(self, size: int) -> Tensor:
        """Returns the same for key/value heads."""
        return torch.arange(*self._bounds(self.kv_heads, size // self.all_kv_heads), device="cpu")

    def columns(self, x: Tensor) -> Tensor:
        """Returns the share's columns of x: [n, size], of which all query heads have the same number."""
        return x[:, slice(*self._bounds(self.heads, x.shape[1] // self.all_heads))]

    def kv_columns(self, x: Tensor) -> Tensor:
        """Returns the same for key/value heads."""
        return x[:, slice(*self._bounds(self.kv_heads, x.shape[1] // self.all_kv_heads))]

    @staticmethod
    def _bounds(heads: range, unit: int) -> tuple[int, int]:
        return heads.start * unit, heads.stop * unit


def share_outputs(group: Group, num_outputs: int) -> tuple[int, int]:
    """Returns the start and the end of a worker's part of a layer's outputs: whole blocks where there are enough."""
    unit = next((unit for unit in UNITS if num_outputs >= 4 * unit * group.size), 1)
    if unit == 1 and num_outputs >= UNITS[-1] * group.size:
        unit = UNITS[-1]
    start, end = group.share(-(-num_outputs // unit))
    return start * unit, min(num_outputs, end * unit)


def share_experts(group: Group, num_experts: int, placement: str) -> tuple[Sequence[int], int, list[int] | None]:
    """Returns a worker's whole experts, their place in the order in which each worker's are adjacent, and that order:
    the place of each expert; None for the order of their numbers. The first workers have one more where the number of
    experts is no multiple. `placement`: linear or round_robin."""
    size, (each, rest) = group.size, divmod(num_experts, group.size)
    firsts = [rank * each + min(rank, rest) for rank in range(size + 1)]
    first = firsts[group.index]
    if placement == "linear":
        return range(first, firsts[group.index + 1]), first, None
    places = [firsts[expert % size] + expert // size for expert in range(num_experts)]
    return range(group.index, num_experts, size), first, places


def share_heads(group: Group, num_heads: int, num_kv_heads: int) -> HeadShare:
    """Returns a worker's heads. With as many key/value heads as workers, or more, each gets whole groups of query
    heads; with fewer, workers share a group: each reads the same keys and values with heads of its own.

    Raises ConfigError for more workers than heads.
    """
    size, per_kv = group.size, num_heads // num_kv_heads
    if size > num_heads:
        raise ConfigError(
            f"--tensor-parallel-size {size}: the model has {num_heads} attention heads, and a worker needs one at "
            f"least; use {num_heads} or less"
        )
    if size <= num_kv_heads:
        start, end = group.share(num_kv_heads)
        return HeadShare(range(start * per_kv, end * per_kv), range(start, end), num_heads, num_kv_heads)
    kv_head = next(i for i in range(num_kv_heads) if (i + 1) * size // num_kv_heads > group.index)
    first, last = kv_head * size // num_kv_heads, (kv_head + 1) * size // num_kv_heads
    place, sharers = group.index - first, last - first
    heads = range(kv_head * per_kv + place * per_kv // sharers, kv_head * per_kv + (place + 1) * per_kv // sharers)
    return HeadShare(heads, range(kv_head, kv_head + 1), num_heads, num_kv_heads)
