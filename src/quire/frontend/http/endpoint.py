"""Endpoints, the rows of the table of routes; and exchanges, the requests that they answer.

An `Endpoint` declares a route: path, methods, handler, access, body. Nothing can be served without one, and none can be
made without an `Access`. Calling it is the whole way of a request: its id, the check of the key, the handler, the one
place for errors, the access log.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.errors import ClientError, NotFoundError, ValidationError
from quire.frontend.adapters import ServedAdapter
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import Body, BodyReader, RequestBody
from quire.frontend.http.errors import ErrorShape, HttpError, UnavailableError, error_body, error_response, note_error
from quire.frontend.http.state import ServerState
from quire.frontend.metrics.collect.events import HttpExchange
from quire.frontend.metrics.frontend_stats import FrontendStats
from quire.frontend.text.tokenizer import LONG_TEXT_CHARS
from quire.logger import init_logger

logger = init_logger("quire.access")

PROBES = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/health/engines", "/ping"),
        *("/metrics", "/load", "/version", "/server_info"),
    }
)
"""Paths that are not counted as HTTP requests: probes call them every few seconds."""

GONE = 499
"""Status that is logged where the client disconnected before the answer."""
LOAD_REQUEST_HEADER = "endpoint-load-metrics-format"
LOAD_RESPONSE_HEADER = "endpoint-load-metrics"
"""Headers of ORCA, Envoy's load reports: a balancer asks for a format and reads the load from the answer."""
_MAX_LENGTH_DIGITS = 16

Result = TypeVar("Result")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
DEFAULT_SEED = "quire.seed"
"""Key of the ASGI scope that a caller in this process sets: the seed of a request that samples and has none. There are
no other clients to protect, so its bodies may hold any number of values."""
MIN_VALUES = 1 << 18
VALUES_PER_CONTEXT_TOKEN = 4
"""Values a body may hold, counted by its commas. The parser takes about 100 ns for each and blocks the event loop."""
OBJECT_VALUES = 4
"""Parsing one JSON object costs about as much as so many plain values."""
CURL_TYPE = "application/x-www-form-urlencoded"
Handler = Callable[["Exchange"], Awaitable[Response]]


class Exchange:
    """One HTTP request: its id, headers, query and body."""

    def __init__(self, request: Request, state: ServerState) -> None:
        self.request = request
        self.state = state
        given = request.headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.size = 0
        """Bytes of the body, and of the stored conversation it continues."""
        self.adapter: ServedAdapter | None = None
        """The adapter that the request names as its model: its engine requests have it."""
        self._content: bytes | None = None
        self._body: RequestBody | None = None

    @property
    def owner(self) -> bytes:
        """Digest of the API key that the request has shown; empty where the server has no keys."""
        return self.state.gatekeeper.owner_of(self.request)

    async def find_model(self, name: str | None) -> str:
        """Returns the model's name for the answer, and notes its adapter. Raises as `ServerState.find_model`."""
        found, self.adapter = await self.state.find_model(name)
        return found

    def query_switch(self, name: str, default: bool) -> bool:
        """Returns a boolean parameter of the query. Raises ValidationError."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        if text.lower() not in _SWITCHES:
            raise ValidationError(f"{name} must be true or false, got {text[:60]!r}", param=name)
        return _SWITCHES[text.lower()]

    # -- the body -----------------------------------------------------------------------------------------------------

    async def read(self, reader: BodyReader[Body]) -> Body:
        """Returns the checked body. Raises HttpError or ValidationError."""
        content = await self.read_bytes()
        limit = max(MIN_VALUES, VALUES_PER_CONTEXT_TOKEN * self.state.max_model_len)
        if len(content) <= limit or DEFAULT_SEED in self.request.scope:
            body = reader.read(content)
        else:
            await asyncio.sleep(0)  # each step on a large body takes milliseconds: others may go on between two
            if content.count(b",") + OBJECT_VALUES * content.count(b"{") > limit:
                raise HttpError(413, f"the body holds more than {limit} values (or commas); send less at once")
            await asyncio.sleep(0)
            body = reader.read(content)
            await asyncio.sleep(0)
        self._body = body
        return body

    async def read_bytes(self) -> bytes:
        """Returns the body as it came. May be called again. Raises HttpError: 408, 413, 415."""
        if self._content is not None:
            return self._content
        headers, config = self.request.headers, self.state.config
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        # what `curl -d` sends without the header is taken for JSON, except from a page of another site, which may send
        # a form without asking; browsers name such a page
        is_curl = media_type == CURL_TYPE and "origin" not in headers
        if media_type != "application/json" and not media_type.endswith("+json") and not is_curl:
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
        self.size = size
        self._content = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._content

    async def convert(self, work: Callable[[], Result]) -> Result:
        """Returns the result of `work`, which reads all text of the request: on the text thread if it is long."""
        return work() if self.size <= LONG_TEXT_CHARS else await self.state.engine.text_thread.run(work)

    # -- the answer ---------------------------------------------------------------------------------------------------

    def with_own_names(self, error: BaseException) -> BaseException:
        """Returns the error with the field's name as the body spells it, and an adapter's name for its directory."""
        if self.adapter is not None and isinstance(error, ClientError):
            error.args = (str(error).replace(self.adapter.request.lora_path, self.adapter.name),)
        if isinstance(error, ClientError) and error.param is not None:
            names = {} if self._body is None else self._body.own_names
            error.param = names.get(error.param, error.param)
        return error

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of `work`. Cancels it and raises ClientDisconnect if the client disconnects first."""
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


@dataclass(frozen=True)
class QueryParameter:
    """A parameter of the query, for the OpenAPI document; the handler reads it."""

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
    """Reader of the body."""
    query: tuple[QueryParameter, ...] = ()
    """Parameters of the query."""
    task: str | tuple[str, ...] | None = None
    """Task, or one of several, that the model must support ("generate", "embed", …); otherwise it answers 404."""
    is_work: bool = False
    """True: requests count as load and are refused while the server shuts down."""
    shape_error: ErrorShape = error_body
    """Writes the body of an error."""
    is_enabled: Callable[[ServerConfig], bool] = lambda config: True
    """Returns whether the flags enable the route."""
    is_on_admin: bool = False
    """True: the admin listener serves the route, too. It always serves admin and open routes."""
    is_polled: bool = False
    """True: the route is called so often that good answers are not logged."""

    def is_for(self, supported_tasks: Sequence[str]) -> bool:
        """Returns whether the route serves a model that supports these tasks."""
        wanted = (self.task,) if isinstance(self.task, str) else self.task
        return wanted is None or not set(wanted).isdisjoint(supported_tasks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request (ASGI)."""
        state: ServerState = scope["app"].state.server
        exchange = Exchange(Request(scope, receive), state)
        answer = SentAnswer(exchange, send, is_work=self.is_work)
        if self.is_work:
            state.lifecycle.begin_request()
        try:
            response = await self._respond(exchange, on_admin_listener=scope["app"].state.is_admin)
            await response(scope, receive, answer.send)
        finally:
            if self.is_work:
                state.lifecycle.end_request()
            answer.close(self.path, is_counted=self.path not in PROBES, logs_success=not self.is_polled)

    async def _respond(self, exchange: Exchange, *, on_admin_listener: bool) -> Response:
        state = exchange.state
        try:
            state.gatekeeper.check(self.access, exchange.request, on_admin_listener=on_admin_listener)
            if not self.is_for(state.supported_tasks):
                advice = "it needs a model that generates"
                if "generate" in state.supported_tasks:
                    advice = "--runner pooling loads it for that, where the model can do it"
                supported = ", ".join(state.supported_tasks)
                raise NotFoundError(f"{self.path} is not for this model, which supports {supported}; {advice}")
            if self.is_work and state.lifecycle.refuses_requests:
                raise UnavailableError(
                    "the server is shutting down and takes no new requests; try another one", close=True
                )
            return await self.handler(exchange)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception as e:
            note_error(e, exchange.request_id)
            return error_response(exchange.with_own_names(e), self.shape_error)


class SentAnswer:
    """Passes the answer on: adds headers, and notes status and size for the log and the metrics."""

    def __init__(self, exchange: Exchange, send: Send, *, is_work: bool) -> None:
        self._exchange = exchange
        self._send = send
        self._is_work = is_work
        self._status = GONE
        self._num_bytes = 0
        self._start = time.perf_counter()

    async def send(self, message: Message) -> None:
        """Passes a message on (ASGI)."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [*message["headers"], (b"x-request-id", self._exchange.request_id.encode("latin-1"))]
            asked = self._exchange.request.headers.get(LOAD_REQUEST_HEADER)
            if asked is not None and self._is_work:
                report = load_report(self._exchange.state.engine.pipeline.stats, asked)
                headers += [] if report is None else [(LOAD_RESPONSE_HEADER.encode(), report.encode())]
            message["headers"] = headers
        else:
            self._num_bytes += len(message.get("body", b""))
        await self._send(message)

    def close(self, path: str, *, is_counted: bool, logs_success: bool) -> None:
        """Records the exchange in the metrics, under the `path` of its route, and logs one line, without the query and
        other text that a client chooses."""
        request, state = self._exchange.request, self._exchange.state
        duration_s = time.perf_counter() - self._start
        if is_counted:
            length = request.headers.get("content-length", "")
            num_received = int(length) if length.isdigit() and len(length) < _MAX_LENGTH_DIGITS else 0
            state.engine.pipeline.stat_loggers.record_exchange(
                HttpExchange(request.method, path, self._status, duration_s, num_received, self._num_bytes)
            )
        full_path = request.scope["path"]
        is_quiet = state.config.disable_uvicorn_access_log or full_path in state.quiet_paths
        if not is_quiet and (logs_success or self._status >= 400):
            fields = {
                "method": request.method,
                "path": full_path[:200],
                "status": self._status,
                "duration_ms": round(1000 * duration_s, 1),
                "request_id": self._exchange.request_id,
            }
            logger.info("%s %s %d %.1f ms %s", *fields.values(), extra=fields)


def load_report(stats: FrontendStats, format: str) -> str | None:
    """Returns the load in ORCA's "text" or "json"; None for another format."""
    load = stats.get_load()
    named = {
        "kv_cache_usage_perc": load.kv_cache_usage,
        "num_requests_running": float(load.num_running),
        "num_requests_waiting": float(load.num_waiting),
    }
    utilization = round(load.saturation, 4)
    match format.strip().lower():
        case "text":
            pairs = [f"named_metrics.{name}={value:g}" for name, value in named.items()]
            return "TEXT " + ", ".join([f"application_utilization={utilization:g}", *pairs])
        case "json":
            return "JSON " + json.dumps({"application_utilization": utilization, "named_metrics": named})
        case _:
            return None


def json_response(value: Any, status_code: int = 200) -> Response:
    """Returns an answer in JSON of any value that msgspec can encode."""
    return Response(msgspec.json.encode(value), status_code, media_type="application/json")
