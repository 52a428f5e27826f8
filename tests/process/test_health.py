"""Answers of the probes, whatever happens to a server (promise P4): busy is not dead, hung is not healthy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2

from .serving import ServerProcess, serving

TIME_LIMIT_S = 120.0
SERVES, COMES_BACK, LOADS_OR_IS_GONE = (200, 200, 200), (200, 200, 503), (503, 200, 503)
"""/health, /health/live, /health/ready."""
FOREVER = {"prompt": [50], "max_tokens": 2000, "ignore_eos": True, "stream": True}
CORES_STOP = {"QUIRE_FAILPOINTS": "core.start=stop"}
"""Each core stops itself before it loads anything, until the test continues it."""


def probes(url: str) -> tuple[int, ...]:
    paths = ("/health", "/health/live", "/health/ready")
    return tuple(httpx2.get(url + path, timeout=TIME_LIMIT_S).status_code for path in paths)


def wait_for(url: str, expected: tuple[int, ...]) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while (found := probes(url)) != expected:
        assert time.monotonic() < deadline, f"the probes say {found}, and not {expected}"


@contextmanager
def next_core_stopped(server: ServerProcess, *, instead_of: int | None = None) -> Iterator[None]:
    """A core is being started, which comes no further meanwhile."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while not (stopped := [pid for pid in server.core_pids() if pid != instead_of and is_stopped(pid)]):
        assert time.monotonic() < deadline, "no core is being started"
        time.sleep(0.005)
    yield
    os.kill(stopped[0], signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has just ended
        return False


def loads(server: ServerProcess) -> None:
    """The server answers at once, before there is a model."""
    with next_core_stopped(server):
        assert probes(server.url) == LOADS_OR_IS_GONE
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x" * 100_000}, timeout=TIME_LIMIT_S)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "loading" in refused.json()["error"]["message"]


def test_the_probes_tell_the_truth() -> None:
    flags = ("--max-num-seqs", "2", "--core-hang-timeout-s", "2", "--shutdown-timeout", "60")
    with (
        serving(*flags, executor="Leisurely", while_loading=loads, env=CORES_STOP) as server,
        httpx2.Client(base_url=server.url, timeout=TIME_LIMIT_S, limits=httpx2.Limits(max_connections=None)) as client,
    ):
        assert probes(server.url) == SERVES

        with ExitStack() as stack:  # saturated: both places are taken
            streams = [
                stack.enter_context(client.stream("POST", "/v1/completions", json=FOREVER)).iter_lines()
                for _ in range(2)
            ]
            for lines in streams:
                assert next(lines).startswith("data: ")
            assert probes(server.url) == SERVES

            core = server.core_pid()
            os.kill(core, signal.SIGKILL)
            with next_core_stopped(server, instead_of=core):
                wait_for(server.url, COMES_BACK)
            wait_for(server.url, SERVES)

            core = server.core_pid()
            os.kill(core, signal.SIGSTOP)  # hung: found out, ended and replaced
            with next_core_stopped(server, instead_of=core):
                wait_for(server.url, COMES_BACK)
            wait_for(server.url, SERVES)

            server.process.send_signal(signal.SIGTERM)
            wait_for(server.url, COMES_BACK)  # it drains: what runs goes on, and the process is well
        assert server.process.wait(TIME_LIMIT_S) == 0


def test_an_engine_that_is_given_up_is_no_healthy_one() -> None:
    with serving("--core-restart-limit", "0", executor="Quick") as server:
        os.kill(server.core_pid(), signal.SIGKILL)
        wait_for(server.url, LOADS_OR_IS_GONE)
