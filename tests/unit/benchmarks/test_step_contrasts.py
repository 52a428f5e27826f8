from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.step_contrasts import LEFT_OUT, RunContrast, Step, contrast_run, interval, summarize, trimmed_mean
from benchmarks.switched_scheduler import BLOCK, Order
from hypothesis import given
from hypothesis import strategies as st


def make_steps(
    num_steps: int,
    cost: float,
    *,
    turns: Order = Order.OFF_FIRST,
    own: Callable[[int], float] = lambda _: 0.0,
) -> list[Step]:
    """Steps of 8 outputs that take 10 s and something of their `own` by their number; with statistics `cost` seconds
    more, of which half is the frontend's and falls into the step after."""
    steps, now, late = [Step(0.0, turns.are_on(0), 8)], 0.0, 0.0
    for number in range(num_steps):
        has_statistics = turns.are_on(number)
        now += 10.0 + own(number) + late + (cost / 2 if has_statistics else 0.0)
        late = cost / 2 if has_statistics else 0.0
        steps.append(Step(now, has_statistics, 8))
    return steps


@given(
    cost=st.floats(-1.0, 1.0),
    drift=st.floats(0.0, 0.1),
    num_blocks=st.integers(3, 9),
    turns=st.sampled_from(Order),
)
def test_a_known_cost_is_found_whatever_the_machine_drifts(
    cost: float, drift: float, num_blocks: int, turns: Order
) -> None:
    run = contrast_run(make_steps(BLOCK * num_blocks, cost, turns=turns, own=lambda number: drift * number), 8)
    assert run is not None
    assert run.contrasts == pytest.approx([cost] * (num_blocks - 2), abs=1e-9)


@given(cost=st.floats(-1.0, 1.0), own=st.lists(st.floats(0.0, 5.0), min_size=3 * BLOCK, max_size=9 * BLOCK))
def test_a_known_cost_is_found_in_two_runs_whatever_each_step_takes_of_its_own(cost: float, own: list[float]) -> None:
    first, second = (contrast_run(make_steps(len(own), cost, turns=turns, own=own.__getitem__), 8) for turns in Order)
    assert first is not None
    assert second is not None
    both = first.join(second)
    assert len(both.contrasts) == 2 * (len(own) // BLOCK - 2)
    for left_out in (0.0, 0.1, LEFT_OUT):
        assert trimmed_mean(both.contrasts, left_out) == pytest.approx(cost, abs=1e-9)


def test_one_run_alone_takes_what_keeps_time_with_the_turns_for_a_cost() -> None:
    slow_every_other_block = [4.0 if Order.ON_FIRST.are_on(number) else 0.0 for number in range(6 * BLOCK)]
    run = contrast_run(make_steps(6 * BLOCK, 1.0, turns=Order.ON_FIRST, own=slow_every_other_block.__getitem__), 8)
    assert run is not None
    assert run.contrasts == pytest.approx([5.0] * 4)


def test_a_step_without_statistics_is_what_costs_are_a_share_of() -> None:
    run = contrast_run(make_steps(BLOCK * 4, 1.0), 8)
    assert run is not None
    assert run.without == pytest.approx(10.0)


def test_steps_that_are_not_full_and_blocks_that_are_cut_are_left_out() -> None:
    steps = make_steps(BLOCK * 5, 1.0)
    cut = [*steps[:-1], Step(steps[-1].timestamp, steps[-1].has_statistics, 7)]
    run = contrast_run(cut, 8)
    assert run is not None
    assert run.contrasts == pytest.approx([1.0] * 2)
    assert contrast_run(steps, 9) is None
    assert contrast_run(steps[: 2 * BLOCK + 1], 8) is None
    assert contrast_run([], 8) is None


def test_the_mean_without_the_tenth_at_either_end() -> None:
    assert trimmed_mean([1e9, *range(1, 9), -1e9]) == 4.5
    assert trimmed_mean([1.0, 2.0]) == 1.5

    assert trimmed_mean([1e9, 1e9, 3.0, 4.0, 5.0, 6.0, -1e9, -1e9], 0.25) == 4.5


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=3), min_size=1, max_size=10))
def test_the_interval_lies_among_the_values(clusters: list[list[float]]) -> None:
    values = [value for cluster in clusters for value in cluster]
    low, high = interval(clusters)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_what_always_comes_together_makes_the_interval_no_smaller() -> None:
    values = [float(number % 7) for number in range(40)]
    assert interval([[value] * 5 for value in values]) == pytest.approx(interval([[value] for value in values]))


def test_a_moment_of_something_else_does_not_count_and_the_rest_is_in_shares() -> None:
    summary = summarize([RunContrast([0.001, 0.001, 0.001, 0.101], 0.1)] * 3)
    assert summary == {
        "pairs_of_runs": 3,
        "blocks": 12,
        "without_us_per_step": pytest.approx(1e5),
        "cost_us_per_step": pytest.approx(1e3),
        "cost": pytest.approx(0.01),
        "cost_95_percent_interval": (pytest.approx(0.01), pytest.approx(0.01)),
        "cost_of_all_blocks": pytest.approx(0.26),
    }
