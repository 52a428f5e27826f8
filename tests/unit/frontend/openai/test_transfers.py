"""`kv_transfer_params` in requests and answers. The store is fake: it leases the blocks of every request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.config.kv_transfer import KVTransferConfig
from quire.testing.fake_tier import FakeTier, FakeTierWorker

from .serving import Server, check

MESSAGES = [{"role": "user", "content": "Hello there, this is long enough for a block of the cache."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": list(range(40, 80)), "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": MESSAGES[0]["content"], "max_output_tokens": 16},
    "/v1/messages": {"model": "demo", "messages": MESSAGES, "max_tokens": 1},
}


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers have a connector."""
    tier = FakeTier("http")
    tier.lease_interval = 1
    config = KVTransferConfig(kv_connector="FakeTier", kv_connector_extra_config={"tier": "http"})
    monkeypatch.setattr(KVTransferConfig, "settle", lambda self: config)
    monkeypatch.setattr(FakeTierWorker, "is_prompt", True)
    yield
    del FakeTier.by_name["http"]


@pytest.mark.usefixtures("connected")
def test_answers_say_where_blocks_are() -> None:
    async def test(server: Server) -> None:
        for path, body in BODIES.items():
            answer = await server.answer(path, **body, kv_transfer_params={"do_remote_decode": True})
            if path != "/v1/messages":  # its answers have no such field
                assert answer["kv_transfer_params"]["num_tokens"] >= 16, path

    check(test)


def test_without_a_connector_they_are_served_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        for path, body in BODIES.items():
            answer = await server.answer(path, **body, kv_transfer_params={"do_remote_decode": True})
            assert answer.get("kv_transfer_params") is None

    check(test)
    assert caplog.text.count("has kv_transfer_params and there is no connector") == len(BODIES)


def test_what_cannot_be_meant_is_refused() -> None:
    async def test(server: Server) -> None:
        for path, body in BODIES.items():
            response = await server.post(path, {**body, "kv_transfer_params": {"remote_host": 3}})
            assert response.status_code == 400, path
            assert "kv_transfer_params" in response.text

    check(test)


def test_the_seed_of_the_engine_that_prefilled_goes_on() -> None:
    body = BODIES["/v1/completions"] | {
        "temperature": 1,
        "max_tokens": 20,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    async def test(server: Server) -> None:
        async def token_ids(**more: Any) -> list[int]:
            answer = await server.answer("/v1/completions", **body, **more)
            ids: list[int] = answer["choices"][0]["token_ids"]
            return ids

        seeded = await token_ids(seed=7)
        assert await token_ids(kv_transfer_params={"do_remote_prefill": True, "seed": 7}) == seeded
        assert await token_ids(kv_transfer_params={"do_remote_prefill": True, "seed": 9}, seed=7) == seeded

    check(test)
