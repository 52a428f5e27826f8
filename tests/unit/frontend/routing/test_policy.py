"""The policies, choice by choice."""

from __future__ import annotations

import pytest

from quire.frontend.routing.policy import (
    LOAD_FACTOR,
    ROUTING_POLICIES,
    EngineLoad,
    LeastWait,
    Routed,
    RoutingPolicy,
    VllmScore,
)
from quire.wire.stats import SchedulerStats


def loads(*counts: tuple[int, int], queued: int = 0) -> list[EngineLoad]:
    """Engines with so many (running, waiting) requests."""
    made = []
    for index, (running, waiting) in enumerate(counts):
        load = EngineLoad(index)
        load.num_running, load.num_waiting, load.num_queued_tokens = running, waiting, queued * waiting
        made.append(load)
    return made


def routed(num_tokens: int = 100, key: int = 7, cached: tuple[int, ...] = (0, 0)) -> Routed:
    return Routed(num_tokens, key, cached)


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_every_policy_chooses_among_what_there_is(name: str) -> None:
    policy = ROUTING_POLICIES[name]()
    for count in (1, 2, 5):
        position, _ = policy.choose(routed(cached=(0,) * count), loads(*[(0, 0)] * count))
        assert 0 <= position < count


def test_the_shortest_queue_is_chosen() -> None:
    assert LeastWait().choose(routed(), loads((1, 2), (1, 1), queued=1000)) == (1, "wait")


def test_a_cached_prefix_is_worth_the_time_it_saves() -> None:
    long = routed(4000, cached=(3900, 0))
    assert LeastWait().choose(long, loads((1, 0), (0, 0))) == (0, "prefix")
    assert LeastWait().choose(long, loads((0, 1), (0, 0), queued=10_000)) == (1, "wait"), "its queue costs more"


def test_no_engine_gets_far_more_than_the_others() -> None:
    """However good its cache is."""
    policy, engines = LeastWait(), loads((0, 0), (0, 0), (0, 0))
    reasons = set()
    for number in range(1, 300):
        position, reason = policy.choose(routed(4000, cached=(4000, 0, 0)), engines)
        engines[position].num_running += 1
        reasons.add(reason)
        assert max(load.num_running for load in engines) <= LOAD_FACTOR * number / 3 + 1
    assert reasons == {"prefix", "bound", "wait"} or reasons == {"prefix", "bound"}


def test_ties_are_stable_and_a_new_engine_takes_its_share_only() -> None:
    policy = LeastWait()
    before = [policy.choose(routed(key=key, cached=(0,) * 4), loads(*[(0, 0)] * 4))[0] for key in range(400)]
    again = [policy.choose(routed(key=key, cached=(0,) * 4), loads(*[(0, 0)] * 4))[0] for key in range(400)]
    grown = [policy.choose(routed(key=key, cached=(0,) * 5), loads(*[(0, 0)] * 5))[0] for key in range(400)]
    assert before == again
    assert all(before.count(engine) > 60 for engine in range(4))
    moved = [(old, new) for old, new in zip(before, grown, strict=True) if old != new]
    assert {new for _, new in moved} == {4}
    assert 40 < len(moved) < 120


def test_a_prompt_that_does_not_fit_waits() -> None:
    full, empty = loads((0, 0), (1, 0))
    for load in (full, empty):
        load.num_tokens_of_cache = 1000
    full.kv_usage = 0.95
    assert LeastWait().choose(routed(500), [full, empty])[0] == 1


def test_costs_are_learnt_from_the_steps() -> None:
    """An engine that takes 10 ms per row, and 1 ms per prompt token."""
    load, now = EngineLoad(0), 0.0
    for step in range(200):
        rows, prompt = 1 + step % 8, 50 * (step % 3)
        now += 0.010 * rows + 0.001 * prompt
        stats = SchedulerStats(rows, num_scheduled_tokens=rows + prompt, num_decoded_reqs=rows)
        load.note_step(now, stats)
    load.model = load._costs.fit()
    assert load.predict_wait(100, 0) - load.predict_wait(0, 0) == pytest.approx(0.1, rel=0.2)
    load.num_running = 4
    assert load.predict_wait(0, 0) == pytest.approx(0.05, rel=0.3)


def test_the_rule_of_vllm() -> None:
    policy = VllmScore()
    engines = loads((2, 0), (0, 1))
    assert policy.choose(routed(), engines)[0] == 1
    engines[1].kv_usage = 0.9  # 1 + 1 * 6 * 0.4 = 3.4
    assert policy.choose(routed(), engines)[0] == 0


def test_round_robin_goes_round() -> None:
    policy: RoutingPolicy = ROUTING_POLICIES["round_robin"]()
    assert [policy.choose(routed(cached=(0,) * 3), loads(*[(0, 0)] * 3))[0] for _ in range(5)] == [0, 1, 2, 0, 1]
    assert policy.choose(routed(), [EngineLoad(0), EngineLoad(2)])[0] == 1, "2 is gone through 1"
