"""The parent and its processes on one event loop: rounds, slow processes, and the counts of those that exit."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from quire.errors import ServerError
from quire.frontend.fleet import metrics as fleet_metrics
from quire.frontend.fleet.metrics import FleetMetrics, encode_report, gather_from_parent
from quire.frontend.fleet.peer_link import Handler, PeerLink
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot, ProcessReport
from quire.testing.metrics_audit import MetricsAudit
from quire.wire.peers import PeerMessage
from tests.unit.frontend.metrics.books import Books

LONG_S = 60.0
"""A limit that no test should reach."""
LOAD = Load(0.5, 3, 2, 0.75)


class Process:
    """An API process that is a task, with its end of the connection."""

    def __init__(self, index: int, take: Callable[[], ProcessReport] | None = None) -> None:
        self.books = Books(str(index))
        self.loads: list[Load] = []
        self.take = take or self.books.take
        self.answers_after: asyncio.Event | None = None
        """None: at once."""
        self.link = PeerLink(self._handle)

    async def _handle(self, call: PeerMessage) -> bytes:
        assert call.method == "report"
        self.loads.append(msgspec.convert(call.args[0], Load))
        if self.answers_after is not None:
            await self.answers_after.wait()
        return encode_report(self.take())

    def accept(self, number: int) -> None:
        for _ in range(number):
            self.books.receive()
            self.books.accept()


class Server:
    """A parent, as far as metrics go."""

    def __init__(self, stack: AsyncExitStack, timeout_s: float) -> None:
        self._stack = stack
        self._num_joined = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.books = Books("0")
        self.metrics = FleetMetrics(self.books.take, lambda: LOAD, timeout_s=timeout_s)

    async def connect(self, take: Callable[[], ProcessReport] | None = None, *, reports: bool = True) -> Process:
        self._num_joined += 1
        index = self._num_joined
        process = Process(index, take)

        async def handle(call: PeerMessage) -> Any:
            assert call.method == "metrics"
            return encode_report(await self.metrics.gather())

        link = await self.link(process.link, handle, lambda: self.metrics.note_gone(index))
        self.metrics.join(index, link)
        if reports:
            self.metrics.note_report(index, encode_report(process.books.take()), is_final=False)
        return process

    async def link(self, theirs: PeerLink, handle: Handler, on_end: Callable[[], None]) -> PeerLink:
        """The parent's end of a connection to `theirs`."""
        link = PeerLink(handle)
        for end, connection in zip((link, theirs), socket.socketpair(), strict=True):
            await end.connect(connection)
            task = asyncio.create_task(end.run())
            self._tasks.add(task)
            self._stack.callback(end.close)
            if end is link:
                task.add_done_callback(lambda _: on_end())
        return link

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_S):
            while not holds():
                await asyncio.sleep(0)

    async def gather(self) -> MetricsSnapshot:
        return self.books.metrics.read(await self.metrics.gather())

    async def scrape(self, process: Process) -> MetricsSnapshot:
        return self.books.metrics.read(await gather_from_parent(process.link))


def check(test: Callable[[Server], Awaitable[None]], timeout_s: float = LONG_S) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            await test(Server(stack, timeout_s))

    asyncio.run(run())


def test_everybody_knows_of_all() -> None:
    async def test(s: Server) -> None:
        one, two = await s.connect(), await s.connect()
        for number in range(1, 4):
            one.accept(1)
            two.accept(2)
            for seen in (await s.scrape(one), await s.scrape(two), await s.gather()):
                assert seen.value("quire_requests_accepted") == 3 * number, "of this moment, in every process"
                assert seen.value("quire_api_processes", "answered") == 3
                assert seen.value("quire_api_processes", "late") == 0
                MetricsAudit().check(seen)

    check(test)


def test_many_who_ask_are_answered_together() -> None:
    async def test(s: Server) -> None:
        num_taken = 0

        def take() -> ProcessReport:
            nonlocal num_taken
            num_taken += 1
            return books.take()

        books, process = Books(), await s.connect(take)
        reports = await asyncio.gather(*(gather_from_parent(process.link) for _ in range(50)))
        assert len({id(report) for report in reports}) == 50
        assert 1 <= num_taken <= 3, "one round, and one for those who came while it was under way"

    check(test)


def test_an_answer_is_never_older_than_its_question() -> None:
    async def test(s: Server) -> None:
        slow, quick = await s.connect(), await s.connect()
        slow.answers_after = asyncio.Event()
        first = asyncio.ensure_future(s.gather())
        await s.until(lambda: bool(slow.loads and quick.loads))
        quick.accept(1)  # its answer to the first question is under way
        second = asyncio.ensure_future(s.gather())
        slow.answers_after.set()
        assert (await first).value("quire_requests_accepted") == 0
        assert (await second).value("quire_requests_accepted") == 1

    check(test)


def test_what_was_shown_never_goes_back() -> None:
    async def test(s: Server) -> None:
        audit = MetricsAudit()
        one, two = await s.connect(), await s.connect()
        two.accept(3)
        two.books.yield_token()
        one.accept(1)
        audit.check(await s.scrape(one))
        two.accept(1)  # not reported yet
        two.link.close()  # killed: its connection ends without a last report
        await s.until(lambda: s.metrics.num_processes == 1)
        seen = await s.scrape(one)
        audit.check(seen)
        assert seen.value("quire_requests_accepted") == 4
        assert (seen.value("quire_requests_live"), seen.value("quire_requests_lost")) == (1, 3)
        assert seen.value("quire_api_processes_lost") == 1
        again = await s.connect()
        again.accept(5)
        seen = await s.scrape(one)
        audit.check(seen)
        assert seen.value("quire_requests_accepted") == 9, "the new one begins at 0, and is added to the dead one"

    check(test)


@pytest.mark.parametrize("still_counts", [True, False])
def test_a_process_that_ends_says_all_it_has_counted(still_counts: bool) -> None:
    async def test(s: Server) -> None:
        process = await s.connect()
        process.accept(2)
        process.books.finish()
        process.books.finish()
        last = encode_report(process.books.take()) if still_counts else None
        s.metrics.note_report(1, last, is_final=True)
        process.link.close()
        await s.until(lambda: s.metrics.num_processes == 0)
        seen = await s.gather()
        assert seen.value("quire_requests_finished") == (2 if still_counts else 0)
        assert (seen.value("quire_requests_lost"), seen.value("quire_api_processes_lost")) == (0, 0)

    check(test)


def test_one_that_hangs_is_waited_for_once() -> None:
    async def test(s: Server) -> None:
        hung = await s.connect()
        hung.accept(2)
        assert (await s.gather()).value("quire_requests_accepted") == 2
        hung.answers_after = asyncio.Event()
        hung.accept(1)
        s.metrics.timeout_s = 0.01
        seen = await s.gather()
        s.metrics.timeout_s = LONG_S
        for _ in range(3):
            assert seen.value("quire_requests_accepted") == 2, "as it was"
            assert seen.value("quire_api_processes", "late") == 1
            seen = await s.gather()
        assert len(hung.loads) == 2, "it is not asked again before it has answered"
        hung.answers_after.set()
        await s.until(lambda: not any(member.is_asked for member in s.metrics._members.values()))
        seen = await s.gather()
        assert seen.value("quire_requests_accepted") == 3
        assert seen.value("quire_api_processes", "late") == 0

    check(test)


def test_one_that_goes_while_it_is_asked_is_late_and_then_lost() -> None:
    async def test(s: Server) -> None:
        process = await s.connect()
        process.answers_after = asyncio.Event()
        asked = asyncio.ensure_future(s.gather())
        await s.until(lambda: bool(process.loads))
        process.link.close()
        seen = await asked
        assert seen.value("quire_api_processes", "late") + seen.value("quire_api_processes_lost") == 1
        await s.until(lambda: s.metrics.num_processes == 0)
        assert (await s.gather()).value("quire_api_processes_lost") == 1

    check(test)


def test_reports_are_asked_for_regularly_and_bring_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_metrics, "REPORT_INTERVAL_S", 0.001)

    async def test(s: Server) -> None:
        process = await s.connect(reports=False)
        running = asyncio.create_task(s.metrics.run())
        process.accept(4)
        await s.until(lambda: len(process.loads) > 2)
        running.cancel()
        process.link.close()
        await s.until(lambda: s.metrics.num_processes == 0)
        assert (await s.gather()).value("quire_requests_lost") == 4
        assert process.loads[0] == LOAD

    check(test)


def test_a_process_that_counts_no_more_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_metrics, "REPORT_INTERVAL_S", 0.0)

    def take() -> ProcessReport:
        raise ServerError("the exporter has failed")

    async def test(s: Server) -> None:
        failed, other = await s.connect(take), await s.connect()
        running = asyncio.create_task(s.metrics.run())
        for process in (failed, other):
            with pytest.raises(ServerError, match="API process 1: the exporter has failed"):
                await s.scrape(process)
        with pytest.raises(ServerError, match="API process 1: the exporter has failed"):
            await s.gather()
        assert not running.done()
        running.cancel()

    check(test)


def test_without_a_parent_there_is_no_answer() -> None:
    async def test(s: Server) -> None:
        process = await s.connect()
        process.link.close()
        with pytest.raises(ServerError, match="is gone"):
            await gather_from_parent(process.link)

    check(test)


def test_a_parent_that_hangs() -> None:
    async def test(s: Server) -> None:
        async def hang(call: PeerMessage) -> None:
            await asyncio.sleep(LONG_S)

        process = Process(1)
        await s.link(process.link, hang, lambda: None)
        with pytest.raises(ServerError, match=r"did not answer in 0\.01 s"):
            await gather_from_parent(process.link, 0.01)

    check(test)
