"""Server-sent events: a stream of chunks as an HTTP answer.

An `EventStream` is an ASGI response. It takes chunks, each one or more whole events, from an async generator, and ends
early when the client disconnects; `on_close` aborts the requests behind it. A failure before the first chunk becomes an
HTTP status, a later one an `error` event. In a pause, comment lines keep proxies from closing the connection. A client
that does not read is disconnected after a while; its unread data is bounded by the socket and one merged output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.frontend.http.errors import ErrorShape, error_body, error_response, note_error

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STALL_CHECKS = 4
"""Number of checks for a stalled reader within `stall_s`."""
SERVER_SENT_EVENTS = b"text/event-stream; charset=utf-8"
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

encode_json = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """Returns one event of data."""
    return b"data: " + encode_json(value) + b"\n\n"


def error_event(error: BaseException) -> bytes:
    """Returns the end of a failed stream, as OpenAI has it."""
    return event(error_body(error)) + DONE


class EventStream(Response):
    """A streamed answer. `keep_alive_s` and `stall_s` of 0 mean never; `on_close` is called at every end."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        request_id: str,
        on_close: Callable[[], Awaitable[None]] | None = None,
        keep_alive_s: float = 0.0,
        stall_s: float = 0.0,
        encode_error: Callable[[BaseException], bytes] = error_event,
        shape_error: ErrorShape = error_body,
        media_type: bytes = SERVER_SENT_EVENTS,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._request_id = request_id
        self._head = [(b"content-type", media_type), *_HEADERS]
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._encode_error = encode_error
        self._shape_error = shape_error
        self._has_begun = False
        self._is_left = False
        """True once the client has disconnected or stalled."""
        self._last_sent = 0.0
        self._sends_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything. Ends early, without an error, when the client disconnects."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        self._last_sent = loop.time()
        watchers = [loop.create_task(self._watch_client(receive, me))]
        if self._keep_alive_s or self._stall_s:
            watchers.append(loop.create_task(self._watch_clock(loop, send, me)))
        try:
            await self._send_all(loop, scope, receive, send)
        except asyncio.CancelledError:
            if not self._is_left:
                raise
            me.uncancel()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await self._chunks.aclose()
            if self._on_close is not None:
                await self._on_close()

    async def _send_all(self, loop: asyncio.AbstractEventLoop, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                if not self._has_begun:
                    await self._begin(send)
                self._sends_since = loop.time()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._last_sent, self._sends_since = loop.time(), None
        except Exception as e:
            note_error(e, self._request_id)
            if not self._has_begun:
                await error_response(e, self._shape_error)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._encode_error(e), "more_body": True})
        if not self._has_begun:
            await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": list(self._head)})

    async def _watch_client(self, receive: Receive, main: asyncio.Task[Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave(main)

    async def _watch_clock(self, loop: asyncio.AbstractEventLoop, send: Send, main: asyncio.Task[Any]) -> None:
        period = min(v for v in (self._keep_alive_s, self._stall_s / STALL_CHECKS) if v)
        while True:
            await asyncio.sleep(period)
            now = loop.time()
            if self._sends_since is not None:
                if self._stall_s and now - self._sends_since > self._stall_s:
                    self._leave(main)
            elif self._keep_alive_s and now - self._last_sent >= self._keep_alive_s:
                if not self._has_begun:
                    await self._begin(send)
                self._last_sent = now
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    def _leave(self, main: asyncio.Task[Any]) -> None:
        self._is_left = True
        main.cancel()
