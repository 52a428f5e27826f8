"""Another number of engines, as one engine sees it: in whatever order it is prepared, ordered and at rest."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise

import pytest

from quire.engine.elastic import ElasticEPScalingState, Resizing, ScalingEffect, Stage
from quire.errors import ClientError, ConfigError
from quire.wire.elastic import ReconfigureDistributedRequest, ReconfigureRankType

ROWS: dict[tuple[str, str], list[Stage]] = {
    ("existing", "up"): [Stage.PREPARE, Stage.SYNC_KV_CACHE_MEMORY_SIZE, Stage.COMMIT_SCALE_UP, Stage.COMPLETE],
    ("existing", "down"): [Stage.PREPARE, Stage.COMMIT_SCALE_DOWN, Stage.COMPLETE],
    ("removing", "down"): [Stage.PREPARE, Stage.COMPLETE],
}
"""The table of elastic.py."""
Path = tuple[tuple[bool, bool, bool], ...]


def runs(length: int) -> list[Path]:
    """Returns all sequences of what an engine may see: experts and order come once and stay, rest comes and goes."""
    facts = [(experts, order, rest) for experts in (False, True) for order in (False, True) for rest in (False, True)]
    paths: list[Path] = [()]
    for _ in range(length):
        paths = [
            (*path, fact)
            for path in paths
            for fact in facts
            if not path or (fact[0] >= path[-1][0] and fact[1] >= path[-1][1])
        ]
    return paths


@pytest.mark.parametrize(("worker_type", "scale_type"), ROWS)
def test_an_engine_goes_through_its_stages_and_switches_once(worker_type: str, scale_type: str) -> None:
    row = ROWS[worker_type, scale_type]
    end = ScalingEffect.END if worker_type == "removing" else ScalingEffect.SWITCH
    for path in runs(4):
        state = ElasticEPScalingState(worker_type, scale_type)  # type: ignore[arg-type]
        done: list[ScalingEffect] = []
        stages = [state.stage]
        for experts, order, rest in path:
            turn = state.progress(has_experts=experts, is_ordered=order, is_at_rest=rest)
            if end in turn.effects:
                assert experts, path
                assert order, path
                assert rest, path
            state = turn.state
            done += turn.effects
            stages.append(state.stage)
        assert all(row.index(first) <= row.index(second) for first, second in pairwise(stages)), path
        assert len(done) == len(set(done)), f"{path}: nothing is done twice"
        assert (end in done) == state.is_complete == any(map(all, path)), path
        assert (ScalingEffect.READY in done) == any(experts for experts, _, _ in path), path
        if end in done:
            assert done.index(ScalingEffect.READY) < done.index(end)


@pytest.mark.parametrize(
    ("rank", "asked", "new_size", "expected"),
    [
        (0, ReconfigureRankType.KEEP_CURRENT_RANK, 3, ("existing", "up")),
        (1, ReconfigureRankType.KEEP_CURRENT_RANK, 2, ("existing", "up")),
        (0, ReconfigureRankType.KEEP_CURRENT_RANK, 1, ("existing", "down")),
        (1, ReconfigureRankType.SHUTDOWN_CURRENT_RANK, 1, ("removing", "down")),
        (1, ReconfigureRankType.KEEP_CURRENT_RANK, 1, ("removing", "down")),
    ],
)
def test_a_request_says_what_an_engine_is(rank: int, asked: int, new_size: int, expected: tuple[str, str]) -> None:
    state = ElasticEPScalingState.for_request(ReconfigureDistributedRequest(new_size, asked), rank, 2)
    assert (state.worker_type, state.scale_type) == expected


def test_a_new_engine_takes_the_size_of_the_cache_and_joins() -> None:
    state = ElasticEPScalingState("new", "up", Stage.PRE_KV_INIT)
    stages = [state.stage, state.on_kv_size().stage, state.on_kv_size().on_join().stage]
    assert stages == [Stage.PRE_KV_INIT, Stage.PREPARE, Stage.COMPLETE]


def make_resizing(experts: Future[None] | None) -> Resizing:
    return Resizing(ReconfigureDistributedRequest(3), 1, 2, experts)


def test_experts_that_cannot_be_read_are_reported_and_nothing_follows() -> None:
    experts = Future[None]()
    resizing = make_resizing(experts)
    assert resizing.progress(is_at_rest=True) == ()
    experts.set_exception(ConfigError("too few"))
    resizing.is_ordered = True
    for _ in range(2):
        assert resizing.progress(is_at_rest=True) == ()
    with pytest.raises(ConfigError, match="too few"):
        resizing.prepared.result(0)
    assert not resizing.is_complete


def test_what_is_prepared_may_be_discarded_before_the_order_only() -> None:
    experts = Future[None]()
    experts.set_result(None)
    given_up, ordered = make_resizing(Future()), make_resizing(experts)
    given_up.discard()
    with pytest.raises(ClientError, match="was given up"):
        given_up.prepared.result(0)
    assert given_up.progress(is_at_rest=True) == ()
    assert ordered.progress(is_at_rest=False) == ()
    assert ordered.prepared.result(0) == "eep_ready/1"
    ordered.is_ordered = True
    with pytest.raises(ClientError, match="cannot be discarded any more"):
        ordered.discard()
    assert ordered.progress(is_at_rest=False) == (ScalingEffect.PAUSE,)
    assert ordered.progress(is_at_rest=False) == ()
    assert ordered.progress(is_at_rest=True) == (ScalingEffect.SWITCH,)
