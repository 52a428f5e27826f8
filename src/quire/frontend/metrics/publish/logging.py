"""The statistics line of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire import envs
from quire.frontend.metrics.collect.events import CachingMetrics, IterationStats
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.logger import init_logger
from quire.wire.stats import SchedulerStats, SpecDecodingStats

logger = init_logger(__name__)


class LoggingStatLogger(StatLogger):
    """One line of throughput and load every QUIRE_LOG_STATS_INTERVAL seconds, per engine.

    At level DEBUG while nothing happens: the first quiet interval is still said aloud, so that the last line of a busy
    time does not stay for ever. Prompt tokens are those computed. Of several processes of one server the one that the
    core tells its statistics speaks for all; the others are quiet.
    """

    is_patient = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval = envs.LOG_STATS_INTERVAL.number()
        self._last_log = clock()
        self._engines: dict[int, _EngineLine] = {}

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        engine = self._engines.get(engine_index)
        if engine is None:
            engine = self._engines[engine_index] = _EngineLine()
        engine.add(scheduler_stats, iteration_stats)
        if self._clock() - self._last_log >= self._interval:
            self.log()

    def log(self) -> None:
        now = self._clock()
        elapsed = max(now - self._last_log, 1e-9)
        self._last_log = now
        for index, engine in self._engines.items():
            name = f"engine {index}: " if len(self._engines) > 1 else ""
            level, line = engine.take_line(elapsed)
            logger.log(level, "%s%s", name, line)


class _EngineLine:
    """What one engine did since its last line."""

    def __init__(self) -> None:
        self._num_prompt_tokens = self._num_generation_tokens = self._num_preemptions = 0
        self._num_draft_tokens = self._num_accepted_tokens = 0
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
        if stats is not None:
            self._num_draft_tokens += stats.num_draft_tokens
            self._num_accepted_tokens += stats.num_accepted_tokens

    def take_line(self, elapsed_s: float) -> tuple[int, str]:
        """Its level and text; counting starts anew."""
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
        if self._num_draft_tokens:
            parts.append(f"drafts accepted {100 * self._num_accepted_tokens / self._num_draft_tokens:.1f}%")
        is_busy = bool(
            self._num_prompt_tokens or self._num_generation_tokens or stats.num_running_reqs or stats.num_waiting_reqs
        )
        level = logging.INFO if is_busy or self._was_busy else logging.DEBUG
        self._num_prompt_tokens = self._num_generation_tokens = self._num_preemptions = 0
        self._num_draft_tokens = self._num_accepted_tokens = 0
        self._was_busy = is_busy
        return level, ", ".join(parts)
