"""Observers of a scheduler: none, unless the configuration asks for one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.config.observability import ObservabilityConfig
from quire.engine.core import EngineCore
from quire.engine.recording.format import RecordingReader
from quire.engine.sched.interface import ObservedScheduler
from quire.engine.sched.scheduler import Scheduler
from quire.engine.tracing import of_incarnation
from quire.errors import ConfigError, ValidationError
from quire.replay.replay import replay

from .driver import Core
from .harness import ScriptedExecutor, make_config


def config_with(**observability: object) -> EngineConfig:
    config = make_config(enable_prefix_caching=True)
    return dataclasses.replace(config, observability_config=ObservabilityConfig(**observability))  # type: ignore[arg-type]


def test_by_default_nobody_watches() -> None:
    core = Core().core
    assert type(core.scheduler) is Scheduler
    with pytest.raises(ValidationError, match="--trace-events"):
        core.get_trace()


def test_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(record=str(tmp_path / "rec"), trace_file=str(tmp_path / "trace"), trace_events=100)
    monkeypatch.setattr("tests.unit.engine.driver.make_config", lambda: config)
    driver = Core()
    assert isinstance(driver.core.scheduler, ObservedScheduler)
    driver.add("a", 10, max_tokens=5)
    driver.run()
    assert len(driver.core.get_trace(3600).steps) == 5
    driver.core.shutdown()
    driver.core.shutdown()
    with (tmp_path / "rec").open("rb") as file:
        reader = RecordingReader(file)
        difference, num_events = replay(reader.header, reader.events())
    assert difference is None
    assert num_events > 10
    assert (tmp_path / "trace").read_text().endswith("\n]\n")


@pytest.mark.parametrize("flag", ["record", "trace_file"])
def test_a_file_that_exists_is_not_touched(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="the file exists"):
        EngineCore(config_with(**{flag: str(path)}), ScriptedExecutor, False)
    assert path.read_text() == "mine"


def test_a_core_that_is_started_again_has_files_of_its_own() -> None:
    config = config_with(record="rec", trace_events=7)
    assert of_incarnation(config, 0) is config
    again = of_incarnation(config, 2).observability_config
    assert (again.record, again.trace_file, again.trace_events) == ("rec.2", None, 7)
    second = dataclasses.replace(config, parallel_config=dataclasses.replace(config.parallel_config, engine_index=1))
    assert of_incarnation(second, 0).observability_config.record == "rec.engine1"
    assert of_incarnation(second, 2).observability_config.record == "rec.engine1.2"
    plain = make_config()
    assert of_incarnation(plain, 3) is plain
