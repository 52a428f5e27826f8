"""Pages for people (/ui, /ui/dashboard, /docs) and what they show: /openapi.json, /server_info, /debug/state.

The pages are static files of the package that load nothing from other sites. Anyone may load them: they hold no secret,
and a browser that opens an address cannot send a key. The routes behind them ask for one. The files are read once and
found by their names in a table, so no path of a client's reaches the file system.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass
from functools import cache, lru_cache

import msgspec
from starlette.responses import Response

from quire.config.model import ASSETS_DIR
from quire.config.server import ServerConfig
from quire.errors import NotFoundError, ValidationError
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, Exchange, QueryParameter, json_response
from quire.frontend.http.engine_view import describe_engine
from quire.frontend.http.openapi import make_openapi
from quire.version import __version__

DIRECTORY = ASSETS_DIR / "ui"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Allows scripts and styles only from this server, none inline, and no text as markup."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of every file. no-cache: browsers store it and validate it by its ETag each time."""


@dataclass(frozen=True)
class Asset:
    """A file as it is sent."""

    content: bytes
    media_type: str
    etag: str


@cache
def load_assets() -> dict[str, Asset]:
    """Returns every file of the pages, by name; those of `vendor` (scripts/vendor) stand beside the others."""
    assets = {}
    for path in sorted(DIRECTORY.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            assets[path.name] = Asset(content, MEDIA_TYPES[path.suffix], etag)
    return assets


def send_asset(exchange: Exchange, name: str) -> Response:
    """Returns a file, or 304 if the browser has it. Raises NotFoundError."""
    asset = load_assets().get(name)
    if asset is None:
        raise NotFoundError(f"the pages have no part {name[:60]!r}")
    headers = {**HEADERS, "etag": asset.etag}
    known = exchange.request.headers.get("if-none-match", "")
    if asset.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


async def chat_page(exchange: Exchange) -> Response:
    """Returns the page to chat with the model."""
    return send_asset(exchange, "chat.html")


async def home(exchange: Exchange) -> Response:
    """Redirects a browser to the first page."""
    return Response(status_code=307, headers={"location": f"{exchange.request.scope['root_path']}/ui"})


async def dashboard_page(exchange: Exchange) -> Response:
    """Returns the page to watch the engine."""
    return send_asset(exchange, "dashboard.html")


async def page_part(exchange: Exchange) -> Response:
    """Returns a script, a style sheet or an image of the pages."""
    name = str(exchange.request.path_params["name"])
    if name.endswith(".html"):
        raise NotFoundError(f"the pages have no part {name[:60]!r}")
    return send_asset(exchange, name)


@lru_cache(maxsize=4)
def _encode_openapi(endpoints: tuple[Endpoint, ...]) -> bytes:
    return msgspec.json.encode(make_openapi(endpoints))


async def openapi(exchange: Exchange) -> Response:
    """Returns this API as an OpenAPI document."""
    endpoints = tuple(exchange.request.app.state.endpoints)
    document = await exchange.state.engine.text_thread.run(lambda: _encode_openapi(endpoints))
    return Response(document, media_type="application/json")


async def docs_page(exchange: Exchange) -> Response:
    """Returns the page that shows this API."""
    return send_asset(exchange, "docs.html")


async def redoc(exchange: Exchange) -> Response:
    """Redirects to /docs."""
    return Response(status_code=307, headers={"location": f"{exchange.request.scope['root_path']}/docs"})


async def server_info(exchange: Exchange) -> Response:
    """Returns versions, the model and limits. No paths and no secrets."""
    state = exchange.state
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


MAX_DIGITS = 18
AFTER = QueryParameter("after", {"type": "integer", "minimum": 0, "default": 0}, "Number of a request that has ended.")


async def debug_state(exchange: Exchange) -> Response:
    """Returns the state of blocks and requests, and the requests that ended last (?after=N: after number N). Ids and
    counts only, no text."""
    state = exchange.state
    after = exchange.request.query_params.get("after", "0")
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
        "abort": _abort_place(exchange),
    }
    stamps, ended = await state.watch.look([request.request_id for request in snapshot.requests], int(after))
    view = describe_engine(snapshot, stamps, facts=facts, ended=ended)
    response = json_response(view)
    response.headers["cache-control"] = "no-store"
    return response


def _abort_place(exchange: Exchange) -> str:
    """Returns where requests can be aborted: "here" (on this listener), "admin" (on the other) or "off"."""
    endpoints: list[Endpoint] = exchange.request.app.state.endpoints
    if any(endpoint.path == "/abort_requests" for endpoint in endpoints):
        return "here"
    return "admin" if exchange.state.config.enable_admin else "off"


def has_pages(config: ServerConfig) -> bool:
    """Returns whether the pages are served (--disable-ui)."""
    return not config.disable_ui


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
    Endpoint(path="/", handler=home, access=Access.OPEN, methods=("GET",), is_enabled=has_pages),
    Endpoint(path="/ui", handler=chat_page, access=Access.OPEN, methods=("GET",), is_enabled=has_pages),
    Endpoint(path="/ui/dashboard", handler=dashboard_page, access=Access.OPEN, methods=("GET",), is_enabled=has_pages),
    Endpoint(path="/ui/{name}", handler=page_part, access=Access.OPEN, methods=("GET",), is_enabled=has_pages),
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
