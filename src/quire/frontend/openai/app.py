"""The table of routes, the state that they share, and the application that serves them.

A new endpoint is a file under `routes/` with its `ENDPOINTS`, and a row in `ROUTERS`.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.frontend.adapters import AdapterNames, AdapterRegistry, AdapterTable, RemoteTable, load_modules
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint
from quire.frontend.http.errors import error_response, http_status_error, shape_of, unknown_route, wrong_method
from quire.frontend.http.state import ServerState
from quire.frontend.openai.chat.format import ChatFormat
from quire.frontend.openai.rendering import PromptRenderer
from quire.frontend.openai.responses.store import LocalResponses, ResponseStore, ServerResponses
from quire.frontend.openai.routes import (
    adapters,
    admin,
    batch,
    chat,
    completions,
    engines,
    invocations,
    messages,
    ollama,
    pages,
    pooling,
    render,
    responses,
    server,
    tokens,
)
from quire.resolve import resolve
from quire.wire.peers import PARENT

ROUTERS: tuple[tuple[Endpoint, ...], ...] = (
    server.ENDPOINTS,
    tokens.ENDPOINTS,
    completions.ENDPOINTS,
    chat.ENDPOINTS,
    batch.ENDPOINTS,
    responses.ENDPOINTS,
    messages.ENDPOINTS,
    ollama.ENDPOINTS,
    pooling.ENDPOINTS,
    render.ENDPOINTS,
    invocations.ENDPOINTS,
    pages.ENDPOINTS,
    admin.ENDPOINTS,
    engines.ENDPOINTS,
    adapters.ENDPOINTS,
)
"""All endpoints, one row per file of `routes/`."""
ADMIN_PATHS = frozenset(e.path for router in ROUTERS for e in router if e.access is Access.ADMIN)


def add_parts(state: ServerState) -> ServerState:
    """Adds the objects that the routes share to `state`, and returns it. Raises ConfigError for flags that do not fit
    the model."""
    engine, config, member = state.engine, state.config, state.member
    templates = engine.tokenizer.chat_templates if engine.tokenizer is not None else {}
    door = engine.pipeline.input_processor.adapters
    names: AdapterNames = (
        AdapterTable(door, engine.engine_core.call_utility_async, state.model_names)
        if member.is_alone
        else RemoteTable(partial(member.peers.call, PARENT, "adapters"))
    )
    state.add_part(AdapterRegistry(names, door.config))
    state.add_part(PromptRenderer(engine, config))
    state.add_part(ChatFormat(config, templates.get("tool_use", templates.get("default"))))
    max_num, max_bytes = config.max_stored_responses, config.max_stored_response_bytes
    store = ResponseStore(-(-max_num // member.num_processes), max_bytes // member.num_processes)
    state.add_part(ServerResponses(LocalResponses(store), member))
    return state


async def load_adapters(state: ServerState) -> None:
    """Gets the adapters of a server before it answers: it loads those of --lora-modules, or the server's parent did.

    Raises the error of one that cannot be served.
    """
    names = state.part(AdapterRegistry).names
    if isinstance(names, RemoteTable):
        await names.refresh()
    else:
        await load_modules(names, state.config.lora_modules)


def endpoints_of(config: ServerConfig, *, is_admin: bool) -> list[Endpoint]:
    """Returns the endpoints of the main listener, or of the admin one."""
    found = [endpoint for router in ROUTERS for endpoint in router if endpoint.is_enabled(config)]
    if is_admin:
        return [e for e in found if e.access in (Access.ADMIN, Access.OPEN) or e.is_on_admin]
    with_admin = config.enable_admin and not config.admin_is_apart
    return [e for e in found if e.access is not Access.ADMIN or with_admin]


def build_app(state: ServerState, *, is_admin: bool = False) -> Starlette:
    """Returns the application of one listener. Raises ConfigError for a middleware that cannot be used."""
    config = state.config
    app = Starlette()
    app.state.server = state
    app.state.is_admin = is_admin
    app.state.endpoints = endpoints_of(config, is_admin=is_admin)
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


def add_endpoint(app: Starlette, endpoint: Endpoint) -> None:
    """Registers a route. Raises TypeError for anything that is no `Endpoint` and so declares no access."""
    if not isinstance(endpoint, Endpoint) or not isinstance(endpoint.access, Access):
        raise TypeError(f"{endpoint!r} is no Endpoint with an Access; every route must declare one")
    app.router.routes.append(Route(endpoint.path, endpoint, methods=list(endpoint.methods)))


class _UnderPath:
    """--root-path: the path under which a proxy serves the application, whether the proxy strips it or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers what the framework refuses: an unknown route or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        path = request.scope["path"]
        return error_response(unknown_route(path, is_admin=path in ADMIN_PATHS), shape_of(path))
    headers = getattr(error, "headers", None) or {}
    refusal = http_status_error(status)
    if status == 405 and "Allow" in headers:
        refusal = wrong_method(request.method, request.scope["path"], headers["Allow"])
    response = error_response(refusal, shape_of(request.scope["path"]))
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
