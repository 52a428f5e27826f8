"""Attempts of a stranger without a key: other spellings of a path, other names of the host, the log."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import socket
from collections import Counter
from typing import Any

import pytest
from starlette.routing import compile_path

from quire.frontend.http.auth import Access
from tests.unit.frontend.openai.serving import Server, check

KEY = "a-key-that-nobody-may-see"
KEYS = [hashlib.sha256(KEY.encode()).digest()]
OPEN = ("/health", "/health/live", "/health/ready", "/ping", "/metrics")
NUM_TRIES = 5_000
FRAGMENTS = [
    "/",
    "//",
    "/.",
    "/..",
    "/../",
    "%2f",
    "%2e",
    "%00",
    "\\",
    ";",
    ";x=/",
    "?",
    "#",
    "%20",
    "\u202e",
    "/health",
    "@",
    ":80",
]
HOSTS = [
    "localhost",
    "localhost/health?",
    "localhost:80/health#",
    "",
    "evil@localhost",
    "127.0.0.1",
    "[::1]",
    "a" * 5000,
    "x\ty",
]
HEADERS = [
    "x-original-url", "x-rewrite-url", "x-forwarded-host", "x-forwarded-prefix", "x-forwarded-for", "forwarded",
    "x-http-method-override", "x-original-path",
]  # fmt: skip


async def ask(app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]], query: bytes = b"") -> int:
    """The status of one request with exactly this path."""
    sent: list[Any] = []
    body = [{"type": "http.request", "body": b'{"prompt":"x","max_tokens":1}', "more_body": False}]
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode("utf-8", "surrogatepass"),
        "query_string": query, "root_path": "", "scheme": "http", "server": ("localhost", 80),
        "headers": [(b"content-type", b"application/json"), *headers],
    }  # fmt: skip

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


def test_no_spelling_of_a_path_or_a_host_gets_in_without_a_key() -> None:
    rng = random.Random(9)

    def mutated(path: str) -> str:
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(0, len(path))
            path = path[:at] + rng.choice(FRAGMENTS) + path[at:]
        return path.upper() if rng.random() < 0.05 else path

    async def test(server: Server) -> None:
        endpoints = server.app.state.endpoints
        is_open = [e for e in endpoints if e.access in (Access.OPEN, Access.METRICS)]
        open_paths = [compile_path(endpoint.path)[0] for endpoint in is_open]
        paths = [endpoint.path for endpoint in endpoints if endpoint not in is_open]
        outcomes: Counter[int] = Counter()
        for _ in range(NUM_TRIES):
            path, method = mutated(rng.choice(paths)), rng.choice(("GET", "POST", "HEAD", "PUT", "DELETE"))
            headers = [(b"host", rng.choice(HOSTS).encode())]
            headers += [(name.encode(), rng.choice(OPEN).encode()) for name in rng.sample(HEADERS, 2)]
            status = await ask(server.app, method, path, headers, rng.choice((b"", b"api_key=x", b"key=%00")))
            outcomes[status] += 1
            needs_no_key = any(pattern.match(path) for pattern in open_paths)
            assert needs_no_key or status in (307, 401, 403, 404, 405), (method, path, headers, status)
        assert outcomes[401] > NUM_TRIES / 20
        assert outcomes[404] > NUM_TRIES / 20

    check(test, keys=KEYS, enable_admin=True, admin_port=8000, port=8000)


def test_keys_and_texts_are_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Not by the log at its most talkative, not by an answer that has not asked for them."""
    secret = "words-of-a-prompt"

    async def test(server: Server) -> None:
        caplog.set_level(logging.DEBUG, "quire")
        for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"Basic {KEY}"}, {"x-api-key": KEY}, {}):
            for path, body in (
                ("/v1/completions", {"prompt": secret, "max_tokens": 1}),
                ("/v1/completions?token=" + KEY, {"prompt": secret, "max_tokens": -1}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}], "max_tokens": 1}),
                ("/v1/chat/completions", {"messages": [{"role": secret * 1000}], "tools": 5}),
                ("/nowhere", {"prompt": secret}),
            ):
                response = await server.post(path, body, headers=headers)
                assert KEY not in response.text
                assert secret not in response.text
        for path in ("/server_info", "/metrics", "/version", "/v1/models", "/openapi.json"):
            assert KEY not in (await server.get(path, headers={"authorization": f"Bearer {KEY}"})).text
        assert KEY not in repr(vars(server.state.gatekeeper))
        assert KEY not in repr(server.state.config)

    check(test, keys=KEYS)
    log = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith(("quire", "uvicorn")))
    assert len(log.splitlines()) >= 20, "each request but that of the metrics leaves a line"
    assert KEY not in log
    assert secret not in log


def test_nothing_is_fetched_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """No URL in a body is opened, whatever field it stands in: this version fetches nothing."""
    calls: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        raise OSError("no network in this test")

    url = "http://169.254.169.254/latest/meta-data"
    parts = [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "input_audio", "input_audio": {"data": url}},
        {"type": "video_url", "video_url": {"url": url}}, {"type": "file", "file": {"file_id": url}},
        {"type": "input_image", "image_url": url}, {"type": "image", "source": {"type": "url", "url": url}},
    ]  # fmt: skip

    async def test(server: Server) -> None:
        monkeypatch.setattr(socket.socket, "connect", note)
        monkeypatch.setattr(socket, "getaddrinfo", note)
        for part in parts:
            conversation = [{"role": "user", "content": [part]}]
            for path, body in (
                ("/v1/chat/completions", {"messages": conversation}),
                ("/v1/messages", {"messages": conversation, "model": "demo", "max_tokens": 1}),
                ("/v1/responses", {"input": [{"type": "message", **conversation[0]}]}),
                ("/tokenize", {"messages": conversation}),
            ):
                response = await server.post(path, body)
                assert response.status_code == 400, (path, part, response.text)
        await server.answer("/v1/completions", prompt=url, max_tokens=1, user=url)
        monkeypatch.undo()
        assert not calls

    check(test)
