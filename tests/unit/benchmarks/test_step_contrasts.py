from __future__ import annotations

import pytest
from benchmarks.step_contrasts import RunContrast, Step, contrast_run, interval, summarize, trimmed_mean
from benchmarks.switched_scheduler import BLOCK
from hypothesis import given
from hypothesis import strategies as st


def make_steps(costs: list[float], *, drift: float = 0.0, num_outputs: int = 8, first_on: bool = False) -> list[Step]:
    """A step of 10 s plus `drift` for each before it; with statistics as many seconds more as `costs` says of those in
    turn. The frontend's part falls into the step after: half of the cost."""
    steps, now, late = [Step(0.0, first_on, num_outputs)], 0.0, 0.0
    for number, cost in enumerate(costs):
        has_statistics = (number // BLOCK % 2 == 0) == first_on
        now += 10.0 + drift * number + late + (cost / 2 if has_statistics else 0.0)
        late = cost / 2 if has_statistics else 0.0
        steps.append(Step(now, has_statistics, num_outputs))
    return steps


@given(
    cost=st.floats(-1.0, 1.0),
    drift=st.floats(0.0, 0.1),
    num_blocks=st.integers(3, 9),
    first_on=st.booleans(),
)
def test_a_known_cost_is_found_whatever_the_machine_drifts(
    cost: float, drift: float, num_blocks: int, first_on: bool
) -> None:
    run = contrast_run(make_steps([cost] * (BLOCK * num_blocks), drift=drift, first_on=first_on), 8)
    assert run is not None
    assert run.cost == pytest.approx(cost, abs=1e-9)
    assert run.num_blocks == num_blocks - 2


def test_a_step_without_statistics_is_what_costs_are_a_share_of() -> None:
    run = contrast_run(make_steps([1.0] * (BLOCK * 4)), 8)
    assert run is not None
    assert run.without == pytest.approx(10.0)


def test_steps_that_are_not_full_and_blocks_that_are_cut_are_left_out() -> None:
    steps = make_steps([1.0] * (BLOCK * 5))
    cut = [*steps[:-1], Step(steps[-1].timestamp, steps[-1].has_statistics, 7)]
    run = contrast_run(cut, 8)
    assert run is not None
    assert run.num_blocks == 2
    assert run.cost == pytest.approx(1.0)
    assert contrast_run(steps, 9) is None
    assert contrast_run(steps[: 2 * BLOCK + 1], 8) is None
    assert contrast_run([], 8) is None


def test_the_mean_without_the_tenth_at_either_end() -> None:
    assert trimmed_mean([1e9, *range(1, 9), -1e9]) == 4.5
    assert trimmed_mean([1.0, 2.0]) == 1.5


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_the_interval_lies_among_the_values(values: list[float]) -> None:
    low, high = interval(values)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_the_summary_is_in_microseconds_and_in_shares() -> None:
    summary = summarize([RunContrast(cost=0.001, without=0.1, num_blocks=12)] * 3)
    assert summary == {
        "runs": 3,
        "blocks": 36,
        "without_us_per_step": pytest.approx(1e5),
        "cost_us_per_step": pytest.approx(1e3),
        "cost": pytest.approx(0.01),
        "cost_95_percent_interval": (pytest.approx(0.01), pytest.approx(0.01)),
    }
