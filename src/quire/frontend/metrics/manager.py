"""Where statistics go: a list of loggers. A new exporter is a class with `record` and `log`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from quire import envs
from quire.frontend.metrics.stats import CachingMetrics, IterationStats
from quire.logger import init_logger
from quire.wire.stats import SchedulerStats

logger = init_logger(__name__)


class StatLogger(ABC):
    """Takes the statistics of every step. Must be quick and must not raise."""

    @abstractmethod
    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """One step's snapshot of the scheduler, and what the step delivered (checklist S0-ST-013)."""

    def log(self) -> None:  # noqa: B027 - an exporter that is only ever scraped has nothing to do here
        """Write out what was recorded since the last time, if this logger writes at all."""


class LoggingStatLogger(StatLogger):
    """One line of throughput and load every QUIRE_LOG_STATS_INTERVAL seconds; silent while nothing happens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval = envs.LOG_STATS_INTERVAL.number()
        self._last_log = clock()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._scheduler_stats = SchedulerStats()
        self._prefix_cache = CachingMetrics()

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        if iteration_stats is not None:
            self._num_prompt_tokens += iteration_stats.prompt_tokens.num_computed_tokens
            self._num_generation_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            self._scheduler_stats = scheduler_stats
            self._prefix_cache.observe(scheduler_stats.prefix_cache_stats)
        if self._clock() - self._last_log >= self._interval:
            self.log()

    def log(self) -> None:
        now = self._clock()
        elapsed = max(now - self._last_log, 1e-9)
        prompt, generation = self._num_prompt_tokens / elapsed, self._num_generation_tokens / elapsed
        self._last_log, self._num_prompt_tokens, self._num_generation_tokens = now, 0, 0
        stats = self._scheduler_stats
        busy = prompt or generation or stats.num_running_reqs or stats.num_waiting_reqs
        if busy:
            logger.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f%%, "
                "prefix cache hits %.1f%%",
                prompt,
                generation,
                stats.num_running_reqs,
                stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
                100 * stats.kv_cache_usage,
                100 * self._prefix_cache.hit_rate,
            )


class StatLoggerManager:
    """Passes statistics to every logger. A logger that raises is reported once and dropped: it may not cost a token."""

    def __init__(self, loggers: Sequence[StatLogger] | None = None) -> None:
        self.loggers: list[StatLogger] = [LoggingStatLogger()] if loggers is None else list(loggers)

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """Give one step's statistics to every logger."""
        self._each(lambda stat_logger: stat_logger.record(scheduler_stats, iteration_stats, engine_index))

    def log(self) -> None:
        """Let every logger write now."""
        self._each(lambda stat_logger: stat_logger.log())

    def _each(self, call: Callable[[StatLogger], None]) -> None:
        for stat_logger in list(self.loggers):
            try:
                call(stat_logger)
            except Exception:
                logger.exception("statistics logger %s failed and is dropped", type(stat_logger).__name__)
                self.loggers.remove(stat_logger)
