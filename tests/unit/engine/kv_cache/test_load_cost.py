"""The choice between loading and computing, without a clock."""

from __future__ import annotations

import pytest

from quire.engine.kv_cache.load_cost import (
    LATE_S,
    REMEASURE_S,
    STALL_S,
    START_S,
    ComputeFit,
    LoadCost,
    count_pairs,
)
from quire.kv_store.rests import MAX_REST_S, REST_S

A, C = 0.001, 1e-7
BYTES_PER_TOKEN = 12288


def make_cost(rate: float | None = None, *, bias: float = 1.0) -> LoadCost:
    cost = LoadCost(BYTES_PER_TOKEN, min_load_tokens=32, load_bias=bias)
    for start, num_tokens in ((0, 256), (256, 256), (4096, 128), (0, 64)):
        pairs = count_pairs(start, num_tokens)
        cost.compute.add(num_tokens, pairs, num_tokens * A + C * pairs)
    if rate is not None:
        cost.note_load("disk", int(rate), 1.0, 0.0)
    return cost


def test_pairs_are_the_sum_of_what_each_token_attends_to() -> None:
    """Within half a token each: t_compute is an integral."""
    exact = sum(range(11, 11 + 20))
    assert count_pairs(10, 20) == pytest.approx(exact, abs=0.5 * 20)


def test_fit_finds_both_figures() -> None:
    assert make_cost().compute.predict(1000, 500) == pytest.approx(500 * A + C * count_pairs(1000, 500), rel=1e-6)


def test_fit_of_equal_steps_is_a_rate() -> None:
    fit = ComputeFit()
    assert fit.predict(0, 10) is None
    for _ in range(5):
        fit.add(100, count_pairs(0, 100), 0.5)
    assert fit.predict(0, 100) == pytest.approx(0.5)


def test_steps_without_time_or_tokens_are_ignored() -> None:
    fit = ComputeFit()
    fit.add(100, 0.0, 0.0)
    fit.add(0, 0.0, 1.0)
    assert fit.predict(0, 10) is None


def test_fit_follows_a_machine_that_becomes_slower() -> None:
    fit = ComputeFit()
    for seconds in [0.1] * 50 + [0.3] * 100:
        fit.add(100, count_pairs(0, 100), seconds)
    assert fit.predict(0, 100) == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize(("rate", "pays"), [(10e6, False), (13e6, True), (1e9, True)])
def test_break_even_is_where_both_take_equally_long(rate: float, pays: bool) -> None:
    """12 KiB per token of 1 ms: 12.3 MB/s, and a little more for the start."""
    assert make_cost(rate).should_load("disk", 0, 1024, 0, 0.0) is pays


def test_gain_is_convex() -> None:
    """If n tokens pay, more pay: all of a source or nothing."""
    cost = make_cost(14e6)
    paying = [cost.should_load("disk", 0, n, 0, 0.0) for n in range(32, 4096, 16)]
    assert paying == sorted(paying)


def test_few_tokens_are_computed() -> None:
    cost = make_cost(1e12)
    assert not cost.should_load("disk", 0, 31, 0, 0.0)
    assert cost.should_load("disk", 0, 32, 0, 0.0)


def test_queued_loads_speak_against_another_one() -> None:
    cost = make_cost(50e6)
    assert cost.should_load("disk", 0, 1024, 0, 0.0)
    assert not cost.should_load("disk", 0, 1024, 10_000, 0.0)


def test_bias_allows_slower_loads() -> None:
    assert make_cost(8e6, bias=2.0).should_load("disk", 0, 1024, 0, 0.0)


def test_unknown_figures_do_not_speak_against_a_load() -> None:
    assert make_cost().should_load("disk", 0, 64, 0, 0.0)
    cost = LoadCost(BYTES_PER_TOKEN)
    cost.note_load("disk", 1, 1.0, 0.0)
    assert cost.should_load("disk", 0, 64, 0, 0.0)


def test_sources_are_measured_apart() -> None:
    cost = make_cost(1e9)
    cost.note_load("p2p", 1_000_000, 1.0, 0.0)
    assert cost.should_load("disk", 0, 1024, 0, 0.0)
    assert not cost.should_load("p2p", 0, 1024, 0, 0.0)


def test_rate_is_an_average_of_which_new_loads_are_a_part() -> None:
    cost = make_cost(100.0)
    cost.note_load("disk", 200, 1.0, 0.0)
    assert cost.predict_load("disk", 1) == pytest.approx(START_S + BYTES_PER_TOKEN / 130.0)
    cost.note_load("disk", 0, 1.0, 0.0)  # nothing was read: no rate
    assert cost.predict_load("disk", 1) == pytest.approx(START_S + BYTES_PER_TOKEN / 130.0)


def test_late_is_twice_the_prediction_and_a_bit() -> None:
    cost = make_cost(float(BYTES_PER_TOKEN))
    assert cost.latest_end("disk", 10, 5) == pytest.approx(2 * (15 + START_S) + LATE_S)
    assert cost.latest_end("never measured", 10, 5) == STALL_S


def test_a_source_that_stalls_rests_longer_each_time() -> None:
    cost, now, rests = make_cost(1e9), 0.0, []
    for _ in range(6):
        cost.rests.note_fault("disk", now)
        cost.rests.note_fault("disk", now + 1.0)  # at the same time: the same stall
        start = now
        while not cost.should_load("disk", 0, 1024, 0, now):
            now += 1.0
        rests.append(now - start)
    assert rests == [REST_S, 2 * REST_S, 4 * REST_S, 8 * REST_S, MAX_REST_S, MAX_REST_S]
    cost.rests.note_good("disk", ends_rest=False)
    cost.rests.note_fault("disk", now)
    assert cost.rests.is_resting("disk", now + REST_S - 0.1)
    assert not cost.rests.is_resting("disk", now + REST_S)


def test_a_source_that_is_not_worth_its_loads_is_measured_again() -> None:
    cost = make_cost()
    cost.note_load("disk", 1, 1.0, 100.0)
    assert not cost.should_load("disk", 0, 1000, 0, 100.0 + REMEASURE_S - 1)
    assert cost.should_load("disk", 0, 1000, 0, 100.0 + REMEASURE_S)
    assert not cost.should_load("disk", 0, 1000, 0, 100.0 + REMEASURE_S), "one load measures"
    cost.note_load("disk", 1 << 30, 0.001, 101.0 + REMEASURE_S)
    assert cost.should_load("disk", 0, 1000, 0, 101.0 + REMEASURE_S)
