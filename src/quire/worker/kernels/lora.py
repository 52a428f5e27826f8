"""Low-rank adapters of linear maps: y = finish(x W^T + scale * (x A^T) B^T).

A *site* is one linear map that adapters may change. `AdapterBatch` says which rows of a step have which adapter, by
slot; each `AdapterSite` holds what the adapters in these slots do at its map. A kernel gets its site once; what changes
between steps is the content of the batch and of the sites.

* The product of A and B joins the float32 sum before bias, divisor, cap, activation and gate. Where the model's type is
  bfloat16, scale * (x A^T) is rounded to it.
* A row without adapter has the bits it has without a site. On native kernels a row with an adapter depends on its own
  inputs and on that adapter only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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


def validate_parts(parts: Sequence[LowRank | None], in_features: int, part_sizes: Sequence[int]) -> None:
    """Raises ValueError unless there is a part for each size, and its shapes fit."""
    if len(parts) != len(part_sizes):
        raise ValueError(f"{len(parts)} parts do not fit a site of {len(part_sizes)}")
    for part, size in zip(parts, part_sizes, strict=True):
        if part is None:
            continue
        rank = part.a.shape[0]
        if rank < 1 or part.a.shape != (rank, in_features) or part.b.shape != (size, rank):
            raise ValueError(
                f"factors of {tuple(part.a.shape)} and {tuple(part.b.shape)} do not fit a map of {in_features} inputs "
                f"and {size} outputs"
            )
        if part.bias is not None and part.bias.shape != (size,):
            raise ValueError(f"a bias of {tuple(part.bias.shape)} does not fit a map of {size} outputs")
