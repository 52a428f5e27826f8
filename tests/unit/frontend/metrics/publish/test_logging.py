from __future__ import annotations

import logging

import pytest

from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.stat_loggers import LoggingStatLogger
from quire.wire.stats import PrefillStats, PrefixCacheStats, SchedulerStats, SpecDecodingStats


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.DEBUG, "quire")
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
        num_generation_tokens=40,
        num_prefilled_tokens=20,
    )
    logger.record(scheduler, IterationStats(num_generation_tokens=7, prompt_tokens=PrefillStats(30, 20, 10)))
    assert not lines.messages
    clock.now = 10.0
    scheduler.num_generation_tokens, scheduler.num_prefilled_tokens = 60, 0
    scheduler.prefix_cache_stats = PrefixCacheStats()
    logger.record(scheduler, None)
    assert lines.messages == [
        "prompt 2.0 tokens/s, generation 10.0 tokens/s, running 3, waiting 3, KV cache 25.0%, prefix cache hits 50.0%"
    ]
    clock.now = 20.0
    logger.record(SchedulerStats(), None)
    clock.now = 30.0
    logger.record(SchedulerStats(), None)
    levels = [record.levelname for record in lines.records]
    assert levels == ["INFO", "INFO", "DEBUG"]  # the end of the busy time is said, then there is silence
    assert lines.messages[1].startswith("prompt 0.0 tokens/s, generation 0.0 tokens/s, running 0, waiting 0")


def test_the_interval_comes_from_the_environment(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "0")
    LoggingStatLogger(Clock()).record(None, IterationStats(num_generation_tokens=1))
    assert len(lines.messages) == 1


def test_what_is_rare_is_said_when_it_happens(lines: pytest.LogCaptureFixture) -> None:
    logger = LoggingStatLogger(Clock())
    spec = SpecDecodingStats(4)
    spec.record(4, 3)
    logger.record(
        SchedulerStats(spec_decoding_stats=spec), IterationStats(num_preempted_reqs=2, num_generation_tokens=1)
    )
    logger.log()
    assert lines.messages[0].endswith("preemptions 2, drafts accepted 75.0%")


def test_engines_have_lines_of_their_own(lines: pytest.LogCaptureFixture) -> None:
    logger = LoggingStatLogger(Clock())
    logger.record(SchedulerStats(num_running_reqs=1), None, 0)
    logger.record(SchedulerStats(num_running_reqs=2), None, 1)
    logger.log()
    assert [message.split(" prompt")[0] for message in lines.messages] == ["engine 0:", "engine 1:"]
