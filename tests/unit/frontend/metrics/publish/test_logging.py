from __future__ import annotations

import logging

import pytest

from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.stat_loggers import MAX_PATIENCE_S, LoggingStatLogger, StatLoggerManager
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
    clock = Clock()
    logger = LoggingStatLogger(clock)
    clock.now += 2.0
    spec = SpecDecodingStats(4)
    spec.record(4, 3)
    logger.record(
        SchedulerStats(spec_decoding_stats=spec), IterationStats(num_preempted_reqs=2, num_generation_tokens=1)
    )
    logger.log()
    assert lines.messages[0].endswith(
        "preemptions 2, drafts accepted 1.5 of 2.0 tokens/s (75.0%), mean acceptance length 4.00, "
        "by position 1.00 1.00 1.00 0.00"
    )


def test_engines_have_lines_of_their_own(lines: pytest.LogCaptureFixture) -> None:
    logger = LoggingStatLogger(Clock())
    logger.record(SchedulerStats(num_running_reqs=1), None, 0)
    logger.record(SchedulerStats(num_running_reqs=2), None, 1)
    logger.log()
    assert [message.split(" prompt")[0] for message in lines.messages] == ["engine 0:", "engine 1:"]


def test_two_callers_share_one_clock_and_every_number_adds_up(lines: pytest.LogCaptureFixture) -> None:
    """Steps log when an interval is over, and so does the server: at the same moments, by and large."""
    clock = Clock()
    loggers = StatLoggerManager([LoggingStatLogger(clock)], clock)
    last, num_tokens = 0.0, 0.0
    for step in range(1, 6001):  # a minute at 1,000 tokens/s
        clock.now = step / 100
        loggers.record(SchedulerStats(num_running_reqs=1, num_generation_tokens=10, num_prefilled_tokens=1), None)
        if step % 1000 in (0, 1):  # the server's timer, now late, now early
            loggers.log_regularly()
        for message in lines.messages:
            rate = float(message.split("generation ")[1].split(" ")[0])
            assert rate == pytest.approx(1000.0, rel=0.2)
            num_tokens += rate * (clock.now - last)
            last = clock.now
        lines.clear()
    assert last > 50.0
    assert num_tokens == pytest.approx(1000.0 * last, abs=1000 * MAX_PATIENCE_S)


def test_a_server_writes_a_line_although_no_step_does(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    loggers = StatLoggerManager([LoggingStatLogger(clock)], clock)
    loggers.record(SchedulerStats(num_running_reqs=1, num_generation_tokens=50), None)
    for now in (10.0, 10.001, 20.0):
        clock.now = now
        loggers.log_regularly()
    assert [(record.levelname, record.message[:44]) for record in lines.records] == [
        ("INFO", "prompt 0.0 tokens/s, generation 5.0 tokens/s"),
        ("INFO", "prompt 0.0 tokens/s, generation 0.0 tokens/s"),
    ]
