"""Ranks and groups against formulas that are written out, over all small sizes."""

from __future__ import annotations

import itertools

import pytest

from quire.wire.topology import Group, GroupKind, Place, Topology, layers_of_stage

SIZES = list(itertools.product((1, 2, 3), repeat=4))


@pytest.mark.parametrize(("dp", "pp", "pcp", "tp"), SIZES)
def test_ranks_count_tensor_parts_first(dp: int, pp: int, pcp: int, tp: int) -> None:
    topology = Topology(tp=tp, pp=pp, dp=dp, pcp=pcp)
    places = [Place(*p) for p in itertools.product(range(dp), range(pp), range(pcp), range(tp))]
    assert [topology.rank_of(p) for p in places] == list(range(topology.num_workers))
    assert [topology.place_of(r) for r in range(topology.num_workers)] == places
    assert topology.output_rank == topology.rank_of(Place(0, pp - 1, 0, 0))
    assert [topology.is_driver(r) for r in range(topology.num_workers)] == [p.tp == 0 for p in places]


@pytest.mark.parametrize("kind", list(GroupKind))
@pytest.mark.parametrize(("dp", "pp", "pcp", "tp"), SIZES)
def test_groups_divide_the_workers(kind: GroupKind, dp: int, pp: int, pcp: int, tp: int) -> None:
    topology = Topology(tp=tp, pp=pp, dp=dp, pcp=pcp)
    size = {"world": pp * pcp * tp, "tp": tp, "pp": pp, "dp": dp, "ep": dp * pcp * tp}[kind]
    seen: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.num_workers):
        group = topology.group(kind, rank)
        assert (group.size, group.rank) == (size, rank)
        assert group.ranks == tuple(sorted(group.ranks))
        seen.setdefault(group.ranks, []).append(rank)
    assert all(list(ranks) == members for ranks, members in seen.items()), "members see the same group"


def test_groups_of_a_mixed_server() -> None:
    topology = Topology(tp=2, pp=2, dp=2)
    assert topology.group(GroupKind.TENSOR, 5) == Group(GroupKind.TENSOR, (4, 5), 1)
    assert topology.group(GroupKind.PIPELINE, 5).ranks == (5, 7)
    assert topology.group(GroupKind.DATA, 5).ranks == (1, 5)
    assert topology.group(GroupKind.EXPERT, 5).ranks == (0, 1, 4, 5)
    assert topology.worker_title(6) == "Worker_DP1_PP1_TP0"
    assert Topology(tp=2, expert_parallel=True).worker_title(1) == "Worker_TP1_EP1"
    assert Topology().worker_title(0) == "Worker"


@pytest.mark.parametrize("count", [0, 1, 5, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_even_and_complete(count: int, size: int) -> None:
    group = Group(GroupKind.TENSOR, tuple(range(size)), 0)
    shares = [group.share(count, i) for i in range(size)]
    assert [i for start, end in shares for i in range(start, end)] == list(range(count))
    assert max(e - s for s, e in shares) - min(e - s for s, e in shares) <= 1


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(28, 2, [14, 14]), (29, 2, [15, 14]), (10, 4, [2, 3, 3, 2]), (3, 3, [1, 1, 1])]
)
def test_layers_left_over_go_before_the_last_stage(layers: int, stages: int, counts: list[int]) -> None:
    parts = [layers_of_stage(layers, stages, stage) for stage in range(stages)]
    assert [end - start for start, end in parts] == counts
    assert [i for start, end in parts for i in range(start, end)] == list(range(layers))


def test_a_partition_of_ones_own() -> None:
    assert [layers_of_stage(10, 2, s, (3, 7)) for s in (0, 1)] == [(0, 3), (3, 10)]
    for wrong in ((3, 6), (10,), (0, 10)):
        with pytest.raises(ValueError, match="does not divide 10 layers"):
            layers_of_stage(10, 2, 0, wrong)
    with pytest.raises(ValueError, match="2 layers are too few for 3 stages"):
        layers_of_stage(2, 3, 0)


def test_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2 workers"):
        Topology(tp=2).place_of(2)
    with pytest.raises(ValueError, match="every size must be at least 1"):
        Topology(tp=0)
