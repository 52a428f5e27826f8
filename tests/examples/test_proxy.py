"""examples/disaggregated/proxy.py in front of engines that only note what they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp.web
import httpx2
import pytest
from examples.disaggregated.proxy import ASK, main, make_app

from tests.ports import free_ports

TRANSFER = {"do_remote_prefill": True, "remote_request_id": "lease"}
BODY = {"model": "m", "prompt": "p", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}


class Engine:
    """A server that answers everything, and keeps what it was sent."""

    def __init__(self, answer: dict[str, Any] | None, status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.bodies: list[Any] = []
        self.headers: list[Any] = []

    async def handle(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        text = await request.text()
        self.bodies.append(json.loads(text) if text[-1:] == "}" else text)
        self.headers.append(request.headers)
        if self.answer is not None:
            return aiohttp.web.json_response(self.answer, status=self.status)
        response = aiohttp.web.StreamResponse(headers={"content-type": "text/event-stream", "server": "secret"})
        await response.prepare(request)
        for part in (b"data: 1\n\n", b"data: [DONE]\n\n"):
            await response.write(part)
        return response


Test = Callable[[httpx2.AsyncClient, Engine, Engine], Awaitable[None]]


def check(test: Test, prefill: Engine, *, has_prefill: bool = True, has_decode: bool = True) -> None:
    async def run() -> None:
        decode = Engine(None)
        runners, urls = [], []
        for engine, is_up in ((prefill, has_prefill), (decode, has_decode)):
            app = aiohttp.web.Application()
            app.router.add_route("*", "/{path:.*}", engine.handle)
            runner = aiohttp.web.AppRunner(app)
            await runner.setup()
            site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            urls.append(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
            runners.append(runner)
            if not is_up:
                await runner.cleanup()
        proxy = make_app(*([f"http://127.0.0.1:{port}/"] for port in urls))
        transport = httpx2.ASGITransport(app=proxy)
        async with (
            proxy.router.lifespan_context(proxy),
            httpx2.AsyncClient(transport=transport, base_url="http://proxy") as client,
        ):
            await test(client, prefill, decode)
        for runner in runners:
            await runner.cleanup()

    asyncio.run(run())


def test_a_prompt_is_computed_by_one_engine_and_answered_by_the_other() -> None:
    async def test(client: httpx2.AsyncClient, prefill: Engine, decode: Engine) -> None:
        asked = BODY | {"kv_transfer_params": {"remote_host": "evil"}}
        answer = await client.post("/v1/completions", json=asked, headers={"authorization": "Bearer k", "cookie": "c"})
        assert answer.text == "data: 1\n\ndata: [DONE]\n\n"
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers.get("server") != "secret"
        assert prefill.bodies == [
            {"model": "m", "prompt": "p", "max_tokens": 1, "stream": False, "kv_transfer_params": ASK}
        ]
        assert decode.bodies == [BODY | {"kv_transfer_params": TRANSFER}]
        (p_headers,), (d_headers,) = prefill.headers, decode.headers
        assert p_headers["x-request-id"] == d_headers["x-request-id"]
        assert p_headers["authorization"] == d_headers["authorization"] == "Bearer k"
        assert "cookie" not in d_headers
        await client.get("/v1/models")
        await client.post("/v1/embeddings", json={"input": "x"})
        assert len(prefill.bodies) == 1
        assert len(decode.bodies) == 3

    check(test, Engine({"kv_transfer_params": TRANSFER}))


def test_a_prompt_that_is_not_computed_elsewhere_is_computed_where_it_is_answered() -> None:
    async def test(client: httpx2.AsyncClient, prefill: Engine, decode: Engine) -> None:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert decode.bodies == [BODY]

    for engine, is_up in ((Engine({"error": 1}, 500), True), (Engine({}), True), (Engine({}), False)):
        check(test, engine, has_prefill=is_up)


def test_what_fails() -> None:
    async def test(client: httpx2.AsyncClient, prefill: Engine, decode: Engine) -> None:
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 502
        assert "does not answer" in answer.json()["error"]["message"]

    check(test, Engine({"kv_transfer_params": TRANSFER}), has_decode=False)

    async def broken(client: httpx2.AsyncClient, prefill: Engine, decode: Engine) -> None:
        answer = await client.post("/v1/completions", content=b"{")
        assert answer.status_code == 200, "the engine says what is wrong"
        assert not prefill.bodies

    check(broken, Engine({"kv_transfer_params": TRANSFER}))


def test_an_engine_that_cannot_be_reached_is_passed_over() -> None:
    """Two of three that decode are gone: each request is answered by the third."""

    async def run() -> None:
        decode = Engine({"text": "t"})
        app = aiohttp.web.Application()
        app.router.add_route("*", "/{path:.*}", decode.handle)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        first = free_ports(2)
        gone = [f"http://127.0.0.1:{port}" for port in (first, first + 1)]
        proxy = make_app(gone[:1], [*gone, f"http://127.0.0.1:{port}"])
        transport = httpx2.ASGITransport(app=proxy)
        async with (
            proxy.router.lifespan_context(proxy),
            httpx2.AsyncClient(transport=transport, base_url="http://proxy") as client,
        ):
            for number in range(1, 5):
                answer = await client.post("/v1/completions", json=BODY)
                assert (answer.status_code, answer.json()) == (200, {"text": "t"})
                assert len(decode.bodies) == number
        await runner.cleanup()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill", "a:1", "--decode", "http://b"], "'a:1' is no URL of an engine; give one as http://"),
        (["--prefill", "http://a", "--decode", "http://b", "--port", "99999"], "--port 99999 is not one of 1 to 65535"),
    ],
)
def test_flags_that_cannot_be(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["proxy.py", *flags])
    with pytest.raises(SystemExit):
        main()
    assert words in capsys.readouterr().err
