from __future__ import annotations

import logging

import pytest

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.frontend.metrics.collect.events import ControlOperation, HttpExchange, IterationStats
from quire.frontend.metrics.publish.stat_loggers import (
    MAX_PATIENCE_S,
    MAX_REPORTS_KEPT,
    StatLogger,
    StatLoggerManager,
    load_stat_logger,
)
from quire.wire.stats import SchedulerStats


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire")
    return caplog


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


class Patient(Recorder):
    is_patient = True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_patient_logger_is_told_before_it_is_read_and_the_others_at_once() -> None:
    patient, hurried, clock = Patient(), Recorder(), Clock()
    manager = StatLoggerManager([patient, hurried], clock)
    iterations = [IterationStats(num_generation_tokens=number) for number in range(3)]
    for iteration in iterations:
        manager.record(None, iteration)
    assert (len(patient.seen), len(hurried.seen)) == (0, 3)
    patient.catch_up()
    patient.catch_up()
    assert patient.seen == hurried.seen == [(None, iteration, 0) for iteration in iterations]


def test_patience_ends_with_many_reports_after_a_second_and_when_the_lines_are_due() -> None:
    patient, clock = Patient(), Clock()
    manager = StatLoggerManager([patient], clock)
    for _ in range(MAX_REPORTS_KEPT - 1):
        manager.record(SchedulerStats(), None)
    assert patient.seen == []
    manager.record(SchedulerStats(), None)
    assert len(patient.seen) == MAX_REPORTS_KEPT
    patient.seen.clear()
    manager.record(SchedulerStats(), None)
    clock.now += MAX_PATIENCE_S / 2
    manager.record(SchedulerStats(), None)
    assert patient.seen == []
    clock.now += MAX_PATIENCE_S / 2
    manager.record(SchedulerStats(), None)
    assert len(patient.seen) == 3
    manager.record(SchedulerStats(), None)
    clock.now -= 3600  # the clock was set back
    manager.record(SchedulerStats(), None)
    assert len(patient.seen) == 5
    manager.record(SchedulerStats(), None)
    manager.log()
    assert len(patient.seen) == 6


def test_a_logger_is_not_told_of_what_was_before_it() -> None:
    first, second = Patient(), Patient()
    manager = StatLoggerManager([first], Clock())
    manager.record(SchedulerStats(), None)
    manager.add(second)
    manager.record(SchedulerStats(), None)
    manager.catch_up()
    assert (len(first.seen), len(second.seen)) == (2, 1)


def test_a_patient_logger_that_raises_is_dropped_and_costs_the_others_nothing(lines: pytest.LogCaptureFixture) -> None:
    broken, sound = Patient(RuntimeError("disk full")), Patient()
    manager = StatLoggerManager([broken, sound], Clock())
    manager.record(SchedulerStats(), None)
    manager.record(SchedulerStats(), None)
    manager.catch_up()
    assert (len(sound.seen), manager.loggers) == (2, [sound])
    assert "Patient failed and is dropped" in lines.text


def test_events_that_a_logger_has_no_use_for() -> None:
    recorder = Recorder()
    manager = StatLoggerManager([recorder])
    manager.record_operation(ControlOperation("wake", 1.0))
    manager.record_exchange(HttpExchange("GET", "/", 200, 0.1, 0, 0))
    assert recorder.seen == []
    assert manager.loggers == [recorder]


class Custom(Recorder):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = config


def test_a_logger_by_name_is_made_with_the_configuration() -> None:
    config = EngineConfig()
    loaded = load_stat_logger(f"{__name__}:Custom", config)
    assert isinstance(loaded, Custom)
    assert loaded.config is config


@pytest.mark.parametrize("name", ["nowhere", "quire.nowhere:X", f"{__name__}:Nobody", "quire.config.engine:type"])
def test_a_name_of_no_logger(name: str) -> None:
    with pytest.raises(ConfigError):
        load_stat_logger(name, EngineConfig())


def make_number(config: EngineConfig) -> int:
    return 1


def test_something_else_than_a_logger() -> None:
    with pytest.raises(ConfigError, match="makes a int, which is no StatLogger"):
        load_stat_logger(f"{__name__}:make_number", EngineConfig())
