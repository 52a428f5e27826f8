"""One HTTP/1.1 connection: an exchange at a time, parsed by httptools, handed on as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from quire.cli.remote.address import ServerAddress
from quire.cli.remote.failures import RemoteError, lost_connection

MAX_WHOLE_BODY = 64 << 20
"""Bytes of an answer that is kept, at most."""


class BodySink(Protocol):
    """Takes a body as it comes."""

    def feed(self, data: bytes) -> None:
        """Its next bytes. A QuireError it raises ends the exchange."""


class WholeBody:
    """Keeps everything."""

    def __init__(self) -> None:
        self.content = bytearray()

    def feed(self, data: bytes) -> None:
        self.content += data
        if len(self.content) > MAX_WHOLE_BODY:
            raise RemoteError(f"the answer is longer than {MAX_WHOLE_BODY >> 20} MiB", "answer too long")


ChooseSink = Callable[[int, dict[bytes, bytes]], BodySink]
"""Where the body goes, by status and (lower-case) headers."""


class HttpConnection(asyncio.Protocol):
    """A connection. `is_idle` says that another request may be sent on it."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[int] | None = None
        self._choose_sink: ChooseSink | None = None
        self._sink: BodySink | None = None
        self._headers: dict[bytes, bytes] = {}
        self._status = 0
        self.is_idle = False
        self.num_exchanges = 0
        self.has_received = False
        """Whether any byte of the current answer has come."""

    async def exchange(self, request: bytes, choose_sink: ChooseSink) -> int:
        """Send `request`; its status, once the whole body has gone to its sink. Raises RemoteError."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._choose_sink, self._sink, self._status = choose_sink, None, 0
        self._headers, self.has_received, self.is_idle = {}, False, False
        self.num_exchanges += 1
        try:
            self._transport.write(request)
            return await self._done
        finally:
            self._done = None
            if not self.is_idle:
                self.close()

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.is_idle = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._parser is None:
            self.close()  # it speaks without being asked
            return
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as e:
            self._fail(e.__context__ or e)
        except httptools.HttpParserError as e:
            self._fail(RemoteError(f"what answers at {self._address} does not speak HTTP/1.1: {e}", "not HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_idle = False
        if self._sink is not None and self._ends_with_connection() and exc is None:
            self._finish()
        else:
            self._fail(lost_connection(self._address, has_begun=self._sink is not None))

    # -- httptools ------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._choose_sink is not None
        self._status = self._parser.get_status_code()
        if self._status >= 200:  # 1xx come before the answer
            self._sink = self._choose_sink(self._status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.feed(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._sink is None:
            self._headers = {}
        else:
            self.is_idle = self._parser.should_keep_alive()
            self._finish()

    def _ends_with_connection(self) -> bool:
        return b"content-length" not in self._headers and b"transfer-encoding" not in self._headers

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
