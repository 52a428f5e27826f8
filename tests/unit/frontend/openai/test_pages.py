"""The pages as they are sent: headers, caching, access, and the switch that turns them off."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import urljoin

import pytest

from quire.config.server import ServerConfig
from quire.frontend.openai.app import build_app, endpoints_of
from quire.frontend.openai.routes.pages import DIRECTORY, load_assets

from .serving import Server, check, client_of

KEYS = [hashlib.sha256(b"first").digest()]
PARTS = {path.name: path for path in DIRECTORY.rglob("*") if path.suffix in (".css", ".js", ".svg")}
"""Files beside the pages, by name: those of `vendor` are sent beside the others, too."""


def test_every_file_is_sent_as_it_is() -> None:
    async def test(server: Server) -> None:
        pages = {"/ui": "chat.html", "/ui/dashboard": "dashboard.html", "/docs": "docs.html"}
        pages |= {f"{home}/{name}": name for name in PARTS for home in ("/ui", "/docs")}
        for path, name in pages.items():
            response = await server.get(path)
            assert response.status_code == 200, path
            assert response.content == PARTS.get(name, DIRECTORY / name).read_bytes()
            assert response.headers["x-content-type-options"] == "nosniff"
            policy = response.headers["content-security-policy"].split("; ")
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in response.headers["content-security-policy"]
        assert (await server.get("/ui")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await server.get("/ui/chat.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        assert (await server.client.head("/ui")).status_code == 200

    check(test)


@pytest.mark.parametrize("root_path", ["", "/models"])
def test_other_addresses_lead_to_the_pages(root_path: str) -> None:
    async def test(server: Server) -> None:
        for path, where in (("/", "/ui"), ("/redoc", "/docs")):
            response = await server.get(path)
            assert (response.status_code, response.headers["location"]) == (307, root_path + where)

    check(test, root_path=root_path or None)


@pytest.mark.parametrize("path", ["/ui", "/ui/dashboard", "/docs"])
def test_all_that_a_page_asks_for_is_here(path: str) -> None:
    """Links, images, styles and scripts, and what these import."""

    async def test(server: Server) -> None:
        asked, wanted = set(), [f"http://localhost/models{path}"]
        while wanted:
            url = wanted.pop()
            asked.add(url)
            assert url.startswith("http://localhost/models/")
            response = await server.get(url)
            assert response.status_code == 200, url
            found = re.findall(r'(?:src|href|from)[= ]"([\w./-]+)"', response.text)
            wanted += {urljoin(url, name) for name in found} - asked - set(wanted)
        assert len(asked) > 5

    check(test, root_path="/models")


def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    async def test(server: Server) -> None:
        first = await server.get("/ui/style.css")
        assert first.headers["cache-control"] == "no-cache"
        etag = first.headers["etag"]
        for known in (etag, f'"other", W/{etag}'):
            again = await server.get("/ui/style.css", headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == etag
        changed = await server.get("/ui/style.css", headers={"if-none-match": '"other"'})
        assert changed.status_code == 200
        assert len({asset.etag for asset in load_assets().values()}) == len(load_assets())

    check(test)


@pytest.mark.parametrize(
    "name", ["nothing.js", "chat.html", "..%2f..%2fdemo%2fconfig.json", "%2e%2e/%2e%2e/pyproject.toml", "style.css%00"]
)
def test_only_the_table_can_be_asked_for(name: str) -> None:
    async def test(server: Server) -> None:
        assert (await server.get(f"/ui/{name}")).status_code == 404

    check(test)


def test_pages_need_no_key_and_what_they_show_does() -> None:
    async def test(server: Server) -> None:
        assert (await server.get("/ui/dashboard")).status_code == 200
        assert (await server.get("/debug/state")).status_code == 401
        headers = {"authorization": "Bearer first"}
        response = await server.get("/debug/state", headers=headers)
        assert response.status_code == 200
        assert response.headers["cache-control"] == "no-store"

    check(test, keys=KEYS)


def test_the_switch_takes_them_away() -> None:
    async def test(server: Server) -> None:
        for path in ("/", "/ui", "/ui/dashboard", "/ui/style.css", "/debug/state"):
            assert (await server.get(path)).status_code == 404
        for path in ("/docs", "/docs/docs.js", "/docs/style.css", "/openapi.json"):
            assert (await server.get(path)).status_code == 200, "it is not for this page"

    check(test, disable_ui=True)


def test_the_page_of_the_api_has_a_switch_of_its_own() -> None:
    async def test(server: Server) -> None:
        for path in ("/docs", "/docs/docs.js", "/redoc", "/openapi.json"):
            assert (await server.get(path)).status_code == 404
        assert (await server.get("/ui")).status_code == 200

    check(test, disable_fastapi_docs=True)


def test_the_page_of_the_api_needs_no_key_and_the_document_does() -> None:
    async def test(server: Server) -> None:
        assert (await server.get("/docs")).status_code == 200
        assert (await server.get("/openapi.json")).status_code == 401
        response = await server.get("/openapi.json", headers={"authorization": "Bearer first"})
        assert "/pause" not in response.json()["paths"]
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            assert (await admin.get("/docs")).status_code == 200
            found = await admin.get("/openapi.json", headers={"authorization": "Bearer first"})
            assert {"/pause", "/health"} <= found.json()["paths"].keys()
            assert "/v1/completions" not in found.json()["paths"]

    check(test, keys=KEYS, enable_admin=True)


def test_the_admin_listener_has_a_dashboard_that_can_abort() -> None:
    async def test(server: Server) -> None:
        assert (await server.get("/debug/state")).json()["abort"] == "admin"
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            assert (await admin.get("/ui/dashboard")).status_code == 200
            assert (await admin.get("/debug/state")).json()["abort"] == "here"
            assert (await admin.get("/v1/models")).status_code == 404

    async def beside(server: Server) -> None:
        assert (await server.get("/debug/state")).json()["abort"] == "here"

    check(test, enable_admin=True)
    check(beside, enable_admin=True, port=8000, admin_port=8000)
    on_admin = {e.path for e in endpoints_of(ServerConfig(enable_admin=True), is_admin=True)}
    assert {"/metrics", "/debug/state", "/ui/dashboard"} <= on_admin
