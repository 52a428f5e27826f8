"""The policies, choice by choice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from quire.frontend.metrics.collect.saturation import CostModel
from quire.frontend.routing.policy import (
    FEW,
    LOAD_FACTOR,
    MIN_STEPS,
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
        for _ in range(running):
            load.add_request(0)
            load.start_request(0)
        for _ in range(waiting):
            load.add_request(queued)
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
        engines[position].add_request(0)
        engines[position].start_request(0)
        reasons.add(reason)
        assert max(load.num_running for load in engines) <= max(FEW, LOAD_FACTOR * number / 3 + 1)
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
        load.note_ready(1000)
    full.note_facts(0.95, None)
    assert LeastWait().choose(routed(500), [full, empty])[0] == 1


def test_costs_are_learnt_from_the_steps() -> None:
    """An engine that takes 10 ms per row, and 1 ms per prompt token."""
    load, now = EngineLoad(0), 0.0
    for step in range(200):
        rows, prompt = 1 + step % 8, 50 * (step % 3)
        now += 0.010 * rows + 0.001 * prompt
        stats = SchedulerStats(rows, num_scheduled_tokens=rows + prompt, num_decoded_reqs=rows)
        load.note_step(now, stats)
    load.note_facts(0.0, load._costs.fit_by_token())
    assert load.predict_wait(100, 0) - load.predict_wait(0, 0) == pytest.approx(0.1, rel=0.2)
    for _ in range(4):
        load.add_request(0)
        load.start_request(0)
    assert load.predict_wait(0, 0) == pytest.approx(0.05, rel=0.3)


def choose_slowly(request: Routed, loads: Sequence[EngineLoad]) -> tuple[int, str]:
    """Returns what `LeastWait` chooses, by its formula, from what each engine has."""

    def count(load: EngineLoad) -> int:
        return load.num_running + load.others.num_running + load.num_waiting + load.others.num_waiting

    def predict(load: EngineLoad, cached: int) -> float:
        token_s = 5e-5 if load.model is None else load.model.prompt_token
        num_prompt = load.num_queued_tokens + load.others.num_queued_tokens + request.num_tokens - cached
        num_rows = count(load) + 1
        step_s = 1e-3 + num_rows * 1e-4 if load.model is None else load.model.decoding_step(num_rows)
        room = load.num_tokens_of_cache * (1.0 - load.kv_usage)
        has_room = not load.num_tokens_of_cache or request.num_tokens - cached <= room
        return num_prompt * token_s + step_s + (not has_room) + token_s * (request.num_tokens - cached)

    def weigh(index: int) -> int:
        word = (1 << 64) - 1
        x = (request.key ^ (index + 1) * 0x9E3779B97F4A7C15) & word
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        return x ^ (x >> 31)

    counts = [count(load) for load in loads]
    limit = max(2, 1.25 * (sum(counts) + 1) / len(counts) + 1)
    waits = [predict(load, cached) for load, cached in zip(loads, request.num_cached, strict=True)]
    allowed = [i for i in range(len(loads)) if counts[i] + 1 <= limit]
    least = min(waits[i] for i in allowed)
    margin = min(0.002, 0.25 * least)
    tied = [i for i in allowed if waits[i] <= least + margin]
    best = max(tied, key=lambda i: (request.num_cached[i], -counts[i], weigh(loads[i].index)))
    if min(waits) < least - margin:
        return best, "bound"
    return best, "prefix" if request.num_cached[best] else "wait"


def test_choices_are_those_of_the_formula() -> None:
    """Each event keeps up to date what a choice reads."""
    rng = random.Random(5)
    reasons = Counter[str]()
    for _ in range(60):
        engines = [EngineLoad(i) for i in rng.sample(range(70), rng.choice((1, 2, 3, 8, 30)))]
        like = rng.random() < 0.4  # equal engines are often tied
        for _ in range(8):
            for load in engines:
                has, model = rng.randrange(4), rng.choice((None, _make_model(rng)))
                tokens = 0 if like else rng.choice((0, 10, 800))
                for _ in range(has):
                    load.add_request(tokens)
                for _ in range(rng.randint(0, has)):
                    load.start_request(tokens)
                    if rng.random() < 0.5:
                        load.remove_request()
                if not like:
                    load.note_others((rng.randrange(3), rng.randrange(3), rng.choice((0, 500))))
                    load.note_ready(rng.choice((0, 2000)))
                    load.note_facts(rng.random(), model)
            num_tokens = rng.choice((1, 30, 900))
            cached = [min(num_tokens, rng.choice((0, 0, 16, num_tokens // 32 * 16))) for _ in engines]
            asked = Routed(num_tokens, rng.getrandbits(64), cached)
            position, reason = LeastWait().choose(asked, engines)
            assert (position, reason) == choose_slowly(asked, engines)
            reasons[reason] += 1
    assert min(reasons[reason] for reason in ("wait", "prefix", "bound")) > 20


def _make_model(rng: random.Random) -> CostModel:
    return CostModel(tuple(rng.random() * 1e-3 for _ in CostModel().coefficients))


def test_prompts_cost_what_they_cost_however_alike_they_are() -> None:
    """Prompts of one length, in steps that follow others: each token is worth a millisecond. Before such steps were
    seen the usual cost is assumed."""
    load, now = EngineLoad(0), 0.0
    for step in range(20 * MIN_STEPS):
        prompt = 200 if step > 2 * MIN_STEPS and step % 20 == 0 else 0
        now += 0.010 + 0.001 * prompt
        stats = SchedulerStats(1, num_scheduled_tokens=1 + prompt, num_decoded_reqs=1)
        load.note_step(now, stats)
        if step == 2 * MIN_STEPS:
            assert load.model is None
    assert load.model is not None
    assert load.predict_wait(300, 0) - load.predict_wait(300, 200) == pytest.approx(0.2, rel=0.1)


def test_the_rule_of_vllm() -> None:
    policy = VllmScore()
    engines = loads((2, 0), (0, 1))
    assert policy.choose(routed(), engines)[0] == 1
    engines[1].note_facts(0.9, None)  # 1 + 1 * 6 * 0.4 = 3.4
    assert policy.choose(routed(), engines)[0] == 0


def test_round_robin_goes_round() -> None:
    policy: RoutingPolicy = ROUTING_POLICIES["round_robin"]()
    assert [policy.choose(routed(cached=(0,) * 3), loads(*[(0, 0)] * 3))[0] for _ in range(5)] == [0, 1, 2, 0, 1]
    assert policy.choose(routed(), [EngineLoad(0), EngineLoad(2)])[0] == 1, "2 is gone through 1"
