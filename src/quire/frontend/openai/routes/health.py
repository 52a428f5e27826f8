"""Probes, and what a server says about itself."""

from __future__ import annotations

from starlette.responses import Response

from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, RequestContext, json_response
from quire.frontend.http.errors import UnavailableError
from quire.version import __version__


async def health(context: RequestContext) -> Response:
    """200 as long as the engine serves; vLLM's probe. 503 once it is gone for good."""
    if context.state.engine.errored:
        raise UnavailableError("the engine is gone for good; restart the server")
    return Response()


async def ping(context: RequestContext) -> Response:
    """The same, for those who call it so."""
    return await health(context)


async def live(context: RequestContext) -> Response:
    """200 as long as this process answers."""
    return Response()


async def ready(context: RequestContext) -> Response:
    """200 if a request would be worked on now: not while the core restarts, nor while the server shuts down."""
    if context.state.lifecycle.is_draining:
        raise UnavailableError("the server is shutting down")
    if not context.state.engine.is_ready:
        raise UnavailableError("the engine is not ready: it is gone, or being started again")
    return Response()


async def version(context: RequestContext) -> Response:
    """The version of Quire."""
    return json_response({"version": __version__})


async def load(context: RequestContext) -> Response:
    """How many requests are under way, in all processes of the server."""
    return json_response({"server_load": context.state.lifecycle.server_load})


ENDPOINTS = (
    Endpoint(path="/health", handler=health, access=Access.OPEN, methods=("GET",)),
    Endpoint(path="/health/live", handler=live, access=Access.OPEN, methods=("GET",)),
    Endpoint(path="/health/ready", handler=ready, access=Access.OPEN, methods=("GET",)),
    Endpoint(path="/ping", handler=ping, access=Access.OPEN, methods=("GET", "POST")),
    Endpoint(path="/version", handler=version, access=Access.KEY, methods=("GET",)),
    Endpoint(path="/load", handler=load, access=Access.KEY, methods=("GET",)),
)
