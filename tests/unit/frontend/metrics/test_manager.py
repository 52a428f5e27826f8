from __future__ import annotations

import logging

import pytest

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.frontend.metrics.exchange import HttpExchange
from quire.frontend.metrics.manager import StatLogger, StatLoggerManager, load_stat_logger
from quire.frontend.metrics.operations import ControlOperation
from quire.frontend.metrics.stats import IterationStats
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
