"""Who comes while the model loads is told so.

The ports are bound before anything is loaded, so clients and probes can connect; without an answer they would hang
until the model is there, and a probe could not tell a server that loads from one that is stuck. A thread answers:
`/health/live` with 200, everything else with 503 and Retry-After. It knows neither keys nor routes, keeps no body, and
leaves when the server takes the sockets over: who connects after that waits in the sockets' own queue.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Sequence

from starlette.responses import Response

from quire.frontend.http.errors import UnavailableError, error_response

MAX_HEAD_BYTES = 1 << 16
VISIT_S = 5.0
"""What a visitor has for the head of a request and for taking the answer."""
BACKLOG = 2048
LIVE = b"/health/live"
_END_OF_HEAD = b"\r\n\r\n"


def _raw(response: Response) -> bytes:
    """An answer as it goes over the wire, the last of its connection."""
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return b"HTTP/1.1 %d \r\n%bconnection: close\r\n\r\n%b" % (response.status_code, headers, bytes(response.body))


class WaitingRoom:
    """While it is entered, who asks on `sockets` is told that the server loads. They stay the caller's, and open."""

    def __init__(
        self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None, root_path: str = ""
    ) -> None:
        self._sockets = [listener.dup() for listener in sockets]
        self._tls = tls
        self._live_paths = frozenset({LIVE, root_path.encode() + LIVE})
        self._alive = _raw(Response())
        self._loading = _raw(error_response(UnavailableError("the server is loading its model; come again")))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="waiting-room", daemon=True)
        self._is_over = asyncio.Event()
        self.visitors: set[_Visitor] = set()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()

    def answer_to(self, head: bytes) -> bytes:
        """To the head of a request."""
        target = head.partition(b"\r\n")[0].split(b" ")[1:2]
        is_live = bool(target) and target[0].partition(b"?")[0] in self._live_paths
        return self._alive if is_live else self._loading

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._receive())

    async def _receive(self) -> None:
        servers = [
            await self._loop.create_server(lambda: _Visitor(self), sock=listener, ssl=self._tls, backlog=BACKLOG)
            for listener in self._sockets
        ]
        await self._is_over.wait()
        for server in servers:
            server.close()
        for visitor in self.visitors:
            visitor.transport.close()
        await asyncio.sleep(0)  # for the transports to do it


class _Visitor(asyncio.Protocol):
    """One connection: the head of a request, an answer, the end."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle

    def __init__(self, room: WaitingRoom) -> None:
        self.room = room
        self.head = b""
        self.is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.room.visitors.add(self)
        self.timer = asyncio.get_running_loop().call_later(VISIT_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        self.room.visitors.discard(self)

    def data_received(self, data: bytes) -> None:
        """Of a body that follows nothing is kept, but it is taken: a connection closed before would lose the answer."""
        if self.is_answered:
            return
        self.head += data
        if _END_OF_HEAD in self.head:
            self.is_answered = True
            self.transport.write(self.room.answer_to(self.head))
            if self.transport.can_write_eof():
                self.transport.write_eof()  # the client's end, or the timer, closes
            else:
                self.transport.close()
        elif len(self.head) > MAX_HEAD_BYTES:
            self.transport.abort()
