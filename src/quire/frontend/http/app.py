"""The ASGI application around the endpoints of a server: FastAPI, CORS, middleware, --root-path."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint
from quire.frontend.http.errors import error_response, http_status_error, unknown_route, wrong_method
from quire.frontend.http.state import ServerState
from quire.resolve import resolve
from quire.version import __version__


def select_endpoints(endpoints: Iterable[Endpoint], config: ServerConfig, *, is_admin: bool) -> list[Endpoint]:
    """Returns those of `endpoints` that the main listener, or the admin one, serves."""
    found = [endpoint for endpoint in endpoints if endpoint.is_enabled(config)]
    if is_admin:
        return [e for e in found if e.access in (Access.ADMIN, Access.OPEN) or e.is_on_admin]
    with_admin = config.enable_admin and not config.admin_is_apart
    return [e for e in found if e.access is not Access.ADMIN or with_admin]


def make_app(state: ServerState, endpoints: Iterable[Endpoint], *, is_admin: bool = False) -> FastAPI:
    """Returns the application that serves `endpoints`. Raises ConfigError for a middleware that cannot be used."""
    config = state.config
    app = FastAPI(
        title="Quire",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.server = state
    app.state.is_admin = is_admin
    app.state.endpoints = select_endpoints(endpoints, config, is_admin=is_admin)
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
    """--root-path: the path under which a proxy serves all this, whether it takes that path off or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


def add_endpoint(app: FastAPI, endpoint: Endpoint) -> None:
    """Register a route. Raises TypeError for anything that is no `Endpoint`, and so has declared no access."""
    if not isinstance(endpoint, Endpoint) or not isinstance(endpoint.access, Access):
        raise TypeError(
            f"{endpoint!r} is no Endpoint with an Access; a route that does not say who may call it is none"
        )
    app.router.routes.append(Route(endpoint.path, endpoint, methods=list(endpoint.methods)))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses: no such route, not that method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return error_response(unknown_route(request.scope["path"]))
    headers = getattr(error, "headers", None) or {}
    refusal = http_status_error(status)
    if status == 405 and "Allow" in headers:
        refusal = wrong_method(request.method, request.scope["path"], headers["Allow"])
    response = error_response(refusal)
    response.headers.update(headers)
    return response


def _add_middleware(app: FastAPI, name: str) -> None:
    """--middleware: a class, or an async function of (request, call_next), by dotted name."""
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    found: Any = resolve(f"{module_name}:{attribute}")
    if inspect.isclass(found):
        app.add_middleware(found)  # type: ignore[arg-type]  # whatever the operator names
    elif inspect.iscoroutinefunction(found):
        app.middleware("http")(found)
    else:
        raise ConfigError(f"--middleware {name} is neither a class nor an async function")
