from __future__ import annotations

from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.stat_loggers import RecentRequests
from quire.outputs import RequestStateStats
from quire.wire.engine_core import FinishReason


def ended(recent: RecentRequests, *names: str) -> None:
    stats = IterationStats(iteration_timestamp=1010.0)
    for name in names:
        state = RequestStateStats(
            arrival_time=1000.0, queued_ts=5.0, scheduled_ts=6.0, first_token_ts=8.0, last_token_ts=12.0
        )
        state.num_generation_tokens = 3
        stats.update_from_finished_request(
            name, FinishReason.LENGTH, state, num_prompt_tokens=7, max_tokens_param=None, num_cached_tokens=4
        )
    recent.record(None, stats)


def test_it_keeps_the_last_and_numbers_all() -> None:
    recent = RecentRequests(max_recent=3)
    recent.record(None, None)
    assert recent.after(0) == []
    ended(recent, "a", "b")
    ended(recent, "c", "d")
    assert [(one.number, one.id) for one in recent.after(0)] == [(2, "b"), (3, "c"), (4, "d")]
    assert [one.id for one in recent.after(3)] == ["d"]
    assert recent.after(4) == []


def test_what_is_kept() -> None:
    recent = RecentRequests()
    ended(recent, "a")
    (one,) = recent.after(0)
    assert (one.reason, one.end_time, one.e2e_s) == ("length", 1010.0, 10.0)
    assert (one.queued_s, one.prefill_s, one.decode_s) == (1.0, 2.0, 4.0)
    assert (one.prompt_tokens, one.cached_tokens, one.output_tokens, one.preemptions) == (7, 4, 3, 0)
