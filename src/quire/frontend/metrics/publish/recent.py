"""The requests that ended last, for people who watch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from quire.frontend.metrics.collect.events import FinishedRequestStats, IterationStats
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.wire.engine_core import FINISH_REASON_STRINGS
from quire.wire.stats import SchedulerStats

MAX_RECENT = 256


class EndedRequest(msgspec.Struct, gc=False):
    """One request that has ended. Durations in seconds, of stages it reached; `end_time` is wall clock."""

    number: int
    """Grows with each that ends: the count of them, or the time where several processes share the numbers."""
    id: str
    """The user's."""
    reason: str
    end_time: float
    e2e_s: float
    queued_s: float | None
    prefill_s: float | None
    decode_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int


class RecentRequests(StatLogger):
    """Keeps the last `max_recent`. With `clock`, which only grows, its numbers are comparable with those of others that
    have the same clock."""

    is_patient = True

    def __init__(self, max_recent: int = MAX_RECENT, *, clock: Callable[[], int] | None = None) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=max_recent)
        self._clock = clock
        self._last_number = 0

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        if iteration_stats is not None:
            for stats in iteration_stats.finished_requests:
                self._last_number = max(self._last_number + 1, self.now())
                self._ended.append(_describe(stats, self._last_number, iteration_stats.iteration_timestamp))

    def now(self) -> int:
        """What a request that ends from now on has at least as its number."""
        self.catch_up()
        return 0 if self._clock is None else self._clock()

    def after(self, number: int) -> list[EndedRequest]:
        """Those that ended after the one of this number, oldest first."""
        self.catch_up()
        return [ended for ended in self._ended if ended.number > number]


def _describe(stats: FinishedRequestStats, number: int, end_time: float) -> EndedRequest:
    return EndedRequest(
        number=number,
        id=stats.request_id,
        reason=FINISH_REASON_STRINGS[stats.finish_reason],
        end_time=end_time,
        e2e_s=stats.e2e_latency,
        queued_s=stats.queued_time,
        prefill_s=stats.prefill_time,
        decode_s=stats.decode_time,
        prompt_tokens=stats.num_prompt_tokens,
        cached_tokens=stats.num_cached_tokens,
        output_tokens=stats.num_generation_tokens,
        preemptions=stats.num_preemptions,
    )
