"""What the probes say in everything that may happen to a server (promise P4): busy is not dead, hung is not healthy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx2

from .serving import ServerProcess, serving

TIME_LIMIT_S = 60
SERVES, COMES_BACK, LOADS_OR_IS_GONE = (200, 200, 200), (200, 200, 503), (503, 200, 503)
"""/health, /health/live, /health/ready."""
FOREVER = {"prompt": [50], "max_tokens": 2000, "ignore_eos": True, "stream": True}


def probes(url: str) -> tuple[int, ...]:
    paths = ("/health", "/health/live", "/health/ready")
    return tuple(httpx2.get(url + path, timeout=TIME_LIMIT_S).status_code for path in paths)


def wait_for(url: str, expected: tuple[int, ...]) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while (found := probes(url)) != expected:
        assert time.monotonic() < deadline, f"the probes say {found}, and not {expected}"


@contextmanager
def next_core_stopped(server: ServerProcess, *, instead_of: int | None = None) -> Iterator[None]:
    """The core that is being started comes no further meanwhile."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while True:
        assert time.monotonic() < deadline, "no core is being started"
        try:
            core = server.core_pid()
        except (StopIteration, ValueError, OSError):  # between two cores there is none
            continue
        if core != instead_of:
            break
    os.kill(core, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(core, signal.SIGCONT)


def loads(server: ServerProcess) -> None:
    """It answers before there is a model, and at once."""
    with next_core_stopped(server):
        assert probes(server.url) == LOADS_OR_IS_GONE
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x" * 100_000}, timeout=TIME_LIMIT_S)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "loading" in refused.json()["error"]["message"]


def test_the_probes_tell_the_truth() -> None:
    flags = ("--max-num-seqs", "2", "--core-hang-timeout-s", "1", "--shutdown-timeout", "60")
    with (
        serving(*flags, executor="Leisurely", while_loading=loads) as server,
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
                assert probes(server.url) == COMES_BACK
            wait_for(server.url, SERVES)

            os.kill(server.core_pid(), signal.SIGSTOP)  # hung: found out, ended and replaced
            wait_for(server.url, COMES_BACK)
            wait_for(server.url, SERVES)

            server.process.send_signal(signal.SIGTERM)
            wait_for(server.url, COMES_BACK)  # it drains: what runs goes on, and the process is well
        assert server.process.wait(TIME_LIMIT_S) == 0


def test_an_engine_that_is_given_up_is_no_healthy_one() -> None:
    with serving("--core-restart-limit", "0", executor="Quick") as server:
        os.kill(server.core_pid(), signal.SIGKILL)
        wait_for(server.url, LOADS_OR_IS_GONE)
