"""The hub and its clients on one event loop: who is asked, who is waited for, and what stays of those that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from quire.errors import ServerError
from quire.frontend.metrics.collect.facts import Load
from quire.frontend.metrics.hub import MetricsHub
from quire.frontend.metrics.hub_client import HubClient
from quire.frontend.metrics.hub_messages import (
    FROM_HUB,
    MAX_MESSAGE_BYTES,
    Hello,
    Question,
    Report,
    encode_message,
    read_message,
)
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot, ProcessReport
from quire.testing.metrics_audit import MetricsAudit
from quire.wire.serial import WireError

from .books import Books

LONG_S = 60.0
"""A limit that no test should reach."""


class Server:
    """A hub, and processes that are event-loop tasks."""

    def __init__(self, path: Path, stack: AsyncExitStack, timeout_s: float) -> None:
        self.path = path / "hub"
        self._stack = stack
        self.parent = Books("0")
        self.hub = MetricsHub(self.path, self.parent.take, get_load=lambda: Load(0.5, 3, 2, 0.75), timeout_s=timeout_s)

    async def connect(
        self, name: str, take: Callable[[], ProcessReport] | None = None, *, report_interval_s: float = LONG_S
    ) -> tuple[Books, HubClient]:
        books = Books(name)
        self.loads: list[Load] = []
        client = HubClient(
            self.path, name, take or books.take, on_load=self.loads.append, report_interval_s=report_interval_s
        )
        await client.connect(LONG_S)
        self._stack.push_async_callback(client.close)
        return books, client

    async def connect_raw(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A process that does what the test says."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(encode_message(Hello(name)))
        self._stack.callback(writer.close)
        return reader, writer

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_S):
            while not holds():
                await asyncio.sleep(0)

    def read(self, report: ProcessReport) -> MetricsSnapshot:
        return self.parent.metrics.read(report)


def check(path: Path, test: Callable[[Server], Awaitable[None]], timeout_s: float = LONG_S) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            server = Server(path, stack, timeout_s)
            await server.hub.start()
            stack.push_async_callback(server.hub.close)
            await test(server)

    asyncio.run(run())


def accept(books: Books, number: int) -> None:
    for _ in range(number):
        books.receive()
        books.accept()


def test_everybody_knows_of_all(tmp_path: Path) -> None:
    async def test(s: Server) -> None:
        (one, client_one), (two, client_two) = await s.connect("1"), await s.connect("2")
        await s.until(lambda: s.hub.num_processes == 2)
        for number in range(1, 4):
            accept(one, 1)
            accept(two, 2)
            for source in (client_one, client_two, s.hub):
                seen = s.read(await source.gather())
                assert seen.value("quire_requests_accepted") == 3 * number, "of this moment, in every process"
                assert seen.value("quire_api_processes", "answered") == 3
                assert seen.value("quire_api_processes", "late") == 0
                MetricsAudit().check(seen)

    check(tmp_path, test)


def test_many_who_ask_are_answered_together(tmp_path: Path) -> None:
    async def test(s: Server) -> None:
        num_taken = 0

        def take() -> ProcessReport:
            nonlocal num_taken
            num_taken += 1
            return books.take()

        books, client = Books(), (await s.connect("1", take))[1]
        await s.until(lambda: s.hub.num_processes == 1)
        before = num_taken
        reports = await asyncio.gather(*(client.gather() for _ in range(50)))
        assert len({id(report) for report in reports}) == 50
        assert 1 <= num_taken - before <= 3, "one round, and one for those who came while it was under way"

    check(tmp_path, test)


def test_what_was_shown_never_goes_back(tmp_path: Path) -> None:
    async def test(s: Server) -> None:
        audit = MetricsAudit()
        (one, client_one), (two, _) = await s.connect("1"), await s.connect("2")
        await s.until(lambda: s.hub.num_processes == 2)
        accept(two, 3)
        two.yield_token()
        accept(one, 1)
        audit.check(s.read(await client_one.gather()))
        accept(two, 1)  # nobody has heard of this one
        # process 2 is killed: its connection ends without a last report
        for process in list(s.hub._processes):
            if process.name == "2":
                process.writer.transport.abort()
        await s.until(lambda: s.hub.num_processes == 1)
        seen = s.read(await client_one.gather())
        audit.check(seen)
        assert seen.value("quire_requests_accepted") == 4
        assert (seen.value("quire_requests_live"), seen.value("quire_requests_lost")) == (1, 3)
        assert seen.value("quire_api_processes_lost") == 1
        again, _ = await s.connect("2")
        await s.until(lambda: s.hub.num_processes == 2)
        accept(again, 5)
        seen = s.read(await client_one.gather())
        audit.check(seen)
        assert seen.value("quire_requests_accepted") == 9, "the new one begins at 0, and is added to the dead one"

    check(tmp_path, test)


def test_a_process_that_ends_says_all_it_has_counted(tmp_path: Path) -> None:
    async def test(s: Server) -> None:
        books, client = await s.connect("1")
        await s.until(lambda: s.hub.num_processes == 1)
        accept(books, 2)
        books.finish()
        books.finish()
        await client.close()
        await s.until(lambda: s.hub.num_processes == 0)
        seen = s.read(await s.hub.gather())
        assert seen.value("quire_requests_finished") == 2
        assert (seen.value("quire_requests_lost"), seen.value("quire_api_processes_lost")) == (0, 0)
        with pytest.raises(ServerError, match="is gone"):
            await client.gather()

    check(tmp_path, test)


def test_one_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    async def test(s: Server) -> None:
        hung = Books("hung")
        accept(hung, 2)
        reader, writer = await s.connect_raw("hung")
        writer.write(encode_message(Report(0, hung.take())))
        await s.until(lambda: s.hub.num_processes == 1)
        await read_message(reader, FROM_HUB)  # the load: its report has come
        for _ in range(3):
            seen = s.read(await s.hub.gather())
            assert seen.value("quire_requests_accepted") == 2, "as it was"
            assert seen.value("quire_api_processes", "late") == 1
        question = await read_message(reader, FROM_HUB)
        assert isinstance(question, Question)
        accept(hung, 1)
        writer.write(encode_message(Report(question.number, hung.take())))
        await s.until(lambda: all(process.asked is None for process in s.hub._processes))
        s.hub.timeout_s = LONG_S
        asked = asyncio.ensure_future(s.hub.gather())
        question = await read_message(reader, FROM_HUB)
        assert isinstance(question, Question), "it has answered, and is asked again"
        writer.write(encode_message(Report(question.number, hung.take())))
        seen = s.read(await asked)
        assert seen.value("quire_requests_accepted") == 3
        assert seen.value("quire_api_processes", "late") == 0

    check(tmp_path, test, timeout_s=0.01)


def test_reports_come_unasked_and_bring_the_load(tmp_path: Path) -> None:
    async def test(s: Server) -> None:
        books, _ = await s.connect("1", report_interval_s=0.001)
        await s.until(lambda: bool(s.loads))
        accept(books, 4)
        known = len(s.loads)
        await s.until(lambda: len(s.loads) > known + 1)
        (process,) = s.hub._processes
        process.writer.transport.abort()
        await s.until(lambda: s.hub.num_processes == 0)
        assert s.read(await s.hub.gather()).value("quire_requests_lost") == 4
        assert s.loads[0] == Load(0.5, 3, 2, 0.75)

    check(tmp_path, test)


def test_a_process_that_counts_no_more_is_no_secret(tmp_path: Path) -> None:
    def take() -> ProcessReport:
        raise ServerError("the exporter has failed")

    async def test(s: Server) -> None:
        _, client = await s.connect("1", take)
        _, other = await s.connect("2")
        await s.until(lambda: s.hub.num_processes == 2)
        for source in (client, other, s.hub):
            with pytest.raises(ServerError, match="API process 1: the exporter has failed"):
                await source.gather()

    check(tmp_path, test)


def test_who_speaks_in_tongues_is_left(tmp_path: Path) -> None:
    async def test(s: Server) -> None:
        books, client = await s.connect("1")
        accept(books, 1)
        for junk in (b"\x00\x00\x00\x01\xc1", (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"), b"\x00"):
            reader, writer = await s.connect_raw("junk")
            writer.write(junk)
            if len(junk) == 1:
                writer.close()
            assert await reader.read() == b"", "the hub has closed the connection"
        assert s.read(await client.gather()).value("quire_requests_accepted") == 1

    check(tmp_path, test)


def test_without_a_hub_there_is_no_answer(tmp_path: Path) -> None:
    async def test(s: Server) -> None:
        _, client = await s.connect("1")
        await s.until(lambda: s.hub.num_processes == 1)
        await s.hub.close()
        with pytest.raises(ServerError, match="is gone"):
            await client.gather()

    check(tmp_path, test)


def test_a_hub_that_hangs(tmp_path: Path) -> None:
    async def test() -> None:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(hang, tmp_path / "hub")
        client = HubClient(tmp_path / "hub", "1", Books().take, gather_timeout_s=0.01)
        await client.connect(LONG_S)
        with pytest.raises(ServerError, match=r"did not answer in 0\.01 s"):
            await client.gather()
        await client.close()
        server.close()

    asyncio.run(test())


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        asyncio.run(HubClient(tmp_path / "hub", "1", Books().take).connect(0.0))


def test_messages_that_are_none() -> None:
    async def read(data: bytes) -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_message(reader, FROM_HUB)

    assert asyncio.run(read(b"")) is None
    assert asyncio.run(read(encode_message(Question(3))[:-1])) is None, "cut off"
    assert asyncio.run(read(encode_message(Question(3)))) == Question(3)
    with pytest.raises(WireError, match="no message of a metrics hub"):
        asyncio.run(read(encode_message(Hello("x"))))
