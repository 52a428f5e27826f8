"""Probes, models, tokens, documents, metrics, admin: everything that generates nothing."""

from __future__ import annotations

import hashlib
import re
import threading
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from quire.config.server import ServerConfig
from quire.errors import EngineDeadError
from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, Exchange
from quire.frontend.new_request import NewRequest, ParsedPrompt
from quire.frontend.openai.app import ROUTERS, add_endpoint, build_app, endpoints_of
from quire.version import __version__

from .serving import Server, check, client_of

KEYS = [hashlib.sha256(key).digest() for key in (b"first", b"second")]
ALL = [endpoint for router in ROUTERS for endpoint in router]


def test_probes_answer_without_a_body() -> None:
    async def test(server: Server) -> None:
        for path in ("/health", "/health/live", "/health/ready", "/ping"):
            response = await server.get(path)
            assert (response.status_code, response.content) == (200, b"")
        assert (await server.client.post("/ping")).status_code == 200
        assert (await server.get("/version")).json() == {"version": __version__}
        assert (await server.get("/load")).json() == {"server_load": 0}
        assert (await server.get("/kv_event_sources")).json() == {}

        server.state.lifecycle.is_draining = True
        assert (await server.get("/health/ready")).status_code == 503
        assert (await server.get("/health")).status_code == 200
        server.state.lifecycle.refuses_requests = True
        refused = await server.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"

    check(test)


def test_a_dead_engine_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Server) -> None:
        monkeypatch.setattr(type(server.engine), "dead_error", EngineDeadError("gone"))
        assert (await server.get("/health")).status_code == 503
        assert (await server.get("/health/ready")).status_code == 503
        assert (await server.get("/health/live")).status_code == 200
        response = await server.post("/v1/completions", {"prompt": "x"})
        assert response.status_code == 500
        assert "retry-after" in response.headers
        monkeypatch.undo()

    check(test)


def test_the_list_of_models_describes_the_one_served() -> None:
    async def test(server: Server) -> None:
        (card,) = (await server.get("/v1/models")).json()["data"]
        assert list(card) == [
            "id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission",
        ]  # fmt: skip
        assert (card["id"], card["max_model_len"]) == ("demo", 512)
        assert (await server.get("/v1/models/demo")).json() == card
        assert (await server.get("/v1/models/other")).status_code == 404

    check(test)


def test_tokens_there_and_back() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer("/tokenize", prompt="Hello there", return_token_strs=True)
        assert list(answer) == ["count", "max_model_len", "tokens", "token_strs"]
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert (await server.answer("/detokenize", tokens=answer["tokens"]))["prompt"] == "Hello there"
        assert (await server.refusal("/detokenize", tokens=[10**6]))["param"] == "tokens"
        assert (await server.refusal("/tokenize"))["param"] == "prompt"
        assert (await server.get("/tokenizer_info")).status_code == 404

    async def with_info(server: Server) -> None:
        info = (await server.get("/tokenizer_info")).json()
        assert info["chat_template"]
        assert info["eos_token"]

    check(test)
    check(with_info, enable_tokenizer_info_endpoint=True)


def test_only_json_is_read() -> None:
    async def test(server: Server) -> None:
        headers = {"content-type": "text/plain"}
        response = await server.client.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers)
        assert response.status_code == 415
        form = {"content-type": "application/x-www-form-urlencoded"}  # of curl -d, and of a foreign page's form
        body = b'{"prompt":"x","max_tokens":1}'
        assert (await server.client.post("/v1/completions", content=body, headers=form)).status_code == 200
        for origin in ("http://evil.example", "null"):
            headers = form | {"origin": origin}
            assert (await server.client.post("/v1/completions", content=body, headers=headers)).status_code == 415
        headers = {"content-type": "application/json"}
        for content in (b'{"model":', b'{"prompt":"x","temperature":NaN}', b"\xff", b'{"prompt":"\\ud800"}'):
            response = await server.client.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "BadRequestError"
        response = await server.client.post("/v1/completions", content=b'{"prompt":"' + b"x" * 2000, headers=headers)
        assert response.status_code == 413

    check(test, max_request_bytes=1024)


def test_unknown_routes_and_methods_answer_in_openais_shape() -> None:
    async def test(server: Server) -> None:
        for method, path, status in (("POST", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
            response = await server.client.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["code"] == status
        assert response.headers["allow"] == "POST"
        assert response.json()["error"]["message"] == "/v1/completions does not take GET; it takes POST"

    check(test)


def test_a_path_that_is_elsewhere_says_where() -> None:
    async def test(server: Server) -> None:
        for path, advice in {
            "/sleep": "quire serve --enable-admin serves it",
            "/v1/nothing": "GET /openapi.json lists them all",
            "/v1/embeddings": "supports generate; --runner pooling loads it for that",
        }.items():
            response = await server.post(path, {})
            assert response.status_code == 404
            assert advice in response.json()["error"]["message"]

    check(test)


def test_request_ids_are_echoed_unless_they_are_dangerous() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": "x", "max_tokens": 1}
        response = await server.post("/v1/completions", body, headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert response.json()["id"] == "cmpl-mine-1"
        response = await server.post("/v1/completions", body, headers={"x-request-id": "a b"})
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
        assert (await server.answer("/v1/completions", **body, request_id="own"))["id"] == "cmpl-own"

    check(test)


def test_our_own_faults_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(new: NewRequest) -> None:
        assert new.reservation is not None
        new.reservation.release()  # as the real one does
        raise RuntimeError("/secret/path at 0xdeadbeef")

    async def test(server: Server) -> None:
        monkeypatch.setattr(server.engine, "add_new", broken)
        response = await server.post("/v1/completions", {"prompt": "x"})
        assert response.status_code == 500
        assert "secret" not in response.text
        assert "0x" not in response.text

    check(test)


# -- who may call what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ALL, ids=lambda endpoint: endpoint.path)
def test_without_a_key_only_probes_metrics_and_static_pages_answer(endpoint: Endpoint) -> None:
    if endpoint.access in (Access.OPEN, Access.METRICS):
        probes = ("/health", "/health/live", "/health/ready", "/health/engines", "/ping")
        pages = ("/", "/ui", "/ui/dashboard", "/ui/{name}", "/docs", "/docs/{name}", "/redoc")
        assert endpoint.path in (*probes, "/metrics", *pages)


def test_every_route_asks_for_the_key() -> None:
    flags = {"enable_admin": True, "admin_port": 8000, "port": 8000, "enable_tokenizer_info_endpoint": True}

    async def test(server: Server) -> None:
        endpoints = endpoints_of(server.state.config, is_admin=False)
        assert {(e.path, e.methods) for e in endpoints} == {(e.path, e.methods) for e in ALL}
        for endpoint in endpoints:
            path = endpoint.path.replace("{model:path}", "demo")
            for method in endpoint.methods:
                is_open = endpoint.access is Access.OPEN
                for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}):
                    response = await server.client.request(method, path, headers=headers)
                    assert (response.status_code == 401) is not is_open, path
        for key in ("first", "second"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert (await server.get("/v1/models", headers=headers)).status_code == 200

    check(test, keys=KEYS, protect_metrics=True, **flags)


def test_a_route_without_a_declared_access_does_not_register() -> None:
    async def handler(context: object) -> None: ...

    with pytest.raises(TypeError, match="access"):
        Endpoint(path="/x", handler=handler)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match="Access"):
        add_endpoint(Starlette(), Endpoint(path="/x", handler=handler, access=None))  # type: ignore[arg-type]


def test_admin_routes_have_an_app_of_their_own() -> None:
    async def test(server: Server) -> None:
        assert (await server.client.post("/pause")).status_code == 404
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            assert (await admin.get("/is_paused")).json() == {"is_paused": False}
            assert (await admin.post("/pause?mode=keep")).json() == {"status": "paused"}
            assert (await admin.get("/is_paused")).json() == {"is_paused": True}
            assert (await admin.post("/resume")).status_code == 200
            assert (await admin.post("/sleep?level=1")).status_code == 200
            assert (await admin.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await admin.post("/wake_up")).status_code == 200
            assert (await admin.post("/reset_prefix_cache")).json() == {"success": True}
            assert (await admin.post("/abort_requests", json={"request_ids": ["x"]})).status_code == 200
            for path, param in (("/pause?mode=x", "mode"), ("/sleep?level=9", "level"), ("/pause?clear_cache=x", None)):
                error = (await admin.post(path)).json()["error"]
                assert error["code"] == 400
                assert param is None or error["param"] == param
            assert (await admin.post("/v1/completions", json={"prompt": "x"})).status_code == 404

    check(test, enable_admin=True)


def test_the_admin_listener_is_not_for_pages_of_elsewhere() -> None:
    """Neither for one whose name was made to lead here, nor for one that sends without reading the answer."""

    async def test(server: Server) -> None:
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            for path in ("/is_paused", "/metrics", "/debug/state"):
                for host in ("localhost", "localhost:8001", "127.0.0.1:8001", "[::1]:8001", "LOCALHOST"):
                    own = {"host": host, "origin": f"http://{host}"}
                    for headers in ({"host": host}, own):
                        assert (await admin.get(path, headers=headers)).status_code == 200, (path, headers)
                for host in ("evil.example", "evil.example:8001", "10.0.0.7", "localhost.evil.example", "[::2]:8001"):
                    refusal = await admin.get(path, headers={"host": host})
                    assert refusal.status_code == 403, (path, host)
                    assert host in refusal.json()["error"]["message"]
                for origin in ("http://evil.example", "null", "http://localhost:8002", "http://10.0.0.7"):
                    refusal = await admin.get(path, headers={"host": "localhost:8001", "origin": origin})
                    assert refusal.status_code == 403, (path, origin)
            assert (await admin.post("/pause", headers={"origin": "http://evil.example"})).status_code == 403
            for path in ("/health", "/ping"):
                assert (await admin.get(path, headers={"host": "10.0.0.7"})).status_code == 200, "a probe"
        for path in ("/metrics", "/debug/state"):
            assert (await server.get(path, headers={"host": "quire.example"})).status_code == 200, "not the admin's"

    check(test, enable_admin=True)


def test_an_admin_listener_for_others_answers_to_addresses() -> None:
    async def test(server: Server) -> None:
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            for host, status in (("10.0.0.7:8001", 200), ("[fd00::7]:8001", 200), ("evil.example", 403)):
                for path in ("/is_paused", "/metrics"):
                    assert (await admin.get(path, headers={"host": host})).status_code == status, (path, host)

    check(test, enable_admin=True, admin_host="0.0.0.0")


def test_without_the_switch_there_are_no_admin_routes() -> None:
    config = ServerConfig(port=8000, admin_port=8000)
    assert not [e for e in endpoints_of(config, is_admin=False) if e.access is Access.ADMIN]
    assert not config.admin_is_apart


def test_cors_and_middleware() -> None:
    async def test(server: Server) -> None:
        response = await server.get("/version", headers={"origin": "http://a.example"})
        assert response.headers["access-control-allow-origin"] == "http://a.example"
        assert response.headers["x-seen"] == "yes"

    check(
        test, allowed_origins=("http://a.example",), middleware=("tests.unit.frontend.openai.middlewares.add_header",)
    )


def test_a_proxy_may_serve_it_under_a_path() -> None:
    """The proxy may strip the path or not."""

    async def test(server: Server) -> None:
        for path in ("/v1/models", "/models/v1/models"):
            assert (await server.get(path)).json()["data"][0]["id"] == "demo", path
        assert (await server.get("/elsewhere/v1/models")).status_code == 404

    check(test, root_path="/models")


def test_overload_is_refused_before_any_work() -> None:
    async def test(server: Server) -> None:
        held = server.engine.admission.reserve(1, 1)
        response: httpx2.Response = await server.post("/v1/completions", {"prompt": "x"})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        held.release()
        assert (await server.post("/v1/completions", {"prompt": "x"})).status_code == 200

    check(test, engine_flags={"max_num_queued_reqs": 1})


def test_caches_may_be_parted_by_key() -> None:
    prompt = list(range(40, 90))

    async def cached(server: Server, key: str, salt: str | None = None) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        response = await server.post("/v1/completions", body, headers=headers)
        assert response.status_code == 200
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def test(server: Server) -> None:
        assert [await cached(server, "first"), await cached(server, "second")] == [0, 0]
        assert await cached(server, "first") > 0
        assert await cached(server, "first", "") == 0
        assert await cached(server, "second", "") == 0
        assert await cached(server, "second", "") > 0

    check(test, keys=KEYS, isolate_cache_by_key=True, enable_prompt_tokens_details=True)


def test_long_prompts_are_tokenized_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    async def test(server: Server) -> None:
        processor, loop_thread = server.engine.pipeline.input_processor, threading.get_ident()
        read_prompt = processor.read_prompt

        def note(prompt: ParsedPrompt, *args: Any) -> object:
            if prompt.token_ids is None:
                threads.append(threading.get_ident() == loop_thread)
            return read_prompt(prompt, *args)

        monkeypatch.setattr(processor, "read_prompt", note)
        await server.post("/v1/completions", {"prompt": "x"})
        await server.post("/v1/completions", {"prompt": "x " * 10_000})
        await server.post("/v1/completions", {"prompt": ["some words " * 50] * 100})
        await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 10_000}]})
        monkeypatch.undo()
        assert threads == [True, False, *[False] * 100, False]

    check(test)


def test_a_body_of_too_many_values_is_refused_unread() -> None:
    async def test(server: Server) -> None:
        error = await server.refusal("/detokenize", 413, tokens=[1] * 300_000)
        assert "values" in error["message"]

    check(test)


def test_room_is_reserved_before_the_prompt_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is full while a prompt is in the tokenizer; afterwards all room is free again."""

    async def test(server: Server) -> None:
        admission, convert, seen = server.engine.admission, Exchange.convert, []

        async def meet(exchange: Exchange, work: Any) -> Any:
            if admission.num_reqs and not seen:
                seen.append((admission.num_reqs, admission.num_tokens))
                assert (await server.post("/v1/completions", {"prompt": "x"})).status_code == 503
            return await convert(exchange, work)

        monkeypatch.setattr(Exchange, "convert", meet)
        body = {"prompt": ["abcd" * 10, "x"], "n": 2, "temperature": 1, "max_tokens": 1}
        assert (await server.post("/v1/completions", body)).status_code == 200
        assert seen == [(4, 2 * 11 + 2 * 1)]
        assert admission.num_reqs == 0
        body["temperature"] = 0  # refused after the room was made
        body["prompt"] = [10**6]
        body["n"] = 1
        assert (await server.post("/v1/completions", body)).status_code == 400
        assert admission.num_reqs == 0

    check(test, engine_flags={"max_num_queued_reqs": 4})
