"""`quire top` against a server made of canned answers: in a pipe, in a terminal, and without an answer."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.cli.server_watch import StateView
from quire.frontend.http.engine_view import describe_engine
from quire.wire.stats import BlockMap, EngineSnapshot, RequestSnapshot

Capture = pytest.CaptureFixture[str]
SRC = Path(__file__).resolve().parents[3] / "src"
EVIL = "evil\x1b[31m\x07"


def request(name: str, place: Any, first_block: int, num_blocks: int) -> RequestSnapshot:
    ids = b"".join(i.to_bytes(4, "little") for i in range(first_block, first_block + num_blocks))
    return RequestSnapshot(f"{name}-1", name, place, 40, 45, 44, 16, 99, 1, 0, 1700000000.0, num_blocks, ids)


SNAPSHOT = EngineSnapshot(
    50.0, 1700000003.5, 0, 2, 1, 8, 64,
    BlockMap(100, 93, 5, 12, 1, b"\1\2\2\1\1\1\1\0\0\0\0\0", b"\0\1\1\0\0\0\0\1\1\1\0\0"),
    [request("first", "running", 1, 4), request(EVIL, "running", 1, 2), request("third", "preempted", 0, 0)], 7,
)  # fmt: skip
FACTS = {"version": "1.2.3", "model": "demo", "block_size": 16, "max_model_len": 512, "abort": "off"}


class Canned(ThreadingHTTPServer):
    """Counts its tokens on with every look; `statuses` replace the answers of /debug/state, one each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.num_looks = 0
        self.statuses: list[int] = []
        self.metrics_status = 200
        self.speculates = False
        self.body = json.dumps(describe_engine(SNAPSHOT, {}, facts=FACTS, ended=[])).encode()
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Canned

    def do_GET(self) -> None:
        self.server.keys.add(self.headers.get("authorization"))
        if self.path == "/debug/state":
            self.server.num_looks += 1
            self._answer(self.server.statuses.pop(0) if self.server.statuses else 200, self.server.body)
        else:
            n = self.server.num_looks
            text = (
                f"vllm:generation_tokens_total 1{n}000\nvllm:prefix_cache_queries_total {n}00\n"
                f'vllm:prefix_cache_hits_total {n}0\nvllm:time_to_first_token_seconds_bucket{{le="0.5"}} {n}\n'
            )
            if self.server.speculates:
                for name, number in (("drafts", n), ("draft_tokens", 4 * n), ("accepted_tokens", 3 * n)):
                    text += f'vllm:spec_decode_num_{name}_total{{engine="0"}} {number}\n'
            self._answer(self.server.metrics_status, text.encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Canned]:
    with Canned() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_one_look_shows_the_server(server: Canned, capsys: Capture) -> None:
    assert main(["top", "--once", "--interval", "0.2", "--url", server.url + "/", "--api-key", "k"]) == 0
    out = capsys.readouterr().out
    assert server.keys == {"Bearer k"}
    assert f"Quire 1.2.3 · demo · {server.url}\n" in out
    assert "2 of 8" in out
    assert "6 %, 6 of 99 blocks" in out
    assert "2 shared, 3 free ones remember a beginning" in out
    assert "found in cache 10 % of prompt tokens" in out
    assert "after 250 ms" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("first-", "first ", "third"))]
    assert ["first", "running", "40/40", "16", "5/99", "4", "3.5", "s", "1"] in rows
    assert ["third", "waits,", "preempted", "40/40", "16", "5/99", "0", "3.5", "s", "1"] in rows
    assert "and 7 more" in out


def test_speculation_is_shown_where_there_is_some(server: Canned, capsys: Capture) -> None:
    assert main(["top", "--once", "--interval", "0.2", "--url", server.url]) == 0
    assert "speculation" not in capsys.readouterr().out
    server.speculates = True
    assert main(["top", "--once", "--interval", "0.2", "--url", server.url]) == 0
    assert "speculation    75 % of draft tokens accepted, 4.00 tokens per step with drafts" in capsys.readouterr().out


def test_without_metrics_the_rest_is_shown(server: Canned, capsys: Capture) -> None:
    server.metrics_status = 404
    assert main(["top", "--once", "--interval", "0.2", "--url", server.url]) == 0
    assert "writing        - tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "words"),
    [(404, "--disable-ui"), (401, "--api-key"), (500, "answered 500")],
)
def test_refusals_are_told_in_words(server: Canned, capsys: Capture, status: int, words: str) -> None:
    server.statuses = [status]
    assert main(["top", "--once", "--url", server.url]) == 2
    assert words in capsys.readouterr().err


def test_a_server_that_loads_is_waited_for(server: Canned, capsys: Capture) -> None:
    server.statuses = [503, 503]
    assert main(["top", "--once", "--interval", "0.2", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert f"Quire 1.2.3 · demo · {server.url}\n" in out
    assert err.count("is not ready (503): it loads its model") == 1


def test_a_missing_server_is_an_error(server: Canned, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["top", "--url", f"http://127.0.0.1:{port}"]) == 2
    assert "no server answers" in capsys.readouterr().err
    server.body = b'{"hello": 1}'
    assert main(["top", "--url", server.url]) == 2
    assert "not Quire's" in capsys.readouterr().err
    for url in ("ftp://x", "http://", "file:///etc/passwd"):
        assert main(["top", "--url", url]) == 2
        assert "not the address" in capsys.readouterr().err
    assert main(["top", "--interval", "0.01"]) == 2


def test_what_is_read_is_what_is_sent() -> None:
    """Every field that top reads is one that /debug/state has."""
    sent = describe_engine(SNAPSHOT, {}, facts=FACTS, ended=[])
    assert set(StateView.__struct_fields__) <= sent.keys()


class Terminal:
    """`quire top` on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        environment.pop("NO_COLOR", None)
        command = [sys.executable, "-m", "quire", "top", "--url", url, "--interval", "0.2"]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.seen = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.seen:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:  # it has ended
                assert text in self.seen, self.seen.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(server: Canned) -> Iterator[Terminal]:
    terminal = Terminal(server.url)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("leave", ["q", signal.SIGINT, signal.SIGTERM])
def test_in_a_terminal(server: Canned, terminal: Terminal, leave: str | signal.Signals) -> None:
    terminal.read_until(b"in a browser: /ui/dashboard")
    assert terminal.seen.startswith(b"\x1b[?1049h")
    assert EVIL.encode() not in terminal.seen  # no request id steers a terminal
    assert "██".encode() in terminal.seen
    assert b"88 blocks were never used" in terminal.seen
    server.statuses = [503] * 2
    terminal.read_until(b"is not ready")  # a server that is gone for a while may come back
    if isinstance(leave, signal.Signals):
        terminal.process.send_signal(leave)
    else:
        os.write(terminal.master, leave.encode())
    terminal.read_until(b"\x1b[?1049l")
    assert terminal.process.wait() == 0
