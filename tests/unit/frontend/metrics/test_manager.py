from __future__ import annotations

import logging

import pytest

from quire.frontend.metrics.manager import LoggingStatLogger, StatLogger, StatLoggerManager
from quire.frontend.metrics.stats import IterationStats
from quire.wire.stats import PrefillStats, PrefixCacheStats, SchedulerStats


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire")
    return caplog


def test_one_line_per_interval(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    logger = LoggingStatLogger(clock)
    scheduler = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(requests=1, queries=10, hits=5),
    )
    logger.record(scheduler, IterationStats(num_generation_tokens=40, prompt_tokens=PrefillStats(30, 20, 10)))
    assert not lines.messages
    clock.now = 10.0
    logger.record(None, IterationStats(num_generation_tokens=60))
    assert lines.messages == [
        "prompt 2.0 tokens/s, generation 10.0 tokens/s, running 3, waiting 3, KV cache 25.0%, prefix cache hits 50.0%"
    ]
    clock.now = 20.0
    logger.record(SchedulerStats(), None)
    assert len(lines.messages) == 1  # idle: nothing to say


def test_the_interval_comes_from_the_environment(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "0")
    LoggingStatLogger(Clock()).record(None, IterationStats(num_generation_tokens=1))
    assert len(lines.messages) == 1


class Recorder(StatLogger):
    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[object] = []
        self.error = error

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        self.seen.append((scheduler_stats, iteration_stats, engine_index))
        if self.error is not None:
            raise self.error


def test_every_logger_gets_everything_and_a_broken_one_is_dropped(lines: pytest.LogCaptureFixture) -> None:
    broken, sound = Recorder(RuntimeError("disk full")), Recorder()
    manager = StatLoggerManager([broken, sound])
    scheduler, iteration = SchedulerStats(), IterationStats()
    manager.record(scheduler, iteration, 1)
    manager.record(None, iteration)
    manager.log()
    assert sound.seen == [(scheduler, iteration, 1), (None, iteration, 0)]
    assert len(broken.seen) == 1
    assert manager.loggers == [sound]
    assert "Recorder failed and is dropped" in lines.text


def test_the_default_is_the_log_line() -> None:
    assert [type(logger) for logger in StatLoggerManager().loggers] == [LoggingStatLogger]
    assert StatLoggerManager([]).loggers == []
