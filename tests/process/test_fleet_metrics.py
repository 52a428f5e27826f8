"""The metrics of a server of several processes, of which some hang and some are killed."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from quire.frontend.fleet import parent
from quire.frontend.fleet.metrics import FleetMetrics
from quire.frontend.fleet.parent import ApiProcesses
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.testing.metrics_audit import MetricsAudit, read_exposition
from quire.wire.peers import ApiLaunch
from tests.unit.frontend.metrics.books import Books

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
TIMEOUT_S = 2.0
"""Time that the parent gives the processes to answer when one of them is stopped; usually it is longer."""


class BookProcess:
    """Stands in for `ApiProcess`: a process that keeps books, from the outside."""

    made: list[BookProcess]
    """All of a test, in order."""
    audit: MetricsAudit

    def __init__(self, launch: ApiLaunch) -> None:
        self.index = launch.index
        self.connection, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.process.metrics_process", str(theirs.fileno()), str(self.index)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.made.append(self)

    async def say(self, command: str) -> str:
        """Returns what it answers, when it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        line = await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), DEADLINE_S)
        return str(json.loads(line))

    async def scrape(self) -> MetricsSnapshot:
        """The metrics of the whole server; the laws hold in them, and nothing has gone back."""
        seen = read_exposition(await self.say("scrape"))
        self.audit.check(seen)
        return seen

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> int:
        self._process.kill()
        return self._process.wait()

    async def wait_end(self, timeout_s: float) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self._process.wait), timeout_s)

    async def end(self) -> int:
        """Ends the process by the end of its input, unless it is dead already. Returns its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = await self.wait_end(DEADLINE_S)
        self._process.stdout.close()
        return code


async def until_left(metrics: FleetMetrics, num_processes: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while metrics.num_processes != num_processes:
            await asyncio.sleep(0.001)


def test_any_process_tells_of_all_whatever_becomes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "ApiProcess", BookProcess)
    monkeypatch.setattr(BookProcess, "made", [], raising=False)
    monkeypatch.setattr(BookProcess, "audit", MetricsAudit(), raising=False)
    asyncio.run(check_a_server())


async def check_a_server() -> None:
    books, made, audit = Books("0"), BookProcess.made, BookProcess.audit
    metrics = FleetMetrics(books.take, lambda: Load(0.5, 3, 2, 0.75), timeout_s=10 * DEADLINE_S)
    processes = ApiProcesses(2, lambda index: cast("ApiLaunch", SimpleNamespace(index=index)), lambda index: None)
    processes.metrics = metrics
    processes.start()
    running = asyncio.create_task(processes.run())
    await asyncio.wait_for(processes.are_ready.wait(), DEADLINE_S)
    one, two = made
    books.note_step(num_running=5)

    for process, num_requests in ((one, 3), (two, 4)):
        for operation in ("receive", "accept", "yield_token"):
            await process.say(f"{operation} {num_requests}")
    await two.say("finish 1")
    for process in (one, two):
        seen = await process.scrape()
        assert seen.value("quire_requests_accepted") == 7
        assert seen.value("vllm:generation_tokens") == 7
        assert seen.value("vllm:num_requests_running") == 5
        assert seen.value("quire_requests_finished") == 1
        assert {series.labels for series in seen.find("memory").series} == {("0",), ("1",), ("2",)}

    two.signal(signal.SIGSTOP)
    metrics.timeout_s = TIMEOUT_S
    start = time.monotonic()
    seen = await one.scrape()
    assert time.monotonic() - start >= TIMEOUT_S * 0.9, "it was waited for"
    assert (seen.value("quire_requests_accepted"), seen.value("quire_api_processes", "late")) == (7, 1)
    metrics.timeout_s = 10 * DEADLINE_S
    for _ in range(3):
        await one.scrape()  # and it is waited for no more: `say` has less patience than the parent
    two.signal(signal.SIGCONT)
    await two.say("receive 1")
    seen = await two.scrape()
    assert seen.value("quire_requests_received") == 8

    two.signal(signal.SIGKILL)
    assert await two.end() == -signal.SIGKILL
    await until_left(metrics, 1)
    seen = await one.scrape()
    assert seen.value("quire_requests_received") == 8, "what was shown once stays"
    assert (seen.value("quire_requests_lost"), seen.value("quire_requests_rejected", "lost")) == (3, 1)
    assert seen.value("quire_api_processes_lost") == 1

    await until_left(metrics, 2)  # it was started again
    again = made[2]
    await again.say("receive 2")
    await again.say("reject 2")
    assert (await one.scrape()).value("quire_requests_received") == 10
    await one.say("finish 3")
    processes.stop()
    assert [await process.end() for process in (one, again)] == [0, 0]
    await running
    assert metrics.num_processes == 0
    seen = books.metrics.read(await metrics.gather())
    audit.check(seen)
    assert (seen.value("quire_requests_finished"), seen.value("quire_requests_lost")) == (4, 3)
