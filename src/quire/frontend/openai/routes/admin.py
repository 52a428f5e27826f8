"""Control of the engine, for its operator: on the admin listener, where --enable-admin makes one.

Parameters are in the query, as vLLM's clients send them; larger ones in a JSON body.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

from msgspec import Meta
from starlette.responses import Response

from quire.errors import ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader, Name, Object, PositiveCount, RequestBody, Word
from quire.frontend.http.endpoint import Endpoint, Exchange, Handler, QueryParameter, json_response
from quire.wire.engine_core import PauseMode


class AbortBody(RequestBody, kw_only=True):
    """Body of /abort_requests: requests by the ids of their answers."""

    request_ids: Annotated[list[Name], Meta(max_length=65536)]

    EXAMPLE = {"request_ids": ["chatcmpl-1"]}  # noqa: RUF012 - a ClassVar of the base class


class UpdateWeightsBody(RequestBody, kw_only=True):
    """Body of /update_weights: where the new weights are."""

    path: Word
    """Checkpoint directory on the server's machine."""
    version: Name | None = None
    """Version that /weight_info returns afterwards."""

    EXAMPLE = {"path": "/models/new"}  # noqa: RUF012


class CollectiveRpcBody(RequestBody, kw_only=True):
    """Body of /collective_rpc: a call of a method of every worker."""

    method: Name
    args: Annotated[list[Any], Meta(max_length=1024)] | None = None
    kwargs: Object | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None
    """Timeout in seconds."""

    EXAMPLE = {"method": "check_health"}  # noqa: RUF012


class ProfileBody(RequestBody, kw_only=True):
    """Body of /start_profile. All fields are optional."""

    profile_prefix: Name | None = None
    delay_iterations: PositiveCount | None = None
    max_iterations: PositiveCount | None = None


ABORT = BodyReader(AbortBody)
UPDATE_WEIGHTS = BodyReader(UpdateWeightsBody)
COLLECTIVE_RPC = BodyReader(CollectiveRpcBody)
PROFILE = BodyReader(ProfileBody)
MAX_TRACE_S = 3600
TRACE_NAME = 'attachment; filename="quire-trace.json"'
PAUSE_MODES = ("abort", "wait", "keep")
MODE = QueryParameter(
    "mode",
    {"enum": PAUSE_MODES, "default": "abort"},
    "Requests under way: abort ends them, wait lets them end, keep freezes them.",
)
LEVEL = QueryParameter(
    "level", {"enum": ("0", "1", "2"), "default": "1"}, "Memory to release: 0 none, 1 the KV cache, 2 the weights, too."
)
TAGS = QueryParameter(
    "tags",
    {"type": "array", "items": {"enum": ("weights", "kv_cache", "scheduling")}},
    "Memory to allocate again; may be repeated. Default: all.",
)
CLEAR_CACHE = QueryParameter("clear_cache", {"type": "boolean", "default": True}, "Drops cached prefixes, too.")
RESET_RUNNING = QueryParameter(
    "reset_running_requests",
    {"type": "boolean", "default": False},
    "Takes the blocks of running requests, too.",
)
RESET_EXTERNAL = QueryParameter(
    "reset_external",
    {"type": "boolean", "default": False},
    "Drops what is stored of this model, too: in the directory of --kv-store, and at block servers.",
)
SECONDS = QueryParameter(
    "seconds", {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TRACE_S, "default": 10}, "Length of the trace."
)


def _mode(exchange: Exchange) -> PauseMode:
    mode = exchange.request.query_params.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise ValidationError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode[:60]!r}", param="mode")
    return cast("PauseMode", mode)


async def sleep(exchange: Exchange) -> Response:
    """Pauses and releases memory: ?level=0 none, 1 the KV cache, 2 the weights, too; ?mode= as for /pause."""
    level = exchange.request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise ValidationError(f"level must be 0, 1 or 2, got {level[:60]!r}", param="level")
    await exchange.state.engine.sleep(int(level), _mode(exchange))
    return Response()


async def wake_up(exchange: Exchange) -> Response:
    """Allocates memory again: all of it, or that of ?tags= (may be repeated)."""
    tags = exchange.request.query_params.getlist("tags")
    await exchange.state.engine.wake_up(tags or None)
    return Response()


async def is_sleeping(exchange: Exchange) -> Response:
    """Returns whether the engine sleeps."""
    return json_response({"is_sleeping": await exchange.state.engine.is_sleeping()})


async def pause(exchange: Exchange) -> Response:
    """Stops generating. ?mode=abort ends all requests, wait lets them end, keep freezes them."""
    await exchange.state.engine.pause_generation(
        mode=_mode(exchange), clear_cache=exchange.query_switch("clear_cache", True)
    )
    return json_response({"status": "paused"})


async def resume(exchange: Exchange) -> Response:
    """Generates again."""
    await exchange.state.engine.resume_generation()
    return json_response({"status": "resumed"})


async def is_paused(exchange: Exchange) -> Response:
    """Returns whether new requests wait."""
    return json_response({"is_paused": await exchange.state.engine.is_paused()})


async def reset_prefix_cache(exchange: Exchange) -> Response:
    """Drops all cached prefixes; success is false if running requests held blocks and nothing was done, or a block
    server has not dropped its records."""
    done = await exchange.state.engine.reset_prefix_cache(
        exchange.query_switch("reset_running_requests", False), exchange.query_switch("reset_external", False)
    )
    return json_response({"success": done})


async def reset_mm_cache(exchange: Exchange) -> Response:
    """Drops processed images and sounds."""
    await exchange.state.engine.reset_mm_cache()
    return Response()


async def reset_encoder_cache(exchange: Exchange) -> Response:
    """Drops encoder outputs."""
    await exchange.state.engine.reset_encoder_cache()
    return Response()


async def release_kv_cache_memory(exchange: Exchange) -> Response:
    """Pauses and releases only the KV cache; wake_up allocates it again."""
    await exchange.state.engine.release_kv_cache_memory(_mode(exchange))
    return Response()


async def abort_requests(exchange: Exchange) -> Response:
    """Aborts requests by the ids of their answers. Unknown ids are ignored."""
    request_ids = (await exchange.read(ABORT)).request_ids
    await exchange.state.engine.abort(request_ids)
    await exchange.state.member.peers.gather("abort", request_ids)
    return Response()


async def update_weights(exchange: Exchange) -> Response:
    """Replaces the weights by those of another checkpoint directory."""
    body = await exchange.read(UPDATE_WEIGHTS)
    return json_response({"weight_version": await exchange.state.engine.update_weights(body.path, body.version)})


async def weight_info(exchange: Exchange) -> Response:
    """Returns the version of the loaded weights."""
    return json_response({"weight_version": await exchange.state.engine.get_weight_version()})


async def collective_rpc(exchange: Exchange) -> Response:
    """Calls a method of every worker. Returns one result per worker."""
    body = await exchange.read(COLLECTIVE_RPC)
    results = await exchange.state.engine.collective_rpc(
        body.method, body.timeout, tuple(body.args or ()), body.kwargs or {}
    )
    plain = (str, int, float, bool, list, dict, type(None))
    return json_response({"results": [result if isinstance(result, plain) else str(result) for result in results]})


async def start_profile(exchange: Exchange) -> Response:
    """Starts the workers' profiler."""
    has_body = exchange.request.headers.get("content-length", "0") != "0"
    body = await exchange.read(PROFILE) if has_body else ProfileBody()
    await exchange.state.engine.start_profile(
        body.profile_prefix, delay_iterations=body.delay_iterations, max_iterations=body.max_iterations
    )
    return Response()


async def stop_profile(exchange: Exchange) -> Response:
    """Stops the workers' profiler."""
    await exchange.state.engine.stop_profile()
    return Response()


async def debug_trace(exchange: Exchange) -> Response:
    """Returns a trace of the last ?seconds= (default 10) as JSON for Perfetto (ui.perfetto.dev)."""
    text = exchange.request.query_params.get("seconds", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TRACE_S:
        raise ValidationError(f"seconds must be above 0 and at most {MAX_TRACE_S}, got {text[:60]!r}", param="seconds")
    trace = await exchange.state.engine.get_trace(seconds)
    return Response(trace, media_type="application/json", headers={"content-disposition": TRACE_NAME})


def _row(
    path: str, handler: Handler, method: str = "POST", *query: QueryParameter, body: BodyReader[Any] | None = None
) -> Endpoint:
    return Endpoint(
        path=path,
        handler=handler,
        access=Access.ADMIN,
        methods=(method,),
        body=body,
        query=query,
        is_enabled=lambda config: config.enable_admin,
    )


ENDPOINTS = (
    _row("/sleep", sleep, "POST", LEVEL, MODE),
    _row("/wake_up", wake_up, "POST", TAGS),
    _row("/is_sleeping", is_sleeping, "GET"),
    _row("/pause", pause, "POST", MODE, CLEAR_CACHE),
    _row("/resume", resume),
    _row("/is_paused", is_paused, "GET"),
    _row("/reset_prefix_cache", reset_prefix_cache, "POST", RESET_RUNNING, RESET_EXTERNAL),
    _row("/reset_mm_cache", reset_mm_cache),
    _row("/reset_encoder_cache", reset_encoder_cache),
    _row("/release_kv_cache_memory", release_kv_cache_memory),
    _row("/abort_requests", abort_requests, body=ABORT),
    _row("/update_weights", update_weights, body=UPDATE_WEIGHTS),
    _row("/weight_info", weight_info, "GET"),
    _row("/collective_rpc", collective_rpc, body=COLLECTIVE_RPC),
    _row("/start_profile", start_profile, body=PROFILE),
    _row("/stop_profile", stop_profile),
    _row("/debug/trace", debug_trace, "GET", SECONDS),
)
