"""Schedules: the arrivals' mean, spread and repeatability."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.bench.workloads import ALL_AT_ONCE, EVENLY, arrival_times


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise([0.0, *times])]


@settings(derandomize=True)
@given(st.floats(0.1, 100.0), st.integers(0, 1000))
def test_arrivals_are_those_of_a_poisson_process(rate: float, seed: int) -> None:
    times = arrival_times(rate, 400, seed)
    assert times == arrival_times(rate, 400, seed)
    assert min(gaps(times)) >= 0
    assert statistics.fmean(gaps(times)) * rate == pytest.approx(1.0, rel=0.3)  # six standard deviations
    assert arrival_times(ALL_AT_ONCE, 3, seed) == [0.0, 0.0, 0.0]


@settings(derandomize=True)
@given(st.floats(0.1, 100.0), st.integers(1, 50))
def test_even_arrivals_have_equal_gaps(rate: float, count: int) -> None:
    assert gaps(arrival_times(rate, count, 0, EVENLY)) == pytest.approx([1 / rate] * count)


@settings(derandomize=True)
@given(st.integers(0, 1000))
def test_burstiness_is_the_inverse_of_the_squared_variation(seed: int) -> None:
    """A gamma distribution of shape k has a coefficient of variation of 1/sqrt(k)."""

    def variation(burstiness: float) -> float:
        found = gaps(arrival_times(10.0, 2000, seed, burstiness))
        assert statistics.fmean(found) == pytest.approx(0.1, rel=0.3)
        return statistics.stdev(found) / statistics.fmean(found)

    bursts, poisson, even = variation(0.25), variation(1.0), variation(4.0)
    assert bursts > 1.4 > poisson > 0.7 > even
