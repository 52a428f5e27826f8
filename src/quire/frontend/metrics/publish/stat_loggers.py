"""Statistics loggers. A new exporter is a class with `record`, named by --stat-loggers.

Two of Quire's own are here, too: the statistics line of the log, and the list of recently finished requests.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ClassVar

import msgspec

from quire import envs
from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.failpoints import failpoint
from quire.frontend.metrics.collect.events import (
    ControlOperation,
    FinishedRequestStats,
    HttpExchange,
    IterationStats,
)
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.engine_core import FINISH_REASON_STRINGS
from quire.wire.stats import BaseCacheStats, SchedulerStats, SpecDecodingStats

logger = init_logger(__name__)

MAX_REPORTS_KEPT = 128
"""Number of reports collected for patient loggers."""
MAX_PATIENCE_S = 1.0
"""Longest time that reports are collected, while there are steps."""


class StepReport(msgspec.Struct, frozen=True, gc=False):
    """Statistics of a batch of a step's outputs; `time` is wall clock."""

    scheduler_stats: SchedulerStats | None
    iteration_stats: IterationStats | None
    engine_index: int
    time: float


class StatLogger(ABC):
    """Receives the statistics of every step. Must be quick; a logger that raises is dropped.

    A class named by --stat-loggers is constructed with the engine configuration as its only argument.
    """

    is_patient: ClassVar[bool] = False
    """True for a logger that may receive many steps together. A step of the model empties the CPU caches, so passing on
    one report then costs as much as passing on ten more. Readers of such a logger call `catch_up` first."""
    catch_up: Callable[[], None] = staticmethod(lambda: None)
    """Makes the manager pass on all reports collected so far."""

    def record_all(self, reports: Sequence[StepReport]) -> None:
        """Records several reports, oldest first."""
        for report in reports:
            self.record(report.scheduler_stats, report.iteration_stats, report.engine_index)

    @abstractmethod
    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """Records the state of the scheduler after a step, and the numbers of a batch of outputs."""

    def record_operation(self, operation: ControlOperation) -> None:  # noqa: B027 - most exporters have no use for it
        """Records a control operation that has ended."""

    def record_exchange(self, exchange: HttpExchange) -> None:  # noqa: B027 - as above
        """Records an answered HTTP request."""

    def log(self) -> None:  # noqa: B027 - an exporter that is only ever scraped has nothing to do here
        """Writes the statistics recorded since the last call, if this logger writes at all."""

    def log_regularly(self) -> None:
        """Called by a server at every interval, also while nothing is recorded. Calls `log`, unless `record` has just
        done so."""
        self.log()


class StatLoggerManager:
    """Passes statistics to every logger. A logger that raises is reported once and dropped: it must not cost a token.

    `clock` is the wall clock.
    """

    def __init__(self, loggers: Sequence[StatLogger] = (), clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._reports: list[StepReport] = []
        """Reports that patient loggers have not received."""
        self.loggers: list[StatLogger] = []
        self._immediate: list[StatLogger] = []
        """Loggers that are not patient."""
        for stat_logger in loggers:
            self.add(stat_logger)

    def add(self, stat_logger: StatLogger) -> None:
        """Adds a logger. Where statistics are off it never receives anything."""
        self.catch_up()  # what was before is not for it
        self.loggers.append(stat_logger)
        if stat_logger.is_patient:
            stat_logger.catch_up = self.catch_up
        else:
            self._immediate.append(stat_logger)

    def drop(self, kind: type[StatLogger]) -> None:
        """Removes the loggers of this kind: another process has one for all."""
        for stat_logger in list(self.loggers):
            if isinstance(stat_logger, kind):
                self._remove(stat_logger)

    def _remove(self, stat_logger: StatLogger) -> None:
        self.loggers.remove(stat_logger)
        if not stat_logger.is_patient:
            self._immediate.remove(stat_logger)

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """Passes the statistics of a batch of outputs to every logger: at once, or to patient ones before they are
        read."""
        now = self._clock()
        report = StepReport(scheduler_stats, iteration_stats, engine_index, now)
        if self._immediate:
            self._send(self._immediate, (report,))
        reports = self._reports
        reports.append(report)
        if len(reports) >= MAX_REPORTS_KEPT or not 0 <= now - reports[0].time < MAX_PATIENCE_S:
            self.catch_up()

    def _send(self, loggers: Sequence[StatLogger], reports: Sequence[StepReport]) -> None:
        self._each(lambda stat_logger: stat_logger.record_all(reports), loggers)

    def catch_up(self) -> None:
        """Passes the collected reports to patient loggers."""
        reports, self._reports = self._reports, []
        if reports:
            self._send([stat_logger for stat_logger in self.loggers if stat_logger.is_patient], reports)

    def record_operation(self, operation: ControlOperation) -> None:
        """Passes a control operation to every logger."""
        self._each(lambda stat_logger: stat_logger.record_operation(operation))

    def record_exchange(self, exchange: HttpExchange) -> None:
        """Passes an HTTP request to every logger."""
        self._each(lambda stat_logger: stat_logger.record_exchange(exchange))

    def log(self) -> None:
        """Makes every logger write now."""
        self.catch_up()
        self._each(lambda stat_logger: stat_logger.log())

    def log_regularly(self) -> None:
        """Makes every logger write that has not done so in this interval."""
        self.catch_up()
        self._each(lambda stat_logger: stat_logger.log_regularly())

    def _each(self, call: Callable[[StatLogger], None], loggers: Sequence[StatLogger] | None = None) -> None:
        for stat_logger in list(self.loggers if loggers is None else loggers):
            try:
                failpoint("frontend.stats.record")
                call(stat_logger)
            except Exception:
                logger.exception("statistics logger %s failed and is dropped", type(stat_logger).__name__)
                self._remove(stat_logger)


def load_stat_logger(name: str, config: EngineConfig) -> StatLogger:
    """Returns the logger that `name` ("package.module:Class") names, made for this engine. Raises ConfigError."""
    factory = resolve(name)
    stat_logger = factory(config)
    if not isinstance(stat_logger, StatLogger):
        raise ConfigError(
            f"--stat-loggers {name} makes a {type(stat_logger).__name__}, which is no StatLogger "
            "(quire.frontend.metrics.publish.stat_loggers)"
        )
    return stat_logger


class LoggingStatLogger(StatLogger):
    """Writes one line of throughput and load every QUIRE_LOG_STATS_INTERVAL seconds, per engine.

    The level is DEBUG while nothing happens, except for the first quiet interval, so that the line of a busy time is
    not the last one. Prompt tokens are the computed ones. Of several processes of a server only the one that receives
    the statistics of the core writes the line.
    """

    is_patient = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval = envs.LOG_STATS_INTERVAL.number()
        self._last_log = clock()
        self._engines: defaultdict[int, _EngineLine] = defaultdict(_EngineLine)

    def record_all(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self._engines[report.engine_index].add(report.scheduler_stats, report.iteration_stats)
        self._log_after(self._interval)  # not between two of them: the next line would have tokens and no time

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        self.record_all((StepReport(scheduler_stats, iteration_stats, engine_index, 0.0),))

    def _log_after(self, duration_s: float) -> None:
        if self._clock() - self._last_log >= duration_s:
            self.log()

    def log_regularly(self) -> None:
        # The server's timer fires shortly before or after a step logs. A second line within half an interval would
        # divide its tokens by next to no time.
        self._log_after(self._interval / 2)

    def log(self) -> None:
        now = self._clock()
        elapsed = max(now - self._last_log, 1e-9)
        self._last_log = now
        for index, engine in self._engines.items():
            name = f"engine {index}: " if len(self._engines) > 1 else ""
            level, line = engine.take_line(elapsed)
            logger.log(level, "%s%s", name, line)


class _EngineLine:
    """Counts of one engine since its last line."""

    def __init__(self) -> None:
        self._num_prompt_tokens = self._num_generation_tokens = self._num_preemptions = 0
        self._drafts: list[SpecDecodingStats] = []
        self._scheduler_stats = SchedulerStats()
        self._prefix_cache = CachingMetrics()
        self._was_busy = False

    def add(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        if iteration_stats is not None:
            self._num_preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self._num_prompt_tokens += scheduler_stats.num_prefilled_tokens
            self._num_generation_tokens += scheduler_stats.num_generation_tokens
            self._scheduler_stats = scheduler_stats
            self._prefix_cache.observe(scheduler_stats.prefix_cache_stats)
            self._add_drafts(scheduler_stats.spec_decoding_stats)

    def _add_drafts(self, stats: SpecDecodingStats | None) -> None:
        if stats is not None and stats.num_drafts:
            self._drafts.append(stats)

    def take_line(self, elapsed_s: float) -> tuple[int, str]:
        """Returns the level and the text of the line, and resets the counts."""
        stats = self._scheduler_stats
        num_waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        parts = [
            f"prompt {self._num_prompt_tokens / elapsed_s:.1f} tokens/s",
            f"generation {self._num_generation_tokens / elapsed_s:.1f} tokens/s",
            f"running {stats.num_running_reqs}",
            f"waiting {num_waiting}",
            f"KV cache {100 * stats.kv_cache_usage:.1f}%",
            f"prefix cache hits {100 * self._prefix_cache.hit_rate:.1f}%",
        ]
        if self._num_preemptions:
            parts.append(f"preemptions {self._num_preemptions}")
        if self._drafts:
            parts += _describe_drafts(self._drafts, elapsed_s)
        is_busy = bool(
            self._num_prompt_tokens or self._num_generation_tokens or stats.num_running_reqs or stats.num_waiting_reqs
        )
        level = logging.INFO if is_busy or self._was_busy else logging.DEBUG
        self._num_prompt_tokens = self._num_generation_tokens = self._num_preemptions = 0
        self._drafts.clear()
        self._was_busy = is_busy
        return level, ", ".join(parts)


def _describe_drafts(steps: Sequence[SpecDecodingStats], elapsed_s: float) -> list[str]:
    num_drafts, num_tokens, num_accepted = (
        sum(getattr(step, name) for step in steps) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    positions = zip_longest(*(step.num_accepted_tokens_per_pos for step in steps), fillvalue=0)
    rates = " ".join(f"{sum(counts) / num_drafts:.2f}" for counts in positions)
    return [
        f"drafts accepted {num_accepted / elapsed_s:.1f} of {num_tokens / elapsed_s:.1f} tokens/s "
        f"({100 * num_accepted / num_tokens:.1f}%)",
        f"mean acceptance length {1 + num_accepted / num_drafts:.2f}",
        f"by position {rates}",
    ]


class CachingMetrics:
    """Hit rate of a cache over the last `max_recent_requests` look-ups."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self._max_recent = max_recent_requests
        self._window: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: BaseCacheStats) -> None:
        """Counts a report. A report of an emptied cache starts the window anew."""
        if stats.reset:
            self._window.clear()
            self._requests = self._queries = self._hits = 0
        if stats.requests == 0:
            return
        self._window.append((stats.requests, stats.queries, stats.hits))
        self._add((stats.requests, stats.queries, stats.hits), 1)
        while len(self._window) > 1 and self._requests > self._max_recent:
            self._add(self._window.popleft(), -1)

    def _add(self, entry: tuple[int, int, int], sign: int) -> None:
        self._requests += sign * entry[0]
        self._queries += sign * entry[1]
        self._hits += sign * entry[2]

    @property
    def hit_rate(self) -> float:
        """Returns hits per query, 0..1; 0 before the first query."""
        return self._hits / self._queries if self._queries else 0.0


MAX_RECENT = 256


class EndedRequest(msgspec.Struct, gc=False):
    """One finished request. Durations in seconds, None for stages it never reached; `end_time` is wall clock."""

    number: int
    """Rises with each finished request: their count, or the time if several processes share the numbers."""
    id: str
    """The id that the user knows."""
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
    """Keeps the last `max_recent` finished requests. With a monotonic `clock` that processes share, their numbers are
    comparable."""

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
        """Returns the least number of a request that finishes from now on."""
        self.catch_up()
        return 0 if self._clock is None else self._clock()

    def after(self, number: int) -> list[EndedRequest]:
        """Returns the requests that finished after the one of this number, oldest first."""
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
