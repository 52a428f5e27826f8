"""The router's books, its directory of prefixes, and what binds a request to an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.request import Request
from quire.frontend.routing import router as router_module
from quire.frontend.routing.policy import LeastWait, VllmScore
from quire.frontend.routing.router import Router, hash_prompt
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_engine import READY
from quire.wire.engine_core import EngineCoreRequest


def request(name: str, prompt: list[int], **fields: object) -> EngineCoreRequest:
    return EngineCoreRequest(name, prompt, SamplingParams(), None, 0.0, **fields)  # type: ignore[arg-type]


def make_router(num_engines: int = 2) -> Router:
    router = Router(LeastWait())
    for engine in range(num_engines):
        router.open_engine(engine, replace(READY, engine_index=engine))
    return router


PROMPT = list(range(100))


@pytest.mark.parametrize(
    "fields",
    [{}, {"cache_salt": "tenant"}, {"cache_salt": ""}, {"lora_request": LoRARequest("sql", 1, "/adapters/sql")}],
)
def test_hashes_are_those_of_the_engine(fields: dict[str, object]) -> None:
    asked = request("r", PROMPT, **fields)
    in_engine = Request(asked, make_block_hasher(16))
    assert hash_prompt(asked, 16) == in_engine.block_hashes
    assert len(in_engine.block_hashes) == 6


def test_equal_prompts_meet_again() -> None:
    router = make_router()
    first = router.place(request("a", PROMPT), [0, 1])
    router.note_token("a")
    router.remove("a")
    assert router.place(request("b", [*PROMPT, 5]), [0, 1]) == first
    assert router.decisions == {"wait": 1, "prefix": 1}
    assert router.num_expected_cached_tokens == 96


def test_a_cache_is_lost_with_its_engine() -> None:
    router = make_router()
    first = router.place(request("a", PROMPT), [0, 1])
    router.close_engine(first)
    router.open_engine(first, READY)
    router.place(request("b", PROMPT), [0, 1])
    assert router.num_expected_cached_tokens == 0


def test_the_books_balance() -> None:
    router = make_router()
    for name in "abc":
        router.put(request(name, PROMPT), 1, num_outputs=3)
    load = router._loads[1]
    assert (load.num_waiting, load.num_running, load.num_queued_tokens) == (3, 0, 309)
    router.note_token("a")
    router.note_token("a")
    assert (load.num_waiting, load.num_running, load.num_queued_tokens) == (2, 1, 206)
    for name in ("a", "b", "c", "c", "unknown"):
        router.remove(name)
    assert (load.num_waiting, load.num_running, load.num_queued_tokens) == (0, 0, 0)
    assert router.placed_at(1) == []


def test_a_request_that_names_its_engine_gets_it() -> None:
    router = make_router()
    assert router.place(request("a", PROMPT, data_parallel_rank=1), [0, 1]) == 1
    assert router.place(request("b", PROMPT, data_parallel_rank=1), [0]) == 0, "it is down"
    assert router.decisions["rank"] == 1


def test_a_session_stays_where_it_is() -> None:
    router = make_router()
    first = router.place(request("s", [1, 2], resumable=True), [0, 1])
    router.remove("s")
    for name in "abc":
        router.put(request(name, PROMPT), first)
    assert router.place(request("s", [1, 2, 3], resumable=True), [0, 1]) == first
    router.remove("s")
    assert router.place(request("s", [1, 2, 3, 4]), [0, 1]) == first
    assert router.decisions["session"] == 2
    assert not router._sessions


def test_sessions_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_SESSIONS", 2)
    router = make_router()
    for name in "abc":
        router.place(request(name, [1], resumable=True), [0, 1])
    assert list(router._sessions) == ["b", "c"]


def test_prompts_are_not_hashed_for_a_policy_that_reads_no_prefixes() -> None:
    router = Router(VllmScore())
    router.open_engine(0, READY)
    router.place(request("a", PROMPT), [0])
    router.place(request("b", PROMPT), [0])
    assert router.num_expected_cached_tokens == 0
