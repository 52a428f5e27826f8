"""/ui, /ui/dashboard and their parts: static files of the package, which ask for nothing from anywhere else.

Whoever knows the address may load them: they hold no secret, and a browser that opens an address can show no key. What
they show comes from routes that ask for one. The files are read once, and found by their names in a table: no path of a
client's reaches the file system.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

from starlette.responses import Response

from quire.config.model import ASSETS_DIR
from quire.errors import NotFoundError
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, RequestContext
from quire.frontend.openai.routes.debug import has_pages

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
"""Scripts and styles from here only, none in the page itself, and no text that becomes markup."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""no-cache: kept, and asked for anew each time, which the ETag answers in a few bytes."""


@dataclass(frozen=True)
class Asset:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str


@cache
def load_assets() -> dict[str, Asset]:
    """Every file of the pages, by name."""
    assets = {}
    for path in sorted(DIRECTORY.iterdir()):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            assets[path.name] = Asset(content, MEDIA_TYPES[path.suffix], etag)
    return assets


def send_asset(context: RequestContext, name: str) -> Response:
    """A file, or 304 for one that the browser has. Raises NotFoundError."""
    asset = load_assets().get(name)
    if asset is None:
        raise NotFoundError(f"the pages have no part {name[:60]!r}")
    headers = {**HEADERS, "etag": asset.etag}
    known = context.request.headers.get("if-none-match", "")
    if asset.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


async def chat_page(context: RequestContext) -> Response:
    """A page to talk to the model."""
    return send_asset(context, "chat.html")


async def home(context: RequestContext) -> Response:
    """Who opens the server's address in a browser wants the first page."""
    return Response(status_code=307, headers={"location": f"{context.request.scope['root_path']}/ui"})


async def dashboard_page(context: RequestContext) -> Response:
    """A page to watch the engine."""
    return send_asset(context, "dashboard.html")


async def page_part(context: RequestContext) -> Response:
    """A script, a style sheet or an image of the pages."""
    name = str(context.request.path_params["name"])
    if name.endswith(".html"):
        raise NotFoundError(f"the pages have no part {name[:60]!r}")
    return send_asset(context, name)


ENDPOINTS = (
    Endpoint(path="/", handler=home, access=Access.OPEN, methods=("GET",), is_enabled=has_pages),
    Endpoint(path="/ui", handler=chat_page, access=Access.OPEN, methods=("GET",), is_enabled=has_pages),
    Endpoint(path="/ui/dashboard", handler=dashboard_page, access=Access.OPEN, methods=("GET",), is_enabled=has_pages),
    Endpoint(path="/ui/{name}", handler=page_part, access=Access.OPEN, methods=("GET",), is_enabled=has_pages),
)
