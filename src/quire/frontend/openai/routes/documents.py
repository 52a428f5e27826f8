"""/openapi.json, the page that shows it, and /server_info."""

from __future__ import annotations

import platform
import sys
from functools import lru_cache

import msgspec
from starlette.responses import Response

from quire.config.server import ServerConfig
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, RequestContext, json_response
from quire.frontend.http.openapi import make_openapi
from quire.frontend.openai.routes.pages import page_part, send_asset
from quire.version import __version__


@lru_cache(maxsize=4)
def _encode_openapi(endpoints: tuple[Endpoint, ...]) -> bytes:
    return msgspec.json.encode(make_openapi(endpoints))


async def openapi(context: RequestContext) -> Response:
    """This API as an OpenAPI document."""
    endpoints = tuple(context.request.app.state.endpoints)
    document = await context.state.renderer.run_aside(lambda: _encode_openapi(endpoints))
    return Response(document, media_type="application/json")


async def docs_page(context: RequestContext) -> Response:
    """A page that shows this API."""
    return send_asset(context, "docs.html")


async def redoc(context: RequestContext) -> Response:
    """The same page under its other name."""
    return Response(status_code=307, headers={"location": f"{context.request.scope['root_path']}/docs"})


async def server_info(context: RequestContext) -> Response:
    """What runs here: versions, the model, limits. No paths and no secrets."""
    state = context.state
    model = state.engine.model_config
    limits = state.engine.admission
    return json_response(
        {
            "version": __version__,
            "python": platform.python_version(),
            "platform": sys.platform,
            "model": state.model_name,
            "dtype": model.dtype,
            "max_model_len": state.max_model_len,
            "vocab_size": model.hf_config.vocab_size,
            "supported_tasks": list(state.supported_tasks),
            "max_num_queued_reqs": limits.max_num_reqs,
            "max_num_queued_tokens": limits.max_num_tokens,
            "max_num_reserved_tokens": limits.max_num_reserved_tokens,
            "max_request_bytes": state.config.max_request_bytes,
        }
    )


def _has_documents(config: ServerConfig) -> bool:
    return not config.disable_fastapi_docs


ENDPOINTS = (
    Endpoint(
        path="/openapi.json",
        handler=openapi,
        access=Access.KEY,
        methods=("GET",),
        is_enabled=_has_documents,
        is_on_admin=True,
    ),
    Endpoint(path="/docs", handler=docs_page, access=Access.OPEN, methods=("GET",), is_enabled=_has_documents),
    Endpoint(path="/docs/{name}", handler=page_part, access=Access.OPEN, methods=("GET",), is_enabled=_has_documents),
    Endpoint(path="/redoc", handler=redoc, access=Access.OPEN, methods=("GET",), is_enabled=_has_documents),
    Endpoint(path="/server_info", handler=server_info, access=Access.KEY, methods=("GET",)),
)
