"""`quire bench overhead`: what is measured, and that it adds up."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.cli.bench.overhead import format_overhead
from quire.cli.bench.overhead_runs import CORE_THREAD, PhaseMeter, difference, per_token, thread_times
from quire.cli.main import main
from quire.frontend.output_processor import OutputProcessor


def test_a_meter_sums_what_it_wraps_and_goes_away() -> None:
    ticks = iter((0, 5, 10, 13))
    meter = PhaseMeter(lambda: next(ticks))
    before = OutputProcessor.is_live
    with meter.installed({"ask": ("quire.frontend.output_processor:OutputProcessor", "is_live")}):
        processor = OutputProcessor(None, log_stats=False)
        assert processor.is_live("a") is False
        with pytest.raises(TypeError):
            processor.is_live()  # type: ignore[call-arg]
    assert meter.spent_ns == {"ask": 8}
    assert OutputProcessor.is_live is before


def test_threads_are_known_by_name() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="waiting", args=(20,))
    thread.start()
    times = thread_times()
    end.set()
    thread.join()
    assert {"MainThread", "waiting", "process"} <= times.keys()
    assert 0 <= times["waiting"] < times["process"]


def test_a_difference_knows_threads_that_came_later() -> None:
    before = {"threads": {"a": 1}, "counts": {"tokens": 2}}
    after = {"threads": {"a": 4, "b": 5}, "counts": {"tokens": 12}}
    assert difference(after, before) == {"threads": {"a": 3, "b": 5}, "counts": {"tokens": 10}}


def figures(phases: dict[str, int], threads: dict[str, int], **counts: int) -> dict[str, dict[str, int]]:
    return {"phases": phases, "threads": threads, "counts": counts}


MODEL = {"execute_model": 400_000, "sample_tokens": 100_000}


def test_parts_add_up_in_two_processes() -> None:
    core_phases = {**MODEL, "schedule": 20_000, "update": 30_000, "encode": 10_000}
    core = figures(core_phases, {"MainThread": 600_000, "process": 700_000}, tokens=100, steps=50)
    frontend = figures(
        {"process": 100_000, "decode": 30_000, "journal": 10_000},
        {"MainThread": 300_000, "process": 400_000},
        tokens=50,
    )
    row = per_token(core, frontend, is_one_process=False)
    assert row["core_us_per_token"] == pytest.approx((700 - 500) / 100)
    assert row["core_us_per_step"] == pytest.approx(200 / 50)
    assert row["frontend_us_per_token"] == pytest.approx(400 / 50)
    parts = {name: value for name, value in row.items() if name.startswith("core.")}
    assert parts == pytest.approx(
        {"core.schedule": 0.2, "core.update": 0.3, "core.loop": 0.5, "core.encode": 0.1, "core.transport": 0.9}
    )
    assert row["frontend.transport"] == pytest.approx(1.2)


def test_parts_add_up_in_one_process() -> None:
    threads = {"MainThread": 300_000, CORE_THREAD: 600_000, "process": 900_000}
    core = figures({**MODEL, "schedule": 20_000, "update": 30_000, "encode": 0}, threads, tokens=100, steps=100)
    frontend = figures({"process": 100_000, "decode": 0, "journal": 0}, threads, tokens=100)
    row = per_token(core, frontend, is_one_process=True)
    assert row["core_us_per_token"] == pytest.approx(1.0)
    assert row["frontend_us_per_token"] == pytest.approx(3.0)


def test_the_command_prints_and_writes_the_same_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["--concurrency", "1,3", "--output-len", "16", "--step-ms", "0", "--reps", "1", "--transport", "inproc"]
    assert main(["bench", "overhead", *words, "--json", "--output-json", str(path)]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert json.loads(path.read_text()) == shown
    assert [(row["transport"], row["concurrency"]) for row in shown["results"]] == [("inproc", 1), ("inproc", 3)]
    assert all(row["core_us_per_token"] > 0 and row["frontend_us_per_token"] > 0 for row in shown["results"])
    table = format_overhead(shown)
    assert "schedule" in table
    assert "detokenize" in table


@pytest.mark.parametrize("words", [["--concurrency", "0"], ["--reps", "0"], ["--output-len", "3"]])
def test_numbers_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overhead", *words]) == 2
    assert "or more" in capsys.readouterr().err
