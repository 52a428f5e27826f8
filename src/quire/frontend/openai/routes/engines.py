"""The engines of a server with several: their health, and, on the admin listener, restarts and another number of them.

Requests move from an engine before it ends, so that none of these operations ends or delays any of them for long.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Annotated, cast

from msgspec import Meta
from starlette.responses import Response

from quire.errors import ClientError, ValidationError
from quire.frontend.client.dp import DPAsyncMPClient, DPLBAsyncMPClient, DrainMode
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader, RequestBody
from quire.frontend.http.endpoint import Endpoint, Exchange, Handler, QueryParameter, json_response
from quire.frontend.http.errors import HttpError

MODES = ("move", "wait")
DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 86400.0
MAX_DIGITS = 6
NumEngines = Annotated[int, Meta(ge=1, le=1024)]
Seconds = Annotated[int, Meta(ge=1, le=86400)]


class ScaleBody(RequestBody, kw_only=True):
    """Body of /scale_elastic_ep: the new number of engines."""

    new_data_parallel_size: NumEngines
    drain_timeout: Seconds = 120
    """Longest wait for a new engine, in seconds. Requests of engines that are removed move at once."""

    EXAMPLE = {"new_data_parallel_size": 4}  # noqa: RUF012 - a ClassVar of the base class


SCALE = BodyReader(ScaleBody)
MODE = QueryParameter(
    "mode", {"enum": MODES, "default": "move"}, "Requests of the engine: move lets others go on with them, wait waits."
)
TIMEOUT_S = QueryParameter(
    "timeout_s",
    {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S, "default": DEFAULT_TIMEOUT_S},
    "Longest wait for requests that end, and for a core that starts.",
)


def _client(exchange: Exchange) -> DPLBAsyncMPClient:
    client = exchange.state.engine.engine_core
    if not isinstance(client, DPLBAsyncMPClient):
        raise ClientError(
            "this server cannot change its engines: it was started with one; start it with --data-parallel-size 2 or "
            "more, and without --api-server-count"
        )
    return client


def _mode(exchange: Exchange) -> DrainMode:
    mode = exchange.request.query_params.get("mode", "move")
    if mode not in MODES:
        raise ValidationError(f"mode must be one of {', '.join(MODES)}, got {mode[:60]!r}", param="mode")
    return cast("DrainMode", mode)


def _timeout_s(exchange: Exchange) -> float:
    text = exchange.request.query_params.get("timeout_s", str(DEFAULT_TIMEOUT_S))
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValidationError(
            f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}, got {text[:60]!r}", param="timeout_s"
        )
    return timeout_s


def _engine(exchange: Exchange) -> int:
    text = str(exchange.request.path_params["engine"])
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ValidationError(f"an engine is named by its number, got {text[:60]!r}", param="engine")
    return int(text)


async def health_engines(exchange: Exchange) -> Response:
    """Returns the state of each engine: up, restoring, down (being started) or gone; and how many are up."""
    core = exchange.state.engine.engine_core
    if isinstance(core, DPAsyncMPClient):
        states = {status.engine: status.state for status in core.list_engines()}
    else:
        state = "up" if core.is_ready else "gone" if core.engine_dead else "down"
        states = dict.fromkeys(core.engine_responses, state)
    rows = [{"engine": engine, "state": state} for engine, state in sorted(states.items())]
    return json_response({"num_up": sum(state == "up" for state in states.values()), "engines": rows})


async def list_engines(exchange: Exchange) -> Response:
    """Returns the engines with their processes, requests and restarts."""
    return json_response({"engines": _client(exchange).list_engines()})


async def drain_engine(exchange: Exchange) -> Response:
    """Sends an engine no requests until /resume. Answers when it has none."""
    client, engine = _client(exchange), _engine(exchange)
    return await _answer(exchange, client.drain_engine(engine, _mode(exchange), _timeout_s(exchange)))


async def resume_engine(exchange: Exchange) -> Response:
    """Sends an engine requests again."""
    return await _answer(exchange, _client(exchange).resume_engine(_engine(exchange)))


async def restart_engine(exchange: Exchange) -> Response:
    """Restarts an engine. Answers when it is ready again."""
    client, engine = _client(exchange), _engine(exchange)
    return await _answer(exchange, client.restart_engine(engine, _mode(exchange), _timeout_s(exchange)))


async def restart_engines(exchange: Exchange) -> Response:
    """Restarts all engines, one after the other. A failed start ends the roll; the others serve on."""
    return await _answer(exchange, _client(exchange).restart_engines(_mode(exchange), _timeout_s(exchange)))


async def remove_engine(exchange: Exchange) -> Response:
    """Removes an engine; its requests move first."""
    return await _answer(exchange, _client(exchange).remove_engine(_engine(exchange)))


async def _answer(exchange: Exchange, work: Coroutine[object, object, None]) -> Response:
    try:
        await work
    except TimeoutError as e:
        raise HttpError(408, str(e)) from e
    return await list_engines(exchange)


async def scale(exchange: Exchange) -> Response:
    """Changes the number of engines. Answers when the new ones are ready, and the others have ended."""
    body = await exchange.read(SCALE)
    client = _client(exchange)
    try:
        await client.scale(body.new_data_parallel_size, float(body.drain_timeout))
    except TimeoutError as e:
        raise HttpError(408, str(e)) from e
    return json_response({"message": f"Scaled to {body.new_data_parallel_size} data parallel engines"})


async def is_scaling(exchange: Exchange) -> Response:
    """Returns whether the number of engines is being changed."""
    core = exchange.state.engine.engine_core
    return json_response({"is_scaling_elastic_ep": isinstance(core, DPLBAsyncMPClient) and core.is_scaling})


def _row(path: str, handler: Handler, method: str = "POST", *query: QueryParameter, body: bool = False) -> Endpoint:
    return Endpoint(
        path=path,
        handler=handler,
        access=Access.ADMIN,
        methods=(method,),
        body=SCALE if body else None,
        query=query,
        is_enabled=lambda config: config.enable_admin,
    )


ENDPOINTS = (
    Endpoint(path="/health/engines", handler=health_engines, access=Access.OPEN, methods=("GET",), is_polled=True),
    _row("/admin/engines", list_engines, "GET"),
    _row("/admin/engines/restart", restart_engines, "POST", MODE, TIMEOUT_S),
    _row("/admin/engines/{engine}/drain", drain_engine, "POST", MODE, TIMEOUT_S),
    _row("/admin/engines/{engine}/resume", resume_engine),
    _row("/admin/engines/{engine}/restart", restart_engine, "POST", MODE, TIMEOUT_S),
    _row("/admin/engines/{engine}/remove", remove_engine),
    _row("/scale_elastic_ep", scale, "POST", body=True),
    _row("/is_scaling_elastic_ep", is_scaling),
)
