"""HTTP connections: limits on the head of a request, TLS, and answers while the model loads.

uvicorn waits without limit for the end of a request line and headers; `BoundedConnection` limits their time and size.
Bodies have their own limits (`Exchange.read_bytes`), idle connections uvicorn's.

The ports are bound before the model is loaded, so clients and probes can connect. Without an answer they would hang,
and a probe could not distinguish a loading server from a stuck one. A thread (`WaitingRoom`) answers meanwhile:
`/health/live` with 200, everything else with 503 and Retry-After (a browser gets a page that tries again). It checks no
keys and routes, and stores no bodies.
It ends when the server takes over the sockets; later connections wait in the sockets' queue.
"""

from __future__ import annotations

import asyncio
import html
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.frontend.http.errors import UnavailableError, error_response, shape_of

_REFUSAL = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """A connection of uvicorn's with the limits that `make_connection_class` sets."""

    header_timeout_s: float
    max_header_bytes: int
    _timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if not self._is_in_head:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
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
        """Ends the connection, with an answer unless one to an earlier request is under way."""
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_REFUSAL % status)
        self.transport.close()


def make_connection_class(header_timeout_s: float, max_header_bytes: int) -> type[BoundedConnection]:
    """Returns the class of a server's connections."""
    limits: dict[str, Any] = {"header_timeout_s": header_timeout_s, "max_header_bytes": max_header_bytes}
    return type("Connection", (BoundedConnection,), limits)


def make_tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Returns the context of the --ssl-* flags; None without --ssl-certfile. Raises ConfigError for unusable files."""
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
"""Time for sending the head of a request and reading the answer."""
BACKLOG = 2048
LIVE = b"/health/live"
LOADING_PAGE = """<!doctype html>
<html lang="en">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Loading · Quire</title>
<style>body { font: 1.05rem/1.5 system-ui, sans-serif; display: grid; place-content: center; min-height: 90vh;
margin: 1rem; text-align: center } h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere }
p { opacity: .75 }</style>
<h1>Quire is loading MODEL</h1>
<p role="status">This page opens by itself as soon as the model is ready.
"""
_END_OF_HEAD = b"\r\n\r\n"


def _raw(response: Response) -> bytes:
    """Returns an answer in the bytes of HTTP/1.1, the last of its connection."""
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return b"HTTP/1.1 %d \r\n%bconnection: close\r\n\r\n%b" % (response.status_code, headers, bytes(response.body))


class WaitingRoom:
    """Answers requests on `sockets` while it is entered. The sockets stay the caller's, and open."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        tls: ssl.SSLContext | None = None,
        root_path: str = "",
        model: str = "its model",
    ) -> None:
        self._sockets = [listener.dup() for listener in sockets]
        self._tls = tls
        self._live_paths = frozenset({LIVE, root_path.encode() + LIVE})
        self._alive = _raw(Response())
        self._root_path = root_path
        self._loading = UnavailableError(f"the server is loading {model}; come again")
        page = LOADING_PAGE.replace("MODEL", html.escape(model))
        self._page = _raw(
            Response(
                page, 503, {"refresh": "2", "retry-after": "2", "cache-control": "no-store"}, "text/html; charset=utf-8"
            )
        )
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
        """Returns the answer to a request with this head."""
        _, _, target = head.partition(b"\r\n")[0].partition(b" ")
        path = target.partition(b" ")[0].partition(b"?")[0]
        if path in self._live_paths:
            return self._alive
        is_browser = head.startswith(b"GET ") and b"\r\naccept: text/html" in head.lower()
        if is_browser:
            return self._page
        return _raw(error_response(self._loading, shape_of(path.decode("latin-1").removeprefix(self._root_path))))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._receive())

    async def _receive(self) -> None:
        servers = [
            await self._loop.create_server(lambda: _Visitor(self), sock=listener, ssl=self._tls, backlog=BACKLOG)
            for listener in self._sockets
        ]
        await self._is_over.wait()
        for listener in self._sockets:
            self._loop.remove_reader(listener)
        await asyncio.sleep(0)  # what was accepted in this turn has a task now, which makes its transport
        making = asyncio.all_tasks() - {asyncio.current_task()}
        for task in making:
            task.cancel()  # it closes the transport
        await asyncio.gather(*making, return_exceptions=True)
        for server in servers:  # not before: a transport of a closed server cannot be made, and its client would hang
            server.close()
        for visitor in self.visitors:
            visitor.transport.close()
        await asyncio.sleep(0)  # for the transports to do it


class _Visitor(asyncio.Protocol):
    """One connection: reads the head of a request, answers, ends."""

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
        """Reads the head, then discards the body. To close the connection before the body has come could lose the
        answer."""
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
