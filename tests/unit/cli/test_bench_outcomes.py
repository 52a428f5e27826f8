"""The arithmetic of a load, against brute force and a queue of known behaviour; the search for a saturating rate."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.cli.bench.outcomes import (
    Failure,
    LoadResult,
    Outcome,
    RateSearch,
    ServiceLevel,
    client_warning,
    draft_figures,
    draft_lines,
    figures,
    in_flight,
    keeps_up,
    peak_in_flight,
)
from quire.cli.bench.workloads import EVENLY, arrival_times
from quire.cli.generation import RequestTiming
from quire.cli.server_watch import Metrics
from quire.errors import ConfigError


def outcome(
    intended: float, ttft: float, gaps: list[float], *, lag: float = 0.0, failure: Failure | None = None
) -> Outcome:
    """A request that was sent `lag` late, had its first token `ttft` after that, the others `gaps` apart."""
    timing = RequestTiming(intended + lag)
    timing.num_prompt_tokens, timing.num_output_tokens = 10, 1 + len(gaps)
    if failure is None:
        now = intended + lag + ttft
        timing.stamp(now)
        for gap in gaps:
            now += gap
            timing.stamp(now)
    return Outcome(intended, intended, timing, timing.last_token_s or intended + lag, failure)


def result_of(outcomes: list[Outcome]) -> LoadResult:
    end = max((o.end_s for o in outcomes), default=0.0)
    return LoadResult(0.0, end, outcomes)


times = st.floats(0.0, 100.0, allow_nan=False)
outcomes_st = st.lists(
    st.builds(
        lambda intended, ttft, gaps, lag, fails: outcome(
            intended, ttft, gaps, lag=lag, failure=Failure("HTTP 503", "full") if fails else None
        ),
        times,
        times,
        st.lists(times, max_size=5),
        times,
        st.booleans(),
    ),
    max_size=30,
)


def test_latencies_count_from_the_intended_time() -> None:
    late = outcome(1.0, 0.5, [0.25, 0.25], lag=2.0)
    assert (late.ttft_s, late.e2e_s, late.lag_s) == (2.5, 3.0, 2.0)
    numbers = figures(result_of([late]), ServiceLevel({}))
    assert numbers["ttft_ms"]["p50"] == 2500
    assert numbers["sent_ttft_ms"]["p50"] == 500
    assert (numbers["e2e_ms"]["mean"], numbers["sent_e2e_ms"]["mean"]) == (3000, 1000)
    assert (numbers["tpot_ms"]["p99"], numbers["itl_ms"]["p90"]) == (250, 250)
    assert (numbers["wall_s"], numbers["requests_per_s"], numbers["output_tokens_per_s"]) == (4.0, 0.25, 0.8)


@settings(derandomize=True)
@given(outcomes_st, st.floats(1.0, 1e5), st.floats(1.0, 1e5), st.floats(1.0, 1e5))
def test_goodput_is_the_share_within_all_bounds(outcomes: list[Outcome], ttft: float, tpot: float, e2e: float) -> None:
    level = ServiceLevel({"ttft": ttft, "tpot": tpot, "e2e": e2e})
    result = result_of(outcomes)
    good = 0
    for o in outcomes:
        if o.failure is None:
            assert o.ttft_s is not None
            met = o.ttft_s * 1e3 <= ttft and o.e2e_s * 1e3 <= e2e
            good += met and (o.tpot_s is None or o.tpot_s * 1e3 <= tpot)
    assert level.count(result) == good
    assert level.share(result) == (good / len(outcomes) if outcomes else 0.0)
    wider = ServiceLevel({"ttft": ttft * 2, "tpot": tpot * 2, "e2e": e2e * 2})
    assert level.share(result) <= wider.share(result) <= ServiceLevel({"ttft": 1e9}).share(result) <= 1


@settings(derandomize=True)
@given(outcomes_st)
def test_figures_count_every_request_once(outcomes: list[Outcome]) -> None:
    numbers = figures(result_of(outcomes), ServiceLevel({"ttft": 100.0}))
    assert numbers["num_requests"] == len(outcomes)
    assert sum(kind["count"] for kind in numbers["failures"].values()) == numbers["num_failed"]
    answered = [o for o in outcomes if o.failure is None]
    assert numbers["output_tokens"] == sum(o.timing.num_output_tokens for o in answered)
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        if numbers[key]:
            assert numbers[key]["p50"] <= numbers[key]["p90"] <= numbers[key]["p99"]
    if answered:
        longest = max(o.e2e_s for o in answered) * 1e3
        assert numbers["e2e_ms"]["p99"] <= longest + 0.001
        assert numbers["goodput"]["requests_per_s"] <= numbers["requests_per_s"] + 0.001
    assert all(math.isfinite(value) for value in numbers["client"]["lag_ms"].values())


@settings(derandomize=True)
@given(outcomes_st)
def test_in_flight_against_counting(outcomes: list[Outcome]) -> None:
    steps = in_flight(outcomes)
    assert [moment for moment, _ in steps] == sorted(moment for moment, _ in steps)
    for moment in {moment for moment, _ in steps}:
        after = [count for other, count in steps if other == moment][-1]
        assert after == sum(o.timing.added_s <= moment < o.end_s for o in outcomes)
    assert peak_in_flight(outcomes) <= len(outcomes)
    assert not steps or steps[-1][1] == 0


@settings(derandomize=True)
@given(st.floats(0.5, 50.0), st.floats(0.1, 3.0), st.integers(40, 200))
def test_keeping_up_is_being_slower_than_the_server(capacity: float, load: float, count: int) -> None:
    """One server, one request at a time, equal service times and gaps: it keeps up exactly while load <= 1."""
    assume(not 0.9 < load < 1.2)
    free = 0.0
    outcomes = []
    for arrival in arrival_times(load * capacity, count, 0, EVENLY):
        free = max(free, arrival) + 1 / capacity
        outcomes.append(outcome(arrival, free - arrival, []))
    assert keeps_up(result_of(outcomes)) == (load < 1)


def test_the_time_of_the_last_answers_is_no_falling_behind() -> None:
    """Every request takes ten times as long as all of them take to arrive."""
    assert keeps_up(result_of([outcome(i / 10, 100.0, []) for i in range(20)]))
    assert not keeps_up(result_of([outcome(0.0, 1.0, [], failure=Failure("HTTP 503", "full"))]))
    assert keeps_up(result_of([]))


@pytest.mark.parametrize(
    ("words", "bounds"),
    [
        ([], {}),
        (["ttft:200", "tpot:50"], {"ttft": 200, "tpot": 50}),
        (["ttft:200,e2e:3e3"], {"ttft": 200, "e2e": 3000}),
        (["e2el:10", "e2el:20"], {"e2el": 20}),
    ],
)
def test_a_service_level_is_read_from_its_words(words: list[str], bounds: dict[str, float]) -> None:
    assert ServiceLevel.parse(words).bounds_ms == bounds
    assert bool(ServiceLevel.parse(words)) == bool(bounds)


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "itl:5", ""])
def test_service_levels_that_are_none(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        ServiceLevel.parse([word])


def test_a_client_that_is_the_limit_says_so() -> None:
    def numbers(cpu_share: float, lag_ms: float, ttft_ms: float) -> dict[str, object]:
        client = {"cpu_share": cpu_share, "lag_ms": {"p99": lag_ms}}
        return {"client": client, "sent_ttft_ms": {"p50": ttft_ms}}

    assert client_warning(numbers(0.1, 2.0, 50.0)) is None
    assert client_warning(numbers(0.1, 60.0, 1000.0)) is None  # small beside what is measured
    assert "95% of a core" in (client_warning(numbers(0.95, 2.0, 50.0)) or "")
    assert "60 ms late" in (client_warning(numbers(0.1, 60.0, 50.0)) or "")


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


def test_a_server_that_does_not_speculate_has_no_figures_of_drafts() -> None:
    assert draft_figures(None, Metrics("")) is None
    assert draft_figures(Metrics(""), None) is None
    assert draft_figures(Metrics("a 1"), Metrics("a 2")) is None


def test_without_drafts_there_is_no_rate() -> None:
    text = "".join(f"vllm:spec_decode_num_{name}_total 5.0\n" for name in ("drafts", "draft_tokens", "accepted_tokens"))
    drafts = draft_figures(Metrics(text), Metrics(text))
    assert drafts is not None
    assert (drafts["num_drafts"], drafts["acceptance_rate"]) == (0, 0)
    assert draft_lines(drafts) == ["  speculation             no drafts were verified"]
