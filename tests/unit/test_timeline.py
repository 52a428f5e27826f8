"""Stamps of a start."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire import timeline


@pytest.fixture(autouse=True)
def own_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_stamps", {})


def test_the_first_time_of_a_name_counts() -> None:
    timeline.stamp("a")
    first = timeline.get_stamps()[1]
    timeline.stamp("b")
    timeline.stamp("a")
    assert timeline.get_stamps()[1] == first
    assert [s.name for s in timeline.get_stamps()] == ["process", "a", "b"]


def test_stamps_ascend_on_the_monotonic_clock() -> None:
    timeline.stamp("a")
    timeline.stamp("b")
    process, a, b = timeline.get_stamps()
    assert process.time_s < a.time_s <= b.time_s <= time.monotonic()
    assert process.cpu_s == 0 < a.cpu_s <= b.cpu_s


def test_a_process_knows_when_it_was_created() -> None:
    before = time.monotonic()
    code = "import quire.timeline as t; print(t.process_start())"
    started = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert before - 0.02 <= started <= time.monotonic()  # to 10 ms


@pytest.mark.parametrize("text", ["", "1 (a b) c) S 0"])
def test_without_a_readable_stat_it_is_the_first_stamp(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    timeline.stamp("a")
    first = timeline.get_stamps()[1].time_s
    for path in (tmp_path / "stat", tmp_path / "missing"):
        assert timeline.process_start(str(path)) == first


def test_a_listener_is_called_with_the_number_of_stamps_until_it_is_removed() -> None:
    heard: list[tuple[int, float]] = []
    stop = timeline.listen(lambda *words: heard.append(words))
    timeline.stamp("a")
    timeline.stamp("a")
    timeline.stamp("b", allowance_s=300.0)
    stop()
    timeline.stamp("c")
    assert heard == [(0, 0.0), (1, 0.0), (2, 300.0)]


@pytest.mark.parametrize(
    ("command", "is_own"),
    [
        ("python -P -m quire.engine.proc --handshake-address x", True),
        ("python -m quire.frontend.fleet.proc", True),
        ("python -m quire.worker.proc --rank 0", True),
        ("python -m pytest -m quire.worker.proc", False),
        ("python program.py -m", False),
        ("python -m quire serve", False),
    ],
)
def test_the_collector_rests_in_processes_of_quire_only(command: str, is_own: bool) -> None:
    assert timeline.runs_own_process(command.split()) == is_own


def test_the_collector_rests_while_a_process_starts() -> None:
    program = "import gc; held = gc.isenabled(); from quire import timeline as t; print(held, gc.isenabled())"
    program += "; t.hold_garbage(); print(gc.isenabled()); t.release_garbage(); print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["True", "True", "False", "True"], "a program that imports quire keeps its own"
