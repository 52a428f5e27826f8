"""Ranks and groups: which workers there are and which of them work together.

A `Topology` holds sizes only; groups and ranks are computed from them. Every process of a server computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class GroupKind(StrEnum):
    """Purpose of a group of workers."""

    WORLD = "world"
    """All workers of one engine."""
    TENSOR = "tp"
    """Workers that share each layer of one stage."""
    PIPELINE = "pp"
    """The same part of every stage."""
    DATA = "dp"
    """The same worker of every engine."""
    EXPERT = "ep"
    """Workers of one stage, of all engines: those that share experts."""


@dataclass(frozen=True)
class Group:
    """Workers that work together, as one of them sees it. `ranks` are global and ascending."""

    kind: GroupKind
    ranks: tuple[int, ...]
    index: int
    """Place of this worker among `ranks`."""

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Global rank of this worker."""
        return self.ranks[self.index]

    def share(self, count: int, index: int | None = None) -> tuple[int, int]:
        """Returns the start and the end of a worker's part of `count` things; parts differ by one at most."""
        place = self.index if index is None else index
        return place * count // self.size, (place + 1) * count // self.size


class Place(NamedTuple):
    """Place of a worker: its engine, stage, context part and tensor part."""

    dp: int
    pp: int
    pcp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """Sizes of all kinds of parallelism. Global rank = ((dp * PP + pp) * PCP + pcp) * TP + tp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    pcp: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.pcp) < 1:
            raise ValueError(f"every size must be at least 1: {self}")

    @property
    def world_size(self) -> int:
        """Number of workers of one engine."""
        return self.tp * self.pp * self.pcp

    @property
    def num_workers(self) -> int:
        """Number of workers of all engines."""
        return self.dp * self.world_size

    @property
    def output_rank(self) -> int:
        """Rank, within its engine, of the worker whose outputs are used: the first of the last stage."""
        return self.world_size - self.tp * self.pcp

    def rank_of(self, place: Place) -> int:
        """Returns the global rank of a place."""
        return ((place.dp * self.pp + place.pp) * self.pcp + place.pcp) * self.tp + place.tp

    def place_of(self, rank: int) -> Place:
        """Returns the place of a global rank. Raises ValueError for a rank that does not exist."""
        if not 0 <= rank < self.num_workers:
            raise ValueError(f"rank {rank} is not one of {self.num_workers} workers")
        rest, tp = divmod(rank, self.tp)
        rest, pcp = divmod(rest, self.pcp)
        dp, pp = divmod(rest, self.pp)
        return Place(dp, pp, pcp, tp)

    def is_driver(self, rank: int) -> bool:
        """Returns whether a worker is the first of its tensor-parallel group."""
        return rank % self.tp == 0

    def group(self, kind: GroupKind, rank: int) -> Group:
        """Returns the group of `kind` that the worker of a global rank belongs to."""
        place = self.place_of(rank)
        dp, pp, pcp, tp = (range(n) for n in (self.dp, self.pp, self.pcp, self.tp))
        own = range(place.dp, place.dp + 1), range(place.pp, place.pp + 1), range(place.pcp, place.pcp + 1)
        last = range(place.tp, place.tp + 1)
        axes = {
            GroupKind.WORLD: (own[0], pp, pcp, tp),
            GroupKind.TENSOR: (own[0], own[1], own[2], tp),
            GroupKind.PIPELINE: (own[0], pp, own[2], last),
            GroupKind.DATA: (dp, own[1], own[2], last),
            GroupKind.EXPERT: (dp, own[1], pcp, tp),
        }[kind]
        ranks = tuple(
            self.rank_of(Place(d, p, c, t)) for d in axes[0] for p in axes[1] for c in axes[2] for t in axes[3]
        )
        return Group(kind, ranks, ranks.index(rank))

    def worker_title(self, rank: int) -> str:
        """Returns the name of a worker's process."""
        place = self.place_of(rank)
        parts = [("DP", place.dp, self.dp), ("PP", place.pp, self.pp), ("PCP", place.pcp, self.pcp)]
        parts += [("TP", place.tp, self.tp)]
        if self.expert_parallel:
            group = self.group(GroupKind.EXPERT, rank)
            parts.append(("EP", group.index, group.size))
        return "Worker" + "".join(f"_{name}{index}" for name, index, size in parts if size > 1)


def layers_of_stage(num_layers: int, num_stages: int, stage: int, partition: tuple[int, ...] = ()) -> tuple[int, int]:
    """Returns the first layer of a stage and the first after it. Layers that are left over go, one each, to the stages
    before the last. `partition` are the stages' numbers of layers. Raises ValueError where they do not fit."""
    if partition and (len(partition) != num_stages or sum(partition) != num_layers or min(partition) < 1):
        raise ValueError(f"{partition} does not divide {num_layers} layers among {num_stages} stages")
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers are too few for {num_stages} stages")
    each, rest = divmod(num_layers, num_stages)
    counts = list(partition) or [each] * num_stages
    for i in range(rest if not partition else 0):
        counts[num_stages - 2 - i] += 1
    return sum(counts[:stage]), sum(counts[: stage + 1])
