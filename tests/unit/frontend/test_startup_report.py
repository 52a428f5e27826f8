"""The report of a start."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from quire.frontend.tracing import Startup, StartupReport, describe_start
from quire.timeline import Stamp
from quire.wire.engine_core import EngineCoreReadyResponse

CORE = [Stamp("process", 1.0, 0.0), Stamp("ready", 3.5, 2.0)]
READY = EngineCoreReadyResponse(64, 8, 16, 128, 2.0, ("generate",), peak_memory_bytes=5 << 20, stamps=CORE)


def test_the_file_has_both_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    monkeypatch.setenv("QUIRE_STARTUP_REPORT", str(path))
    report = StartupReport(READY)
    assert not path.exists()
    report.finish()
    startup = msgspec.json.decode(path.read_bytes(), type=Startup)
    assert startup.core == CORE
    assert startup.frontend[0].name == "process"
    assert {"engine ready", "first output"} <= {stamp.name for stamp in startup.frontend}
    assert startup.core_peak_memory_bytes == 5 << 20 < startup.frontend_peak_memory_bytes
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_a_file_that_cannot_be_written_is_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_STARTUP_REPORT", str(tmp_path / "missing" / "report.json"))
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    StartupReport(READY).finish()
    assert "cannot be written: No such file or directory" in caplog.text


def test_the_line_of_the_log() -> None:
    frontend = [Stamp("process", 0.5, 0.0), Stamp("engine ready", 4.0, 0.3)]
    words = "engine ready 3.50 s after its process began"
    assert describe_start(frontend, CORE, 3 << 20, 5 << 20) == (
        f"{words}, its core after 2.50 s; peak memory 3 MiB, core 5 MiB"
    )
    assert describe_start(frontend, [], 3 << 20, 0) == f"{words}; peak memory 3 MiB"
