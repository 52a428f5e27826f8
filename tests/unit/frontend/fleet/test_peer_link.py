"""The connection between a server and its API processes: calls cross, errors keep their class, an end is noticed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.errors import NotFoundError, ServerError
from quire.frontend.fleet.peer_link import MAX_UNREAD_BYTES, Handler, PeerLink
from quire.frontend.http.errors import UnavailableError
from quire.wire.peers import LENGTH, MAX_PEER_BYTES, PeerMessage
from quire.wire.serial import WireError


async def echo(call: PeerMessage) -> Any:
    match call.method:
        case "echo":
            return list(call.args)
        case "missing":
            raise NotFoundError("there is no such thing")
        case "fault":
            raise KeyError("surprise")
        case "wait":
            await asyncio.Event().wait()
    return None


@asynccontextmanager
async def linked(handle: Handler = echo) -> AsyncIterator[tuple[PeerLink, PeerLink, list[asyncio.Task[None]]]]:
    ours, theirs = socket.socketpair()
    links = PeerLink(handle), PeerLink(handle)
    for link, connection in zip(links, (ours, theirs), strict=True):
        await link.connect(connection)
    tasks = [asyncio.create_task(link.run()) for link in links]
    yield *links, tasks
    for link in links:
        await link.end()
    await asyncio.wait(tasks)


def test_calls_both_ways_side_by_side() -> None:
    async def run() -> None:
        async with linked() as (here, there, _):
            waiting = asyncio.create_task(here.call("wait"))
            large = b"x" * (1 << 20)
            calls = [link.call("echo", number, large) for number in range(5) for link in (here, there)]
            results = await asyncio.gather(*calls)
            assert [number for number, _ in results] == [n for n in range(5) for _ in range(2)]
            assert all(data == large for _, data in results)
            assert not waiting.done()
            waiting.cancel()

    asyncio.run(run())


def test_errors_keep_their_class(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with linked() as (here, _, _):
            with pytest.raises(NotFoundError, match="no such thing"):
                await here.call("missing")
            with pytest.raises(ServerError, match="surprise"):
                await here.call("fault")
            assert await here.call("echo", 1) == [1]

    asyncio.run(run())


def test_who_waits_is_told_when_the_other_side_is_gone() -> None:
    async def run() -> None:
        async with linked() as (here, there, tasks):
            waiting = asyncio.create_task(here.call("wait"))
            await here.call("echo")
            there.close()
            with pytest.raises(UnavailableError, match="is gone"):
                await waiting
            await tasks[0]
            with pytest.raises(UnavailableError):
                await here.call("echo")
            here.notify("echo")  # nothing happens

    asyncio.run(run())


def test_one_that_does_not_read_is_not_asked_for_ever() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        link = PeerLink(echo)
        await link.connect(ours)
        part = b"x" * (MAX_UNREAD_BYTES // 8)
        calls = []
        for _ in range(20):
            calls.append(asyncio.create_task(link.call("echo", part)))
            await asyncio.sleep(0)
        refused = [call for call in calls if call.done()]
        assert 9 <= len(refused) <= 12, "the system takes some bytes, and the first too much is taken"
        with pytest.raises(UnavailableError, match="does not read"):
            refused[0].result()
        theirs.close()
        link.close()
        await asyncio.gather(*calls, return_exceptions=True)
        await link.end()

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [LENGTH.pack(MAX_PEER_BYTES + 1), LENGTH.pack(3) + b"\xc1\xc1\xc1", LENGTH.pack(6) + b"\x93\x01\xa1x\xa1y\x00"],
    ids=["too long", "no msgpack", "no message"],
)
def test_what_is_no_message_ends_the_connection(data: bytes) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        link = PeerLink(echo)
        await link.connect(ours)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            await link.run()
        assert await asyncio.to_thread(theirs.recv, 1) == b""
        theirs.close()

    asyncio.run(run())
