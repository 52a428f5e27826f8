"""One end of the connection between a server and one of its API processes: calls and answers, both ways."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.errors import ServerError, error_name, make_error
from quire.frontend.http.errors import UnavailableError
from quire.frontend.http.membership import Peers
from quire.logger import init_logger
from quire.wire.peers import EVERYBODY, LENGTH, MAX_PEER_BYTES, PARENT, PeerMessage, encode_peer
from quire.wire.serial import WireError

logger = init_logger(__name__)

MAX_UNREAD_BYTES = 1 << 24
"""Limit of unsent bytes for a process that does not read: one that hangs is called again and again."""

Handler = Callable[[PeerMessage], Awaitable[Any]]
"""Carries out a call and returns its result. An exception is sent as the call's error."""


class PeerLink:
    """Sends calls and carries out those of the other end, each in its own task. Belongs to one event loop."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, connection: socket.socket) -> None:
        """Takes over a connection."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)

    async def run(self) -> None:
        """Reads until the other end is gone; open calls then raise UnavailableError. Raises WireError for an invalid
        message, after closing the connection."""
        reader = self._reader
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    if length > MAX_PEER_BYTES:
                        raise WireError(f"a message of {length} bytes; {MAX_PEER_BYTES} are the most")
                    self._take(msgspec.msgpack.decode(await reader.readexactly(length), type=PeerMessage))
        except msgspec.MsgspecError as e:
            raise WireError(f"invalid message of an API process: {e}") from e
        finally:
            self.close()

    async def end(self) -> None:
        """Sends what is left to send, and closes."""
        writer = self._writer
        self.close()
        if writer is not None:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def close(self) -> None:
        """Closes the connection. Open calls raise UnavailableError. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_gone())
        for task in self._tasks:
            task.cancel()

    async def call(self, method: str, *args: Any, target: int = PARENT) -> Any:
        """Returns the result of a call. Raises what the other end raised, by class; UnavailableError where it is gone
        or does not read."""
        if self._writer is None:
            raise _gone()
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            raise UnavailableError("the process that knows of this does not read what it is asked")
        call_id = next(self._ids)
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(PeerMessage(call_id, method, target, args))
            return await future
        finally:
            del self._waiting[call_id]

    def notify(self, method: str, *args: Any) -> None:
        """Sends a call without waiting for its result. Does nothing where the other end is gone."""
        self._send(PeerMessage(0, method, PARENT, args))

    def _send(self, message: PeerMessage) -> None:
        if self._writer is not None:
            self._writer.write(encode_peer(message))

    def _take(self, message: PeerMessage) -> None:
        if message.method:
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        future = self._waiting.get(message.call_id)
        if future is None or future.done():
            return  # its caller has given up
        if message.error:
            future.set_exception(make_error(message.error_type, message.error, ServerError))
        else:
            future.set_result(message.result)

    async def _answer(self, call: PeerMessage) -> None:
        try:
            answer = PeerMessage(call.call_id, result=await self._handle(call))
        except Exception as e:
            if not error_name(e):
                logger.exception("a call of another process of this server failed: %s", call.method)
            answer = PeerMessage(call.call_id, error_type=error_name(e), error=str(e) or type(e).__name__)
        if call.call_id:
            self._send(answer)


def _gone() -> UnavailableError:
    return UnavailableError("the process that knows of this is gone; it is being started again")


class FleetPeers(Peers):
    """The other processes of the server, reached through the parent, which passes calls on."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link

    async def gather(self, method: str, *args: Any) -> list[Any]:
        return list(await self._link.call(method, *args, target=EVERYBODY))

    async def call(self, index: int, method: str, *args: Any) -> Any:
        return await self._link.call(method, *args, target=index)
