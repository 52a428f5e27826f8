"""One HTTP connection: uvicorn's, with bounds on the head of a request, which uvicorn reads for ever.

A client that never ends its request line and headers holds a connection for a time and some bytes, not more. Bodies
have limits of their own (`RequestContext.read_bytes`), idle connections uvicorn's.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.config.server import ServerConfig
from quire.errors import ConfigError

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
