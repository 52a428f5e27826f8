"""Statistics against times worked out by hand: a wall clock and an engine clock that only the test moves."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.metrics.collect.events import FirstToken, IterationStats
from quire.frontend.metrics.publish.stat_loggers import CachingMetrics
from quire.outputs import RequestStateStats
from quire.wire.engine_core import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from quire.wire.stats import PrefillStats, PrefixCacheStats

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def output(num_tokens: int, *events: tuple[EngineCoreEventType, float], **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput(
        "r",
        list(range(num_tokens)),
        events=[EngineCoreEvent(kind, at) for kind, at in events] or None,
        **fields,  # type: ignore[arg-type]
    )


def finish(iteration: IterationStats, stats: RequestStateStats, **fields: object) -> None:
    defaults = {"num_prompt_tokens": 10, "max_tokens_param": 5, "num_cached_tokens": 4}
    iteration.update_from_finished_request("r", FinishReason.STOP, stats, **{**defaults, **fields})  # type: ignore[arg-type]


def test_life_of_a_request() -> None:
    """Arrives at wall 1000; queued at engine 50, scheduled 52, tokens at 55, 56, 59 (two of them)."""
    stats = RequestStateStats(arrival_time=1000.0)
    first = IterationStats(iteration_timestamp=1005.5)
    prefill = PrefillStats(10, 6, 4)
    first.update_from_output(output(1, (QUEUED, 50.0), (SCHEDULED, 52.0), prefill_stats=prefill), 55.0, True, stats)
    assert (first.num_prompt_tokens, first.num_generation_tokens) == (10, 1)
    assert (first.prompt_tokens.num_computed_tokens, first.prompt_tokens.num_local_cached_tokens) == (6, 4)
    assert first.first_tokens == [FirstToken(5.5)]  # wall clock
    assert first.inter_token_latencies == {}
    assert stats.first_token_latency == 5.5
    assert (stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts) == (50.0, 52.0, 55.0, 55.0)

    second = IterationStats(iteration_timestamp=1006.5)
    second.update_from_output(output(1), 56.0, False, stats)
    assert second.inter_token_latencies == {1.0: 1}  # engine clock

    third = IterationStats(iteration_timestamp=1009.75)
    third.update_from_output(output(2), 59.0, False, stats)
    assert third.inter_token_latencies == {3.0: 1}  # one sample per output, not per token
    assert (third.num_generation_tokens, third.num_prompt_tokens) == (2, 0)
    assert (stats.num_generation_tokens, stats.last_token_ts) == (4, 59.0)

    finish(third, stats)
    (finished,) = third.finished_requests
    assert finished.e2e_latency == 9.75
    assert finished.queued_time == 2.0
    assert finished.prefill_time == 3.0
    assert finished.decode_time == 4.0
    assert finished.inference_time == 7.0
    assert finished.mean_time_per_output_token == pytest.approx(4.0 / 3)
    assert (finished.request_id, finished.finish_reason) == ("r", FinishReason.STOP)
    assert (finished.num_prompt_tokens, finished.num_generation_tokens, finished.max_tokens_param) == (10, 4, 5)
    assert (finished.num_cached_tokens, finished.num_preemptions, finished.is_corrupted) == (4, 0, False)


def test_a_preemption_keeps_the_first_scheduled_stamp() -> None:
    stats = RequestStateStats(arrival_time=1000.0)
    iteration = IterationStats(iteration_timestamp=1020.0)
    iteration.update_from_output(output(1, (QUEUED, 1.0), (SCHEDULED, 2.0)), 3.0, True, stats)
    iteration.update_from_output(output(1, (PREEMPTED, 4.0), (SCHEDULED, 9.0)), 10.0, False, stats)
    assert (stats.scheduled_ts, stats.num_preemptions, iteration.num_preempted_reqs) == (2.0, 1, 1)
    assert iteration.inter_token_latencies == {7.0: 1}  # a preemption while decoding shows in the gap between tokens
    finish(iteration, stats)
    assert iteration.finished_requests[0].inference_time == 8.0
    assert iteration.finished_requests[0].num_preemptions == 1


def test_a_preemption_during_prefill_shows_in_prefill_time() -> None:
    stats = RequestStateStats(arrival_time=1000.0)
    iteration = IterationStats(iteration_timestamp=1001.0)
    iteration.update_from_output(
        output(1, (QUEUED, 1.0), (SCHEDULED, 2.0), (PREEMPTED, 3.0), (SCHEDULED, 6.0)), 8.0, True, stats
    )
    finish(iteration, stats)
    assert iteration.finished_requests[0].prefill_time == 6.0
    assert iteration.finished_requests[0].mean_time_per_output_token == 0.0  # one token: no interval
    assert iteration.finished_requests[0].decode_time == 0.0


def test_a_request_that_never_ran_has_no_intervals() -> None:
    stats = RequestStateStats(arrival_time=1000.0)
    iteration = IterationStats(iteration_timestamp=1002.0)
    finish(iteration, stats)
    (finished,) = iteration.finished_requests
    assert finished.e2e_latency == 2.0
    assert [finished.queued_time, finished.prefill_time, finished.decode_time, finished.inference_time] == [None] * 4
    assert finished.mean_time_per_output_token == 0.0


def test_an_output_without_tokens_is_no_first_token() -> None:
    stats = RequestStateStats(arrival_time=1000.0)
    iteration = IterationStats(iteration_timestamp=1002.0)
    iteration.update_from_output(output(0, (QUEUED, 1.0), finish_reason=FinishReason.ABORT), 3.0, True, stats)
    assert iteration.time_to_first_tokens == []
    assert (stats.first_token_ts, stats.queued_ts, iteration.num_generation_tokens) == (0.0, 1.0, 0)


def test_nans_count_a_request_once() -> None:
    stats = RequestStateStats()
    iteration = IterationStats()
    for _ in range(3):
        iteration.update_from_output(output(1, num_nans_in_logits=7), 3.0, False, stats)
    assert iteration.num_corrupted_reqs == 1
    finish(iteration, stats)
    assert iteration.finished_requests[0].is_corrupted


def test_a_wall_clock_set_back_gives_no_negative_interval() -> None:
    stats = RequestStateStats(arrival_time=1000.0)
    iteration = IterationStats(iteration_timestamp=999.0)
    iteration.update_from_output(output(1), 3.0, True, stats)
    assert iteration.time_to_first_tokens == [0.0]


def test_the_iteration_stamp_is_the_wall_clock() -> None:
    before = time.time()
    assert before <= IterationStats().iteration_timestamp <= time.time()


# -- hit rate of a cache ----------------------------------------------------------------------------------------------


def test_hit_rate_over_the_last_requests() -> None:
    metrics = CachingMetrics(max_recent_requests=2)
    assert metrics.hit_rate == 0.0
    metrics.observe(PrefixCacheStats(requests=1, queries=100, hits=0))
    metrics.observe(PrefixCacheStats(requests=1, queries=50, hits=25))
    assert metrics.hit_rate == pytest.approx(25 / 150)
    metrics.observe(PrefixCacheStats(requests=1, queries=50, hits=50))
    assert metrics.hit_rate == pytest.approx(75 / 100)  # the first has left the window
    metrics.observe(PrefixCacheStats())  # nothing looked up
    assert metrics.hit_rate == pytest.approx(75 / 100)
    metrics.observe(PrefixCacheStats(reset=True))
    assert metrics.hit_rate == 0.0


def test_a_report_larger_than_the_window_stays() -> None:
    metrics = CachingMetrics(max_recent_requests=2)
    metrics.observe(PrefixCacheStats(requests=5, queries=10, hits=5))
    assert metrics.hit_rate == 0.5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20), st.booleans()), max_size=30), st.integers(1, 10))
def test_hit_rate_is_that_of_the_shortest_suffix_within_the_window(
    reports: list[tuple[int, int, bool]], size: int
) -> None:
    metrics = CachingMetrics(size)
    since_reset: list[tuple[int, int, int]] = []
    for requests, hits, reset in reports:
        queries = 20 * requests
        hits = min(hits, queries)
        since_reset = [] if reset else since_reset
        since_reset += [(requests, queries, hits)] if requests else []
        metrics.observe(PrefixCacheStats(reset=reset, requests=requests, queries=queries, hits=hits))
        window = list(since_reset)
        while len(window) > 1 and sum(entry[0] for entry in window) > size:
            window.pop(0)
        total = sum(entry[1] for entry in window)
        assert metrics.hit_rate == pytest.approx(sum(entry[2] for entry in window) / total if total else 0.0)
