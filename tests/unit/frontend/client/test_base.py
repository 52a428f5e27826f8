"""The control verbs of the clients: each is one call to the core, sync and async alike."""

from __future__ import annotations

import asyncio
import inspect
import os
from typing import Any, get_type_hints

import msgspec
import pytest

from quire.engine.utility import UTILITIES
from quire.errors import ValidationError
from quire.frontend.client.base import AsyncEngineCoreClient, EngineCoreClient
from quire.lora_request import LoRARequest
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequest
from quire.wire.snapshot import BlockMap, EngineSnapshot
from quire.wire.trace import PhaseTrace, TraceWindow
from tests.unit.frontend.fake_client import FakeClient

OWN = {"get_output", "add_request", "abort_requests", "call_utility", "shutdown"}
VERBS = [name for name, _ in inspect.getmembers(EngineCoreClient, inspect.isfunction) if name not in OWN]
READY = FakeClient().ready_response
LORA = LoRARequest("a", 1, "/a")
TRACE = TraceWindow(1.0, 2.0, [], [PhaseTrace("a", "queued", 1.0, 2.0)], 9)
SNAPSHOT = EngineSnapshot(1.0, 2.0, 0, 3, 4, 5, 6, BlockMap(8, 7, 0, 1))
CALLS: list[tuple[str, tuple[Any, ...], Any, Any, tuple[Any, ...]]] = [
    # verb, its arguments, what the core answers, what the caller gets, what the core is asked
    ("pause_scheduler", ("keep",), None, None, ("keep", True)),
    ("resume_scheduler", (), None, None, ()),
    ("is_scheduler_paused", (), True, True, ()),
    ("sleep", (2, "keep"), None, None, (2, "keep")),
    ("wake_up", (["weights"],), False, False, (["weights"],)),
    ("is_sleeping", (), True, True, ()),
    ("release_kv_cache_memory", (), None, None, ("abort",)),
    ("reset_prefix_cache", (True,), True, True, (True, False)),
    ("reset_mm_cache", (), None, None, ()),
    ("reset_encoder_cache", (), None, None, ()),
    ("update_weights", ("w",), "1", "1", (os.path.abspath("w"), None)),
    ("get_weight_version", (), "0", "0", ()),
    ("add_lora", (LORA,), True, True, (LORA,)),
    ("remove_lora", (1,), False, False, (1,)),
    ("list_loras", (), [3, 4], {3, 4}, ()),
    ("pin_lora", (1,), True, True, (1,)),
    ("get_supported_tasks", (), ["generate"], ("generate",), ()),
    ("collective_rpc", ("ping", 1.0, (2,)), ["pong"], ["pong"], ("ping", 1.0, (2,), {})),
    ("profile", (True, "p", 3), None, None, (True, "p", 3, None)),
    ("execute_dummy_batch", (), None, None, ()),
    ("get_snapshot", (), msgspec.to_builtins(SNAPSHOT), SNAPSHOT, ()),
    ("get_dropped_messages", (), {"corrupt": 2}, {"corrupt": 2}, ()),
    ("get_trace", (5.0,), [1.0, 2.0, [], [["a", "queued", 1.0, 2.0]], 9], TRACE, (5.0,)),
    ("get_trace", (5.0,), TRACE, TRACE, (5.0,)),
]


class AsyncFake(AsyncEngineCoreClient):
    """Records what is asked and answers with `result`."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.asked: list[Any] = []

    ready_response = READY
    is_ready = True
    engine_dead = False

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        return self.result

    async def get_output_async(self) -> EngineCoreOutputs:
        return EngineCoreOutputs()

    async def add_request_async(self, request: EngineCoreRequest) -> None: ...

    async def abort_requests_async(self, request_ids: list[str]) -> None: ...

    def shutdown(self) -> None: ...


def test_every_verb_is_tried_here() -> None:
    assert sorted(VERBS) == sorted({call[0] for call in CALLS})


@pytest.mark.parametrize(("verb", "args", "answer", "result", "asked"), CALLS, ids=[call[0] for call in CALLS])
def test_a_verb_is_one_call_to_the_core(
    verb: str, args: tuple[Any, ...], answer: Any, result: Any, asked: tuple[Any, ...]
) -> None:
    client = FakeClient()
    client.utility_results[verb] = answer
    assert getattr(client, verb)(*args) == result
    assert client.utilities == [(verb, *asked)]
    fake = AsyncFake(answer)
    assert asyncio.run(getattr(fake, f"{verb}_async")(*args)) == result
    assert fake.asked == [(verb, *asked)]


@pytest.mark.parametrize("verb", VERBS)
def test_sync_and_async_verbs_are_the_same(verb: str) -> None:
    method, coroutine = getattr(EngineCoreClient, verb), getattr(AsyncEngineCoreClient, f"{verb}_async")
    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.signature(method) == inspect.signature(coroutine)
    assert get_type_hints(method) == get_type_hints(coroutine)


def test_a_function_cannot_leave_the_process() -> None:
    with pytest.raises(ValidationError, match=r"<lambda>.*name a method of the worker class"):
        FakeClient().collective_rpc(lambda worker: 1)
    with pytest.raises(ValidationError, match="another process"):
        asyncio.run(AsyncFake().collective_rpc_async(len))


def test_verbs_of_clients_are_verbs_of_the_core() -> None:
    """But for what the link says by itself."""
    assert set(UTILITIES) == {*VERBS, "admit_clients"}
