"""Low-rank adapters of linear maps: y = finish(x W^T + scale * (x A^T) B^T). The types of the seam, and the torch twin.

A *site* is one linear map that adapters may change. `AdapterBatch` says which rows of a step have which adapter, by
slot; each `AdapterSite` holds what the adapters in these slots do at its map. A kernel gets its site once; what changes
between steps is the content of the batch and of the sites.

* The product of A and B joins the float32 sum before bias, divisor, cap, activation and gate. Where the model's type is
  bfloat16, scale * (x A^T) is rounded to it.
* A row without adapter has the bits it has without a site. On native kernels a row with an adapter depends on its own
  inputs and on that adapter only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRankShape:
    """Sizes of a site."""

    in_features: int
    parts: tuple[int, ...]
    """Rows of the weight from top to bottom, by what an adapter may change by itself: q, k, v; gate, up; or all."""
    gated: bool
    dtype: torch.dtype
    groups: int = 1
    """Number of such maps, each on rows of its own: the experts of a mixture."""

    @property
    def num_parts(self) -> int:
        """Number of parts of all groups."""
        return len(self.parts) * self.groups

    def is_like(self, other: LowRankShape) -> bool:
        """Returns whether the maps are the same, however they are divided into parts."""
        return dataclasses.replace(self, parts=(sum(self.parts),)) == dataclasses.replace(
            other, parts=(sum(other.parts),)
        )


@dataclass(frozen=True)
class LowRank:
    """One adapter's change of one part of a site."""

    a: Tensor
    """[rank, in_features]"""
    b: Tensor
    """[rows of the part, rank]"""
    scale: float
    """Factor of the product, and of the bias."""
    bias: Tensor | None = None
    """[rows of the part], added to the product."""


Take = Callable[[int], Tensor]
"""Function that returns so many bytes of unfilled memory, uint8 at a multiple of 64."""


class PackedLowRank(Protocol):
    """One adapter's change of one site, in the form its kernels read."""

    @property
    def num_bytes(self) -> int:
        """Size of the memory it keeps."""
        ...

    @property
    def rank(self) -> int:
        """Largest rank of its parts."""
        ...


class AdapterBatch(Protocol):
    """Which rows of a step have which adapter."""

    def set(self, starts: Sequence[int], slots: Sequence[int]) -> None:
        """Divides the rows into segments: rows starts[i] to starts[i + 1] have the adapter in slots[i], or none if that
        is -1. `starts` begins with 0 and ascends; rows behind the last segment have no adapter."""
        ...

    def clear(self) -> None:
        """Removes all segments: no row has an adapter."""
        ...


class AdapterSite(Protocol):
    """The adapters of one linear map, by slot."""

    def install(self, slot: int, packed: PackedLowRank | None) -> None:
        """Puts an adapter's part into a slot; None empties the slot. Never called while a kernel runs."""
        ...


def validate_parts(parts: Sequence[LowRank | None], shape: LowRankShape) -> None:
    """Raises ValueError unless there is a part for each size of each group, and its shapes fit."""
    if len(parts) != shape.num_parts:
        raise ValueError(f"{len(parts)} parts do not fit a site of {shape.num_parts}")
    for part, size in zip(parts, [*shape.parts] * shape.groups, strict=True):
        if part is None:
            continue
        rank = part.a.shape[0]
        if rank < 1 or part.a.shape != (rank, shape.in_features) or part.b.shape != (size, rank):
            raise ValueError(
                f"factors of {tuple(part.a.shape)} and {tuple(part.b.shape)} do not fit a map of {shape.in_features} "
                f"inputs and {size} outputs"
            )
        if part.bias is not None and part.bias.shape != (size,):
            raise ValueError(f"a bias of {tuple(part.bias.shape)} does not fit a map of {size} outputs")


class TorchAdapterBatch:
    """The segments of a step: AdapterBatch."""

    def __init__(self) -> None:
        self.starts: Sequence[int] = (0,)
        self.slots: Sequence[int] = ()

    def set(self, starts: Sequence[int], slots: Sequence[int]) -> None:
        assert len(starts) == len(slots) + 1
        assert starts[0] == 0
        self.starts, self.slots = tuple(starts), tuple(slots)

    def clear(self) -> None:
        self.starts, self.slots = (0,), ()


class TorchLowRank:
    """The parts of a site: PackedLowRank."""

    def __init__(self, parts: Sequence[LowRank | None], shape: LowRankShape) -> None:
        """Raises ValueError if a part's shapes do not fit."""
        validate_parts(parts, shape)
        self._sizes, self._dtype = shape.parts, shape.dtype
        dtype = shape.dtype
        self._parts = [
            None if part is None else LowRank(part.a.to(dtype), part.b.to(dtype), part.scale, part.bias)
            for part in parts
        ]

    @property
    def num_bytes(self) -> int:
        tensors = [t for part in self._parts if part is not None for t in (part.a, part.b, part.bias) if t is not None]
        return sum(t.nbytes for t in tensors)

    @property
    def rank(self) -> int:
        return max((part.a.shape[0] for part in self._parts if part is not None), default=0)

    def multiply(self, x: Tensor, group: int = 0) -> Tensor:
        """Returns what the adapter adds to the float32 sums of one matrix. x: [n, in_features]; returns [n, rows of all
        its parts]."""
        parts = self._parts_of(group)
        return self._expand(x, parts, [None if part is None else x.float() @ part.a.float().T for part in parts])

    def look_up(self, ids: Tensor) -> Tensor:
        """Returns the same for rows that are 1 at `ids`, [n], and 0 elsewhere."""
        parts = self._parts
        return self._expand(ids, parts, [None if part is None else part.a[:, ids].T.float() for part in parts])

    def _parts_of(self, group: int) -> Sequence[LowRank | None]:
        return self._parts[group * len(self._sizes) : (group + 1) * len(self._sizes)]

    def _expand(self, rows: Tensor, parts: Sequence[LowRank | None], products: Sequence[Tensor | None]) -> Tensor:
        sums = []
        for part, size, product in zip(parts, self._sizes, products, strict=True):
            if part is None or product is None:
                sums.append(torch.zeros(len(rows), size, device=rows.device))
                continue
            h = (product * part.scale).to(self._dtype).float()  # [n, rank]
            y = h @ part.b.float().T
            sums.append(y if part.bias is None else y + part.bias.float() * part.scale)
        return torch.cat(sums, dim=1)


class TorchAdapterSite:
    """The adapters of one linear map: AdapterSite."""

    def __init__(self, batch: AdapterBatch) -> None:
        assert isinstance(batch, TorchAdapterBatch)
        self._batch = batch
        self._by_slot: dict[int, TorchLowRank] = {}

    def install(self, slot: int, packed: PackedLowRank | None) -> None:
        if packed is None:
            self._by_slot.pop(slot, None)
        else:
            assert isinstance(packed, TorchLowRank)
            self._by_slot[slot] = packed

    def segments(self, num_rows: int) -> Iterator[tuple[slice, TorchLowRank]]:
        """Yields the rows that have an adapter here, among the first `num_rows`, and the adapter's part."""
        batch = self._batch
        for start, end, slot in zip(batch.starts, batch.starts[1:], batch.slots, strict=False):
            low_rank, end = self._by_slot.get(slot), min(end, num_rows)
            if low_rank is not None and start < end:
                yield slice(start, end), low_rank
