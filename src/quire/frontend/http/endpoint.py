"""One endpoint: its row in the table of routes, and the way of a request through it.

An `Endpoint` says what a route is: path, methods, handler, who may call it, what it reads. Nothing can be served
without one, and none can be made without an `Access`. Calling it is the whole way of a request: its id, the check of
the key, the handler, the one door for errors, the access log.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.errors import ClientError, NotFoundError, OverloadedError, ValidationError
from quire.frontend.admission import Reservation
from quire.frontend.http.auth import Access, shown_key
from quire.frontend.http.bodies import Body, BodyReader
from quire.frontend.http.errors import ErrorShape, HttpError, error_body, error_response, note_error
from quire.frontend.http.orca import REQUEST_HEADER, RESPONSE_HEADER, load_report
from quire.frontend.http.state import ServerState
from quire.frontend.http.tenants import TenantPlace
from quire.frontend.metrics.collect.events import HttpExchange
from quire.logger import init_logger

logger = init_logger("quire.access")

Result = TypeVar("Result")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
_TRACE_HEADERS = ("traceparent", "tracestate")
_MAX_TRACE_HEADER_CHARS = 512
MIN_VALUES = 1 << 18
VALUES_PER_CONTEXT_TOKEN = 4
"""Values a body may hold, told by its commas: the parser takes about 100 ns for each, and lets nobody else run."""
PROBES = frozenset(
    {"/metrics", "/health", "/health/live", "/health/ready", "/load", "/ping", "/version", "/server_info"}
)
"""Not counted as HTTP requests: their callers come every few seconds."""
_MAX_LENGTH_DIGITS = 16
OBJECT_VALUES = 4
"""An object takes the time of so many values more."""
LARGE_BODY_BYTES = 1 << 16
"""Turning a larger one into what the engine reads may take the loop long enough for others to notice."""
GONE = 499
"""Logged where the client left before the answer; nobody receives it."""


class RequestContext:
    """One HTTP request on its way through an endpoint."""

    def __init__(self, request: Request, state: ServerState) -> None:
        self.request = request
        self.state = state
        given = request.headers.get("x-request-id", "")
        self._places: deque[Reservation] = deque()
        self._content: bytes | None = None
        self._own_names: Mapping[str, str] = {}
        self._share: TenantPlace | None = None
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16]

    @property
    def is_on_admin_listener(self) -> bool:
        """Whether it came to the listener that is apart from the main one."""
        return bool(self.request.app.state.is_admin)

    @property
    def trace_headers(self) -> dict[str, str] | None:
        """The W3C trace context the client sent, if it did."""
        found = {name: self.request.headers[name] for name in _TRACE_HEADERS if name in self.request.headers}
        return {name: value[:_MAX_TRACE_HEADER_CHARS] for name, value in found.items()} or None

    def reserve_places(self, nums_tokens: Sequence[int], n: int, nums_output_tokens: Sequence[int]) -> None:
        """Room for one prompt of about so many tokens each, n times, with outputs of at most so many tokens.

        Taken before any work is done for the request, so that no work is done in vain; what is not used up by
        `take_place` is given back when the request ends, as is the key's share. Raises OverloadedError.
        """
        admission = self.state.engine.admission
        num_reqs, num_tokens, num_output_tokens = (
            n * len(nums_tokens),
            n * sum(nums_tokens),
            n * sum(nums_output_tokens),
        )
        receipts = [admission.receive(n) for _ in nums_tokens]
        try:
            self._share = self.state.tenants.take(
                self.state.gatekeeper.owner_of(self.request), num_reqs, num_tokens + num_output_tokens
            )
            admission.check_admission(num_reqs, num_tokens, num_output_tokens)
        except OverloadedError as e:
            for receipt in receipts:
                receipt.reject(e)
            raise
        self._places.extend(
            admission.reserve_unchecked(receipt, n, *numbers)
            for receipt, *numbers in zip(receipts, nums_tokens, nums_output_tokens, strict=True)
        )

    def take_place(self) -> Reservation | None:
        """The next prompt's room, now its user's; None if none was reserved."""
        return self._places.popleft() if self._places else None

    def take_share(self) -> TenantPlace | None:
        """What the request takes of its key's limits, now its user's to give back."""
        share, self._share = self._share, None
        return share

    def release_places(self, error: BaseException | None = None) -> None:
        """Give back what nobody took, and the key's share, because of `error`; None: the client has left."""
        while self._places:
            self._places.popleft().release(error)
        if self._share is not None:
            self._share.release()

    def cache_salt(self, given: str | None) -> str | None:
        """The salt of a request that brings `given`: with --isolate-cache-by-key one that only its key's owner has."""
        if not self.state.config.isolate_cache_by_key:
            return given
        identity = b"\0".join((shown_key(self.request), b"" if given is None else b"+" + given.encode()))
        return hmac.digest(self.state.member.salt_secret, identity, "sha256").hex()

    def query_switch(self, name: str, default: bool) -> bool:
        """A parameter of the query that is true or false. Raises ValidationError."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        if text.lower() not in _SWITCHES:
            raise ValidationError(f"{name} must be true or false, got {text[:60]!r}", param=name)
        return _SWITCHES[text.lower()]

    async def read(self, reader: BodyReader[Body]) -> Body:
        """The checked body. Raises HttpError or ValidationError."""
        body = await self._read(reader)
        self._own_names = body.own_names
        return body

    async def _read(self, reader: BodyReader[Body]) -> Body:
        content = await self.read_bytes()
        limit = max(MIN_VALUES, VALUES_PER_CONTEXT_TOKEN * self.state.max_model_len)
        if len(content) <= limit:
            return reader.read(content)
        await asyncio.sleep(0)  # each step on a large body takes milliseconds; others may go on between two
        if content.count(b",") + OBJECT_VALUES * content.count(b"{") > limit:
            raise HttpError(413, f"the body holds more than {limit} values (or commas); send less at once")
        await asyncio.sleep(0)
        body = reader.read(content)
        await asyncio.sleep(0)
        return body

    def in_own_words(self, error: BaseException) -> BaseException:
        """The error, naming the field as the body that was read does."""
        if isinstance(error, ClientError) and error.param is not None:
            error.param = self._own_names.get(error.param, error.param)
        return error

    async def work_on_body(self, work: Callable[[], Result]) -> Result:
        """The result of work on what was read: at once, or on the renderer's thread where that was large."""
        if self._content is None or len(self._content) <= LARGE_BODY_BYTES:
            return work()
        return await self.state.engine.pipeline.text_thread.run_aside(work)

    async def read_bytes(self) -> bytes:
        """The body as it came; it may be asked for again. Raises HttpError: 408, 413, 415."""
        if self._content is None:
            self._content = await self._receive_bytes()
        return self._content

    async def _receive_bytes(self) -> bytes:
        headers, config = self.request.headers, self.state.config
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise HttpError(415, "the body must be JSON, sent with the header Content-Type: application/json")
        limit = config.max_request_bytes
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(config.body_timeout_s):
                async for part in self.request.stream():
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
        except TimeoutError:
            raise HttpError(
                408, f"the body did not arrive within {config.body_timeout_s:g} s (--body-timeout-s)", close=True
            ) from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which is cancelled if the client goes away. Raises ClientDisconnect then."""
        task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(self.request.receive))
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnect
        finally:
            watcher.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes (--max-request-bytes)", close=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[RequestContext], Awaitable[Response]]


@dataclass(frozen=True)
class QueryParameter:
    """A parameter of the query, for the documents; the handler reads it."""

    name: str
    schema: Mapping[str, Any] = field(hash=False)
    description: str


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A row of a routes file. The handler's docstring is its description in the OpenAPI document."""

    path: str
    handler: Handler
    access: Access
    methods: tuple[str, ...] = ("POST",)
    body: BodyReader[Any] | None = None
    """What it reads, for the documents."""
    query: tuple[QueryParameter, ...] = ()
    """What may be said in the query."""
    task: str | tuple[str, ...] | None = None
    """What the model must be for, or one of several: "generate", "embed", ...; of another the route does not exist."""
    is_work: bool = False
    """Counted as load, and refused while the server shuts down."""
    shape_error: ErrorShape = error_body
    """How its errors are written."""
    is_enabled: Callable[[ServerConfig], bool] = lambda config: True
    """Whether the flags ask for it."""
    is_on_admin: bool = False
    """Served by the admin listener, too: the dashboard there reads it. Admin and open routes always are."""
    is_polled: bool = False
    """Asked so often that the log has no line for an answer that is good."""

    def is_for(self, supported_tasks: Sequence[str]) -> bool:
        """Whether the route exists of a model that does these tasks."""
        wanted = (self.task,) if isinstance(self.task, str) else self.task
        return wanted is None or not set(wanted).isdisjoint(supported_tasks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        state: ServerState = scope["app"].state.server
        context = RequestContext(Request(scope, receive), state)
        exchange = _Exchange(context, send, is_work=self.is_work)
        if self.is_work:
            state.lifecycle.begin_request()
        try:
            response = await self._respond(context)
            await response(scope, receive, exchange.send)
        finally:
            context.release_places()
            if self.is_work:
                state.lifecycle.end_request()
            if self.path not in PROBES:
                exchange.count(self.path)
            exchange.log(only_failures=self.is_polled)

    async def _respond(self, context: RequestContext) -> Response:
        state = context.state
        try:
            state.gatekeeper.check(self.access, context.request, on_admin_listener=context.is_on_admin_listener)
            if not self.is_for(state.supported_tasks):
                raise NotFoundError(
                    f"{self.path} is not for this model, which supports {', '.join(state.supported_tasks)}"
                )
            if self.is_work:
                state.check_open()
            return await self.handler(context)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception as e:
            context.release_places(e)
            note_error(e, context.request_id)
            return error_response(context.in_own_words(e), self.shape_error)


class _Exchange:
    """Watches what is sent: adds the request's id, and remembers the status for the log."""

    def __init__(self, context: RequestContext, send: Send, *, is_work: bool) -> None:
        self._is_work = is_work
        self._context = context
        self._send = send
        self._status = GONE
        self._num_bytes = 0
        self._start = time.perf_counter()

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [*message["headers"], (b"x-request-id", self._context.request_id.encode("latin-1"))]
            message["headers"] = headers + self._load_headers()
        else:
            self._num_bytes += len(message.get("body", b""))
        await self._send(message)

    def _load_headers(self) -> list[tuple[bytes, bytes]]:
        """What a balancer that asked for it is told of our load, with the answers to work."""
        asked = self._context.request.headers.get(REQUEST_HEADER)
        if asked is None or not self._is_work:
            return []
        report = load_report(self._context.state.engine.pipeline.stats, asked)
        return [] if report is None else [(RESPONSE_HEADER.encode(), report.encode())]

    def count(self, path: str) -> None:
        """Tell the statistics. `path` is the route's."""
        headers = self._context.request.headers
        length = headers.get("content-length", "")
        self._context.state.engine.pipeline.stat_loggers.record_exchange(
            HttpExchange(
                self._context.request.method,
                path,
                self._status,
                time.perf_counter() - self._start,
                int(length) if length.isdigit() and len(length) < _MAX_LENGTH_DIGITS else 0,
                self._num_bytes,
            )
        )

    def log(self, *, only_failures: bool) -> None:
        """One line, without the query and whatever else a client may have put into it."""
        request, state = self._context.request, self._context.state
        if only_failures and self._status < 400:
            return
        if state.logs_path(request.scope["path"]):
            facts = {
                "method": request.method,
                "path": request.scope["path"][:200],
                "status": self._status,
                "duration_ms": round(1000 * (time.perf_counter() - self._start), 1),
                "request_id": self._context.request_id,
            }
            logger.info("%s %s %d %.1f ms %s", *facts.values(), extra=facts)


def json_response(value: Any, status_code: int = 200) -> Response:
    """An answer in JSON, of anything msgspec writes."""
    return Response(msgspec.json.encode(value), status_code, media_type="application/json")
