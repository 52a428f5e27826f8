"""The search for a saturating rate, against thresholds that are known."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.bench.outcomes import RateSearch


def search(first: float, tolerance: float, is_sustained: Callable[[float], bool], max_probes: int = 60) -> RateSearch:
    found = RateSearch(first, tolerance, max_probes)
    while (rate := found.next_rate()) is not None:
        found.record(rate, is_sustained=is_sustained(rate))
    return found


@settings(derandomize=True)
@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0.01, 1.0))
def test_it_encloses_the_threshold(threshold: float, first: float, tolerance: float) -> None:
    found = search(first, tolerance, lambda rate: rate <= threshold)
    assert found.sustained is not None
    assert found.failed is not None
    assert found.sustained <= threshold < found.failed
    assert found.failed <= found.sustained * (1 + tolerance)


@settings(derandomize=True)
@given(st.lists(st.booleans(), min_size=16, max_size=16), st.floats(0.01, 100.0))
def test_whatever_the_verdicts_it_ends_and_keeps_its_order(verdicts: list[bool], first: float) -> None:
    answers = iter(verdicts)
    found = search(first, 0.05, lambda rate: next(answers), max_probes=16)
    assert found.num_probes <= 16
    if found.sustained is not None and found.failed is not None:
        assert found.sustained < found.failed


def test_a_server_that_sustains_everything_or_nothing() -> None:
    best = search(1.0, 0.1, lambda rate: True, max_probes=5)
    assert (best.sustained, best.failed) == (16.0, None)
    worst = search(1.0, 0.1, lambda rate: False, max_probes=5)
    assert (worst.sustained, worst.failed) == (None, 0.0625)
