"""Endpoints: the rows of the table of routes, and the application around them.

An `Endpoint` declares a route: path, methods, handler, access, body. Nothing can be served without one, and none can be
made without an `Access`. Calling it is the whole way of a request: its id, the check of the key, the handler, the one
place for errors, the access log.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.errors import ConfigError, NotFoundError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader
from quire.frontend.http.errors import (
    ErrorShape,
    UnavailableError,
    error_body,
    error_response,
    http_status_error,
    note_error,
    unknown_route,
    wrong_method,
)
from quire.frontend.http.exchange import Exchange
from quire.frontend.http.state import ServerState
from quire.frontend.metrics.collect.events import HttpExchange
from quire.frontend.metrics.frontend_stats import FrontendStats
from quire.logger import init_logger
from quire.resolve import resolve

logger = init_logger("quire.access")

PROBES = frozenset(
    {"/metrics", "/health", "/health/live", "/health/ready", "/load", "/ping", "/version", "/server_info"}
)
"""Paths that are not counted as HTTP requests: probes call them every few seconds."""

GONE = 499
"""Status that is logged where the client disconnected before the answer."""
LOAD_REQUEST_HEADER = "endpoint-load-metrics-format"
LOAD_RESPONSE_HEADER = "endpoint-load-metrics"
"""Headers of ORCA, Envoy's load reports: a balancer asks for a format and reads the load from the answer."""
_MAX_LENGTH_DIGITS = 16

Handler = Callable[[Exchange], Awaitable[Response]]


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


def select_endpoints(endpoints: Iterable[Endpoint], config: ServerConfig, *, is_admin: bool) -> list[Endpoint]:
    """Returns those of `endpoints` that the main listener, or the admin one, serves."""
    found = [endpoint for endpoint in endpoints if endpoint.is_enabled(config)]
    if is_admin:
        return [e for e in found if e.access in (Access.ADMIN, Access.OPEN) or e.is_on_admin]
    with_admin = config.enable_admin and not config.admin_is_apart
    return [e for e in found if e.access is not Access.ADMIN or with_admin]


def make_app(state: ServerState, endpoints: Iterable[Endpoint], *, is_admin: bool = False) -> Starlette:
    """Returns the application that serves `endpoints`. Raises ConfigError for a middleware that cannot be used."""
    config = state.config
    app = Starlette()
    app.state.server = state
    app.state.is_admin = is_admin
    endpoints = list(endpoints)
    app.state.endpoints = select_endpoints(endpoints, config, is_admin=is_admin)
    app.state.admin_paths = {endpoint.path for endpoint in endpoints if endpoint.access is Access.ADMIN}
    for endpoint in app.state.endpoints:
        add_endpoint(app, endpoint)
    app.add_exception_handler(HTTPException, _on_http_exception)
    if config.allowed_origins and not is_admin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_credentials=config.allow_credentials,
            allow_methods=list(config.allowed_methods),
            allow_headers=list(config.allowed_headers),
        )
    for name in config.middleware:
        _add_middleware(app, name)
    if config.root_path:
        app.add_middleware(_UnderPath, root_path=config.root_path)
    return app


class _UnderPath:
    """--root-path: the path under which a proxy serves the application, whether the proxy strips it or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


def add_endpoint(app: Starlette, endpoint: Endpoint) -> None:
    """Registers a route. Raises TypeError for anything that is no `Endpoint` and so declares no access."""
    if not isinstance(endpoint, Endpoint) or not isinstance(endpoint.access, Access):
        raise TypeError(f"{endpoint!r} is no Endpoint with an Access; every route must declare one")
    app.router.routes.append(Route(endpoint.path, endpoint, methods=list(endpoint.methods)))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers what the framework refuses: an unknown route or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        path = request.scope["path"]
        return error_response(unknown_route(path, is_admin=path in request.app.state.admin_paths))
    headers = getattr(error, "headers", None) or {}
    refusal = http_status_error(status)
    if status == 405 and "Allow" in headers:
        refusal = wrong_method(request.method, request.scope["path"], headers["Allow"])
    response = error_response(refusal)
    response.headers.update(headers)
    return response


def _add_middleware(app: Starlette, name: str) -> None:
    """Adds a --middleware: a class, or an async function of (request, call_next), by dotted name."""
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    found: Any = resolve(f"{module_name}:{attribute}")
    if inspect.isclass(found):
        app.add_middleware(found)  # type: ignore[arg-type]  # whatever the operator names
    elif inspect.iscoroutinefunction(found):
        app.add_middleware(BaseHTTPMiddleware, dispatch=found)
    else:
        raise ConfigError(f"--middleware {name} is neither a class nor an async function")
