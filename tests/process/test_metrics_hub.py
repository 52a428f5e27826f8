"""The metrics of a server of several processes, of which some hang and some are killed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from quire.frontend.metrics.hub import MetricsHub
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.testing.metrics_audit import MetricsAudit, read_exposition
from tests.unit.frontend.metrics.books import Books

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
TIMEOUT_S = 2.0
"""What the hub gives the processes to answer when one of them is stopped; else it has more patience than a test."""


class ApiProcess:
    """A process that keeps books, from the outside."""

    def __init__(self, process: Process, audit: MetricsAudit) -> None:
        self._audit = audit
        self._process = process

    @classmethod
    async def start(cls, path: Path, name: str, audit: MetricsAudit) -> ApiProcess:
        command = [sys.executable, "-m", "tests.process.metrics_process", str(path), name]
        return cls(
            await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT, limit=1 << 24), audit
        )

    async def say(self, command: str) -> str:
        """What it answers, when it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        line = await asyncio.wait_for(self._process.stdout.readline(), DEADLINE_S)
        return str(json.loads(line))

    async def scrape(self) -> MetricsSnapshot:
        """The metrics of the whole server; the laws hold in them, and nothing has gone back."""
        seen = read_exposition(await self.say("scrape"))
        self._audit.check(seen)
        return seen

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def end(self) -> int:
        """It is told that nothing will come, or dead already: its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await asyncio.wait_for(self._process.wait(), DEADLINE_S)


async def until_left(hub: MetricsHub, num_processes: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while hub.num_processes != num_processes:
            await asyncio.sleep(0.001)


def test_any_process_tells_of_all_whatever_becomes_of_them(tmp_path: Path) -> None:
    asyncio.run(check_a_server(tmp_path))


async def check_a_server(directory: Path) -> None:
    parent, audit, path = Books("0"), MetricsAudit(), directory / "hub"
    hub = MetricsHub(path, parent.take, timeout_s=10 * DEADLINE_S)
    started = [asyncio.create_task(ApiProcess.start(path, name, audit)) for name in "12"]
    await asyncio.sleep(0)  # they may look for the hub before it listens
    await hub.start()
    one, two = [await task for task in started]
    await until_left(hub, 2)
    parent.note_step(num_running=5)

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
    hub.timeout_s = TIMEOUT_S
    start = time.monotonic()
    seen = await one.scrape()
    assert time.monotonic() - start >= TIMEOUT_S * 0.9, "it was waited for"
    assert (seen.value("quire_requests_accepted"), seen.value("quire_api_processes", "late")) == (7, 1)
    hub.timeout_s = 10 * DEADLINE_S
    for _ in range(3):
        await one.scrape()  # and it is waited for no more: `say` has less patience than the hub
    two.signal(signal.SIGCONT)
    await two.say("receive 1")
    seen = await two.scrape()
    assert seen.value("quire_requests_received") == 8

    two.signal(signal.SIGKILL)
    await two.end()
    await until_left(hub, 1)
    seen = await one.scrape()
    assert seen.value("quire_requests_received") == 8, "what was shown once stays"
    assert (seen.value("quire_requests_lost"), seen.value("quire_requests_rejected", "lost")) == (3, 1)
    assert seen.value("quire_api_processes_lost") == 1

    again = await ApiProcess.start(path, "2", audit)
    await until_left(hub, 2)
    await again.say("receive 2")
    await again.say("reject 2")
    assert (await one.scrape()).value("quire_requests_received") == 10
    await one.say("finish 3")
    assert [await process.end() for process in (one, again)] == [0, 0]
    await until_left(hub, 0)
    seen = parent.metrics.read(await hub.gather())
    audit.check(seen)
    assert (seen.value("quire_requests_finished"), seen.value("quire_requests_lost")) == (4, 3)
    await hub.close()
