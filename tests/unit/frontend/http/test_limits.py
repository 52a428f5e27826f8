"""Limits of the server as a whole (503) and of one key (429). Refusals come before any work."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from typing import Any

import httpx2
import pytest

from quire.config.server import ServerConfig, read_api_keys
from quire.errors import ConfigError, QuotaExceededError
from quire.frontend.admission import AdmissionControl
from quire.frontend.http.auth import Tenants
from quire.frontend.openai.rendering import PromptRenderer

from ..openai.serving import MAX_MODEL_LEN, Server, check
from ..shares import release, take_share

KEYS = [hashlib.sha256(key).digest() for key in (b"first", b"second")]
FOREVER = {"prompt": [50], "max_tokens": 100, "ignore_eos": True, "stream": True}


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_has_its_share_and_no_more() -> None:
    control, tenants = AdmissionControl(), Tenants(3, 100)
    place = take_share(tenants, b"a", 2, 50)
    with pytest.raises(QuotaExceededError, match=r"2 requests of this key .* --max-requests-per-key 3") as caught:
        take_share(tenants, b"a", 2, 1, control)
    assert caught.value.status_code == 429
    with pytest.raises(QuotaExceededError, match=r"50 tokens .* 51 more .* --max-tokens-per-key 100"):
        take_share(tenants, b"a", 1, 51, control)
    take_share(tenants, b"b", 9, 1000), "a request that is too large by itself is served when nothing is under way"
    release(place)
    take_share(tenants, b"a", 3, 100)
    assert control.rejections == {"max_requests_per_key": 1, "max_tokens_per_key": 1}


def test_without_limits_nothing_is_remembered() -> None:
    tenants = Tenants(None, None)
    for _ in range(3):
        take_share(tenants, b"a", 10**6, 10**9)
    assert not tenants._quotas


@pytest.mark.parametrize("name", ["max_requests_per_key", "max_tokens_per_key"])
def test_limits_per_key_need_keys(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .* give --api-key"):
        read_api_keys(ServerConfig(**{name: 5}))
    read_api_keys(ServerConfig(**{name: 5, "api_key": ("x",)}))


async def begun(server: Server, body: dict[str, Any], headers: dict[str, str]) -> asyncio.Task[httpx2.Response]:
    """A request that is under way."""
    before = server.engine.get_num_unfinished_requests()
    task = asyncio.create_task(server.post("/v1/completions", body, headers=headers))
    while server.engine.get_num_unfinished_requests() == before:
        await asyncio.sleep(0)
    return task


def test_one_keys_requests_do_not_shut_others_out() -> None:
    async def test(server: Server) -> None:
        await server.engine.pause_generation(mode="keep")
        running = await begun(server, {**FOREVER, "n": 2, "temperature": 1}, shown("first"))
        refused = await server.post("/v1/completions", FOREVER, headers=shown("first"))
        await server.engine.resume_generation()
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert refused.json()["error"]["param"] == "max_requests_per_key"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await server.post("/v1/completions", FOREVER, headers=shown("second"))).status_code == 200
        assert (await running).status_code == 200
        assert (await server.post("/v1/completions", FOREVER, headers=shown("first"))).status_code == 200
        for body, status in (({"prompt": "x", "max_tokens": 10**6}, 400), ({"prompt": [10**6]}, 400)):
            assert (await server.post("/v1/completions", body, headers=shown("first"))).status_code == status
        assert (await server.post("/v1/completions", FOREVER, headers=shown("first"))).status_code == 200
        assert server.engine.admission.rejections == {"max_requests_per_key": 1}

    check(test, executor="Steady", keys=KEYS, max_requests_per_key=2)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_outputs_are_reserved_as_long_as_they_may_be(route: str) -> None:
    """n x (prompt + max_tokens), on every route; without max_tokens the model's own limit."""
    conversation = {"messages": [{"role": "user", "content": [{"type": "text", "text": "abcd" * 10}]}]}
    prompt = {"prompt": "abcd" * 10} if route == "/v1/completions" else conversation
    name = {"model": "demo"} if route == "/v1/messages" else {}

    async def test(server: Server) -> None:
        seen: list[tuple[int, int]] = []
        admission, read_prompt = server.engine.admission, server.state.part(PromptRenderer).read_prompt

        def look(*args: Any, **options: Any) -> Any:
            seen.append((admission.num_tokens, admission.num_reserved_tokens))
            return read_prompt(*args, **options)

        server.state.part(PromptRenderer).read_prompt = look  # type: ignore[method-assign]
        await server.answer(route, **prompt, **name, max_tokens=30)
        if route != "/v1/messages":
            await server.answer(route, **prompt, n=2, max_tokens=30, temperature=1)
            assert seen.pop() == (2 * 11, 2 * 41)
        if route == "/v1/chat/completions":
            await server.answer(route, **prompt)
            limit = server.engine.model_config.sampling_defaults.get("max_tokens", MAX_MODEL_LEN - 11)
            assert seen.pop() == (11, 11 + limit)
        assert seen == [(11, 41)]
        assert admission.num_reserved_tokens == 0
        held = admission.reserve(1, 1, 999)
        refused = await server.refusal(route, 503, **prompt, **name, max_tokens=30) if not name else None
        assert refused is None or refused["param"] == "max_num_reserved_tokens"
        held.release()

    check(test, engine_flags={"max_num_reserved_tokens": 1000})


def test_a_response_in_the_background_holds_its_keys_share() -> None:
    async def test(server: Server) -> None:
        body = {"input": "x", "max_output_tokens": 100, "background": True}
        await server.engine.pause_generation(mode="keep")
        assert (await server.post("/v1/responses", body, headers=shown("first"))).status_code == 200
        assert (await server.post("/v1/responses", body, headers=shown("first"))).status_code == 429
        assert (await server.post("/v1/responses", body, headers=shown("second"))).status_code == 200
        await server.engine.resume_generation()
        await server.state.lifecycle.wait_idle()
        assert (await server.post("/v1/responses", body, headers=shown("first"))).status_code == 200
        await server.state.lifecycle.wait_idle()

    check(test, executor="Steady", keys=KEYS, max_requests_per_key=1)


def test_twenty_times_too_much() -> None:
    """Everyone is either answered in full or refused before any work; refusals are counted, and say when to come."""
    num_offered, num_seats = 480, 8

    async def test(server: Server) -> None:
        num_tokenized = 0
        read_prompt = server.state.part(PromptRenderer).read_prompt

        def count(*args: Any, **options: Any) -> Any:
            nonlocal num_tokenized
            num_tokenized += 1
            return read_prompt(*args, **options)

        server.state.part(PromptRenderer).read_prompt = count  # type: ignore[method-assign]
        body = {"prompt": [50], "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        expected = (await server.answer("/v1/completions", **body))["choices"]
        responses = await asyncio.gather(*(server.post("/v1/completions", body) for _ in range(num_offered)))
        outcomes = Counter(response.status_code for response in responses)
        assert outcomes.keys() == {200, 503}
        assert outcomes[200] >= num_seats
        assert num_tokenized == 1 + outcomes[200]
        assert server.engine.admission.rejections == {"max_num_queued_reqs": outcomes[503]}
        for response in responses:
            if response.status_code == 503:
                assert 1 <= int(response.headers["retry-after"]) <= 60
            else:
                assert response.json()["choices"] == expected

    check(test, executor="Steady", engine_flags={"max_num_seqs": num_seats, "max_num_queued_reqs": 2 * num_seats})
