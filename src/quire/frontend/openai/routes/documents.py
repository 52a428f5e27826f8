"""/openapi.json and the pages that show it, and /server_info."""

from __future__ import annotations

import platform
import sys

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import Response

from quire.config.server import ServerConfig
from quire.frontend.openai.auth import Access
from quire.frontend.openai.endpoint import Endpoint, RequestContext, json_response
from quire.frontend.openai.openapi import make_openapi
from quire.version import __version__


async def openapi(context: RequestContext) -> Response:
    """This API as an OpenAPI document."""
    return json_response(make_openapi(context.request.app.state.endpoints))


async def swagger(context: RequestContext) -> Response:
    """The API in a browser (Swagger UI, which the browser loads from its maker)."""
    return get_swagger_ui_html(openapi_url=f"{context.request.scope['root_path']}/openapi.json", title="Quire")


async def redoc(context: RequestContext) -> Response:
    """The API in a browser (ReDoc, which the browser loads from its maker)."""
    return get_redoc_html(openapi_url=f"{context.request.scope['root_path']}/openapi.json", title="Quire")


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
    Endpoint(path="/openapi.json", handler=openapi, access=Access.KEY, methods=("GET",), is_enabled=_has_documents),
    Endpoint(path="/docs", handler=swagger, access=Access.KEY, methods=("GET",), is_enabled=_has_documents),
    Endpoint(path="/redoc", handler=redoc, access=Access.KEY, methods=("GET",), is_enabled=_has_documents),
    Endpoint(path="/server_info", handler=server_info, access=Access.KEY, methods=("GET",)),
)
