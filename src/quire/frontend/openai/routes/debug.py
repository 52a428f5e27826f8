"""GET /debug/state: the blocks of the KV cache and the requests of this moment, for the dashboard and `quire top`."""

from __future__ import annotations

from starlette.responses import Response

from quire.config.server import ServerConfig
from quire.errors import ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, QueryParameter, RequestContext, json_response
from quire.frontend.http.engine_view import describe_engine
from quire.version import __version__

MAX_DIGITS = 18
AFTER = QueryParameter(
    "after", {"type": "integer", "minimum": 0, "default": 0}, "The number of a request that has ended."
)


async def debug_state(context: RequestContext) -> Response:
    """Which blocks are free, cached and in use by whom, where every request stands, and which ended last (?after=N:
    after number N). Ids and counts only, no text."""
    state = context.state
    after = context.request.query_params.get("after", "0")
    if not (after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS):
        raise ValidationError(
            f"after must be the number of a request that has ended, got {after[:60]!r}", param="after"
        )
    snapshot = await state.snapshots.get()
    facts = {
        "version": __version__,
        "model": state.model_name,
        "block_size": state.engine.engine_core.ready_response.block_size,
        "max_model_len": state.max_model_len,
        "abort": _abort_place(context),
    }
    stamps, ended = await state.watch.look([request.request_id for request in snapshot.requests], int(after))
    view = describe_engine(snapshot, stamps, facts=facts, ended=ended)
    response = json_response(view)
    response.headers["cache-control"] = "no-store"
    return response


def _abort_place(context: RequestContext) -> str:
    """Where requests can be aborted: "here" (/abort_requests of this listener), "admin" (of the other one) or "off"."""
    endpoints: list[Endpoint] = context.request.app.state.endpoints
    if any(endpoint.path == "/abort_requests" for endpoint in endpoints):
        return "here"
    return "admin" if context.state.config.enable_admin else "off"


def has_pages(config: ServerConfig) -> bool:
    """Whether people may watch (--disable-ui)."""
    return not config.disable_ui


ENDPOINTS = (
    Endpoint(
        path="/debug/state",
        handler=debug_state,
        query=(AFTER,),
        access=Access.KEY,
        methods=("GET",),
        is_enabled=has_pages,
        is_on_admin=True,
        is_polled=True,
    ),
)
