"""A server for each engine of a machine, by the command."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.ports import free_ports

from .background import running
from .harness import DEADLINE_S
from .serving import SRC, START_TIMEOUT_S, environment, serve_command
from .test_nodes import is_running

pytestmark = pytest.mark.slow


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def test_a_server_on_each_port_and_their_joint_health() -> None:
    """One is killed: the health says so until it is back. Ctrl-C ends all, and nothing is left."""
    first = free_ports(3)
    flags = ["--port", str(first), "--data-parallel-supervisor-port", str(first + 2), "-dp", "2", "-dpm"]
    flags += ["--distributed-executor-backend", "tests.process.executors:Quick"]
    with running(serve_command(*flags), cwd=SRC.parent, env=environment()) as program, httpx2.Client() as http:

        def health() -> tuple[int, list[dict[str, Any]]]:
            response = http.get(f"http://127.0.0.1:{first + 2}/health")
            return response.status_code, response.json()["servers"]

        def wait_for_health(status: int) -> list[dict[str, Any]]:
            deadline = time.monotonic() + DEADLINE_S
            while (found := health())[0] != status:
                assert time.monotonic() < deadline, found
                time.sleep(0.02)
            return found[1]

        program.wait_for(lambda line: "servers on ports" in line, START_TIMEOUT_S)
        assert [each["state"] for each in wait_for_health(200)] == ["up", "up"]
        for port in (first, first + 1):
            body = {"model": "demo", "prompt": "x", "max_tokens": 3}
            answer = http.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 3
        servers = children(program.process.pid)
        assert len(servers) == 2
        os.kill(servers[1], signal.SIGKILL)
        wait_for_health(503)
        assert sorted(each["restarts"] for each in wait_for_health(200)) == [0, 1]
        left = children(program.process.pid)
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(120) == 0
        assert not any(map(is_running, left))
