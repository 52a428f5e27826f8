"""The server a benchmark starts for itself, played by small programs."""

from __future__ import annotations

import os

import pytest

from quire.cli.bench import startup as module
from quire.cli.bench.startup import own_server
from quire.errors import EngineDeadError

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
