"""Routes of the server itself: probes, /version, /load, /metrics for Prometheus, and GET /v1/models."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from quire.errors import ServerError
from quire.frontend.adapters import AdapterRegistry
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.http.errors import HttpError, UnavailableError
from quire.frontend.http.state import ServerState, hash_model
from quire.frontend.metrics.publish.exposition import CONTENT_TYPES, choose_format
from quire.version import __version__


async def health(exchange: Exchange) -> Response:
    """Answers 200 as long as the engine serves, also while its core restarts; 503 once it is gone for good."""
    if exchange.state.engine.errored:
        raise UnavailableError("the engine is gone for good; restart the server")
    return Response()


async def ping(exchange: Exchange) -> Response:
    """Answers as /health."""
    return await health(exchange)


async def live(exchange: Exchange) -> Response:
    """Answers 200 as long as this process runs."""
    return Response()


async def ready(exchange: Exchange) -> Response:
    """Answers 200 if a request would be processed now: not while the core restarts or the server shuts down."""
    if exchange.state.lifecycle.is_draining:
        raise UnavailableError("the server is shutting down")
    if not exchange.state.engine.is_ready:
        raise UnavailableError("the engine is not ready: it is gone, or being started again")
    return Response()


async def version(exchange: Exchange) -> Response:
    """Returns the version of Quire."""
    return json_response({"version": __version__})


async def load(exchange: Exchange) -> Response:
    """Returns the number of requests under way in all processes of the server."""
    return json_response({"server_load": exchange.state.lifecycle.server_load})


async def metrics(exchange: Exchange) -> Response:
    """Returns all metrics of this server in Prometheus' text format, or OpenMetrics if the Accept header asks."""
    format = choose_format(exchange.request.headers.get("accept", ""))
    try:
        text = await exchange.state.metrics.write(format)
    except ServerError as e:
        raise HttpError(503, str(e)) from e
    return Response(text, headers={"content-type": CONTENT_TYPES[format]})


async def kv_event_sources(exchange: Exchange) -> Response:
    """Returns where engines publish KV cache events, by data-parallel rank; nothing if they do not."""
    engines = exchange.state.engine.engine_core.engine_responses
    sources = {str(engine): ready.kv_events for engine, ready in sorted(engines.items()) if ready.kv_events is not None}
    return json_response(msgspec.to_builtins(sources))


async def list_models(exchange: Exchange) -> Response:
    """Lists the models that requests may name."""
    state = exchange.state
    cards = [model_card(state, name) for name in state.model_names]
    cards += [model_card(state, *adapter) for adapter in state.part(AdapterRegistry).list()]
    return json_response({"object": "list", "data": cards})


async def show_model(exchange: Exchange) -> Response:
    """Returns one model."""
    name = await exchange.find_model(exchange.request.path_params["model"])
    adapter = exchange.adapter
    return json_response(
        model_card(exchange.state, name, *([] if adapter is None else [adapter.request.base_model_name]))
    )


def model_card(state: ServerState, name: str, parent: str | None = "") -> dict[str, Any]:
    """Returns a model in OpenAI's form, with vLLM's further fields. `root` is no path. `parent` is the model that an
    adapter adapts; None: the one that is served."""
    permission = {
        "id": f"modelperm-{hash_model(state.engine.model_config)}",
        "object": "model_permission",
        "created": state.member.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": state.member.created,
        "owned_by": "quire",
        "root": name,
        "parent": None if parent == "" else parent or state.model_name,
        "max_model_len": state.max_model_len,
        "permission": [permission],
    }


ENDPOINTS = (
    Endpoint(path="/health", handler=health, access=Access.OPEN, methods=("GET",)),
    Endpoint(path="/health/live", handler=live, access=Access.OPEN, methods=("GET",)),
    Endpoint(path="/health/ready", handler=ready, access=Access.OPEN, methods=("GET",)),
    Endpoint(path="/ping", handler=ping, access=Access.OPEN, methods=("GET", "POST")),
    Endpoint(path="/version", handler=version, access=Access.KEY, methods=("GET",)),
    Endpoint(path="/load", handler=load, access=Access.KEY, methods=("GET",)),
    Endpoint(
        path="/metrics", handler=metrics, access=Access.METRICS, methods=("GET",), is_on_admin=True, is_polled=True
    ),
    Endpoint(path="/kv_event_sources", handler=kv_event_sources, access=Access.KEY, methods=("GET",)),
    Endpoint(path="/v1/models", handler=list_models, access=Access.KEY, methods=("GET",)),
    Endpoint(path="/v1/models/{model:path}", handler=show_model, access=Access.KEY, methods=("GET",)),
)
