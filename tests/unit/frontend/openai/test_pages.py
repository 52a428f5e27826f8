"""The pages as they are sent: headers, caching, who may load them, and the switch that turns them off."""

from __future__ import annotations

import hashlib

import pytest

from quire.config.server import ServerConfig
from quire.frontend.openai.app import build_app, endpoints_of
from quire.frontend.openai.routes.pages import DIRECTORY, load_assets

from .serving import Server, check, client_of

KEYS = [hashlib.sha256(b"first").digest()]
PARTS = sorted(path.name for path in DIRECTORY.iterdir() if path.suffix != ".html")


def test_every_file_is_sent_as_it_is() -> None:
    async def test(server: Server) -> None:
        pages = {"/ui": "chat.html", "/ui/dashboard": "dashboard.html", **{f"/ui/{name}": name for name in PARTS}}
        for path, name in pages.items():
            response = await server.get(path)
            assert response.status_code == 200, path
            assert response.content == (DIRECTORY / name).read_bytes()
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


@pytest.mark.parametrize(("root_path", "where"), [(None, "/ui"), ("/models", "/models/ui")])
def test_the_address_alone_leads_to_the_first_page(root_path: str | None, where: str) -> None:
    async def test(server: Server) -> None:
        response = await server.get("/")
        assert (response.status_code, response.headers["location"]) == (307, where)

    check(test, root_path=root_path)


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

    check(test, disable_ui=True)


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
