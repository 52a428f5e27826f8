"""`quire bench startup`: its processes and reports; servers that a benchmark starts, played by small programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli.bench import startup as module
from quire.cli.bench.startup import command_line, flag_words, forget, format_startup, own_server, run_once, summarize
from quire.cli.main import main
from quire.errors import EngineDeadError


def report(spawned_s: float, first_output_s: float) -> dict[str, Any]:
    frontend = [["process", spawned_s + 0.01, 0.0], ["first output", spawned_s + first_output_s, 0.5]]
    core = [["process", spawned_s + 0.2, 0.0], ["ready", spawned_s + 1.0, 0.75]]
    return {
        "spawned_s": spawned_s,
        "frontend": frontend,
        "core": core,
        "frontend_peak_memory_bytes": 80 << 20,
        "core_peak_memory_bytes": 300 << 20,
    }


RUNS = [report(100, 1.5), report(200, 1.2), report(300, 9.0)]


def test_figures_are_medians_since_the_command_was_started() -> None:
    figures = summarize(RUNS)
    assert (figures["first_token_s"], figures["first_tokens_s"]) == (1.5, [1.5, 1.2, 9.0])
    assert figures["core"] == [{"name": "process", "s": 0.2, "cpu_s": 0.0}, {"name": "ready", "s": 1.0, "cpu_s": 0.75}]
    assert figures["cpu_s"] == 1.25
    assert figures["core_peak_memory_bytes"] == 300 << 20


def test_stamps_are_found_by_name_whatever_their_order() -> None:
    turned = {**RUNS[0], "core": RUNS[0]["core"][::-1]}
    assert summarize([RUNS[0], turned])["core"] == summarize(RUNS[:1])["core"]


def test_the_table_shows_the_median_start() -> None:
    facts = {"model": "tiny", "cpu": "a CPU", "cores": 2, "is_cold": True}
    text = format_startup({**facts, **summarize(RUNS)})
    assert text.splitlines()[0] == (
        "start of tiny: first token after 1.50 s, median of 3 (1.50, 1.20, 9.00); 1.25 s of CPU time"
    )
    assert text.splitlines()[1] == "a CPU, 2 cores, the model's files read from the disk"
    assert "core (300 MiB at most)" in text
    assert text.splitlines()[-1].split() == ["ready", "1000", "800", "750"]


def test_engine_flags_are_passed_on() -> None:
    given = ["--dtype=float32", "--no-enable-prefix-caching", "--max-model-len", "4k", "--hf-overrides.a", "1"]
    words = flag_words(command_line().parse([*given, "--num-iters", "1"]))
    parsed = command_line().parse(words)
    assert parsed.given == {
        "dtype": "float32",
        "enable_prefix_caching": False,
        "max_model_len": 4000,
        "hf_overrides": {"a": 1},
    }


def test_a_start_is_a_process_that_leaves_a_report() -> None:
    code = "import json, os; json.dump({'frontend': []}, open(os.environ['QUIRE_STARTUP_REPORT'], 'w'))"
    found = run_once([sys.executable, "-c", code], [])
    assert found["frontend"] == []
    assert found["spawned_s"] > 0


@pytest.mark.parametrize(("code", "words"), [("raise SystemExit('no model')", "exit code 1: no model"), ("", "code 0")])
def test_a_start_that_fails_says_why(code: str, words: str) -> None:
    with pytest.raises(EngineDeadError, match=words):
        run_once([sys.executable, "-c", code], [])


def test_forgetting_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("words")
    forget([tmp_path / "a"])
    assert (tmp_path / "a").read_text() == "words"


@pytest.mark.slow
def test_a_real_start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "1")
    assert main(["bench", "startup", "--num-iters", "1", "--num-iters-warmup", "0", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    names = {stamp["name"] for stamp in figures["core"]}
    assert {"process", "interpreter", "imports", "configuration", "torch", "weights", "warm-up", "ready"} <= names
    assert figures["first_token_s"] > 0


SAY = "import os, sys, time\ndef say(text): print(text, file=sys.stderr, flush=True)\n"
SERVING = "say('INFO quire 0.1.0: serving a model on http://127.0.0.1:4321 (1.0 s)')\n"


def play(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(module, "_PROGRAM", SAY + program)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)


def test_its_url_its_key_and_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    check = "assert sys.argv[1] == str(os.getppid()) and sys.argv[-1] == '--x=1' and os.environ['QUIRE_API_KEY']\n"
    play(monkeypatch, check + "say('starting')\n" + SERVING + "time.sleep(60)")
    with own_server(["--x=1"]) as (url, key):
        assert url == "http://127.0.0.1:4321"
        assert len(key) > 10
    assert "QUIRE_API_KEY" not in os.environ


def test_one_that_ends_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "say('loading'); say('quire: error: no memory'); say('')")
    with pytest.raises(EngineDeadError, match="ended before it served: no memory"), own_server([]):
        pass


def test_one_that_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "time.sleep(60)")
    monkeypatch.setattr(module, "START_LIMIT_S", 0.05)
    with pytest.raises(EngineDeadError, match="not started within"), own_server([]):
        pass


def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVING + "time.sleep(60)")
    monkeypatch.setattr(module, "END_LIMIT_S", 0.05)
    with own_server([]) as (url, _):
        assert url.endswith(":4321")
