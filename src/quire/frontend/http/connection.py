"""One HTTP connection: uvicorn's, with bounds on the head of a request, which uvicorn reads for ever.

A client that never ends its request line and headers holds a connection for a time and some bytes, not more. Bodies
have limits of their own (`RequestContext.read_bytes`), idle connections uvicorn's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.frontend.http.errors import UnavailableError, error_response

_REFUSAL = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """`make_connection_class` sets the limits."""

    header_timeout_s: float
    max_header_bytes: int
    _timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client is there, and may take so long to say what it wants."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if not self._is_in_head:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The end of the headers."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes of whatever part of a request."""
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self.max_header_bytes:
                self._refuse(b"431 Request Header Fields Too Large")

    def _begin_head(self) -> None:
        self._is_in_head, self._num_header_bytes = True, 0
        self._stop_timer()
        self._timer = self.loop.call_later(self.header_timeout_s, self._refuse, b"408 Request Timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes) -> None:
        """End the connection; in words, unless an answer to an earlier request is on its way."""
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_REFUSAL % status)
        self.transport.close()


def make_connection_class(header_timeout_s: float, max_header_bytes: int) -> type[BoundedConnection]:
    """The class of a server's connections."""
    limits: dict[str, Any] = {"header_timeout_s": header_timeout_s, "max_header_bytes": max_header_bytes}
    return type("Connection", (BoundedConnection,), limits)


def make_tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What encrypts connections; None without --ssl-certfile. Raises ConfigError for files that cannot be used."""
    if config.ssl_certfile is None:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except (OSError, ValueError) as e:  # an SSLError is an OSError
        raise ConfigError(
            f"TLS cannot be had with --ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile} and what "
            f"goes with them: {e}"
        ) from None
    return context


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
