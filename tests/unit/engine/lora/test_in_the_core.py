"""Adapters in an engine core: the core waits for them without running steps, in every kind of process."""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire.config.engine import EngineConfig, LifecycleConfig
from quire.config.lora import LoRAConfig
from quire.config.parallel import ParallelConfig
from quire.engine.intake import UtilityCall
from quire.engine.proc import EngineCoreProc
from quire.errors import AdapterError
from quire.frontend.client.inproc import AsyncInprocClient, InprocClient
from quire.lora_request import LoRARequest
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_hardware import fake_digest
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, EngineCoreRequestType, UtilityOutput
from quire.wire.lora import AdapterInfo

from ..harness import make_config, make_core_request

LORA = LoRARequest("a", 1, "/a")
NUM_TOKENS = 3
DEADLINE_S = 120.0


class Slow(FakeExecutor):
    """A load takes so long that a core which waited in steps would run many."""

    adapter_load_s = 0.2


def make_engine_config(**lora: Any) -> EngineConfig:
    return replace(
        make_config(),
        lora_config=LoRAConfig(**{"enable_lora": True, **lora}),
        parallel_config=ParallelConfig(distributed_executor_backend=f"{__name__}:Slow"),
        lifecycle_config=LifecycleConfig(shutdown_timeout=0.0),
    )


def request(request_id: str = "r", lora: LoRARequest | None = LORA) -> EngineCoreRequest:
    return msgspec.structs.replace(make_core_request(request_id, [1, 2, 3], max_tokens=NUM_TOKENS), lora_request=lora)


def right_tokens(lora: LoRARequest = LORA) -> list[int]:
    origin = request(lora=lora)
    assert origin.prompt_token_ids is not None
    assert origin.sampling_params is not None
    expected = expected_output(
        FakeModel(), origin.prompt_token_ids, origin.sampling_params, 200, lora, adapter=fake_digest(lora)
    )
    return expected.token_ids


def count_steps(core: Any) -> list[int]:
    """Counts the steps of a core from now on."""
    steps: list[int] = []
    schedule = core.scheduler.schedule

    def counted() -> Any:
        output = schedule()
        steps.append(output.total_num_scheduled_tokens)
        return output

    core.scheduler.schedule = counted
    return steps


def test_a_core_in_its_users_thread_waits_for_a_cold_adapter() -> None:
    client = InprocClient(make_engine_config(), log_stats=True)
    steps = count_steps(client.engine_core)
    client.add_request(request())
    outputs: list[EngineCoreOutput] = []
    waits: list[float] = []
    while not (outputs and outputs[-1].finished):
        batch = client.get_output()
        outputs += batch.outputs
        if batch.scheduler_stats is not None and batch.scheduler_stats.adapters is not None:
            waits += batch.scheduler_stats.adapters.wait_seconds
    assert [token for output in outputs for token in output.new_token_ids] == right_tokens()
    assert outputs[0].adapter == AdapterInfo(1, 1, fake_digest(LORA), 1000, 8)
    assert [output.adapter for output in outputs[1:]] == [None] * (NUM_TOKENS - 1)
    assert len(steps) <= NUM_TOKENS + 3, f"{len(steps)} steps: it must not spin"
    assert len(waits) == 1
    info = client.call_utility("add_lora", LoRARequest("b", 2, "/b"))
    assert info == AdapterInfo(2, 1, fake_digest(LoRARequest("b", 2, "/b")), 1000, 8)
    with pytest.raises(AdapterError, match="adapter_config"):
        client.call_utility("add_lora", LoRARequest("c", 3, "/missing"))
    assert client.call_utility("list_loras") == {1, 2}
    client.shutdown()


def test_a_core_on_a_thread_of_its_own_waits_for_a_cold_adapter() -> None:
    client = AsyncInprocClient(make_engine_config(), log_stats=False)

    async def run() -> list[int]:
        tokens: list[int] = []
        await client.add_request_async(request())
        while len(tokens) < NUM_TOKENS:
            for output in (await client.get_output_async()).outputs:
                tokens += output.new_token_ids
        info = await client.call_utility_async("add_lora", LoRARequest("b", 2, "/b"))
        assert info.revision == 1
        return tokens

    try:
        assert asyncio.run(asyncio.wait_for(run(), DEADLINE_S)) == right_tokens()
    finally:
        client.shutdown()


class Loop:
    """The loop of a core process, on a thread."""

    def __init__(self, **lora: Any) -> None:
        self.core = EngineCoreProc(make_engine_config(**lora), Slow, False)
        self.steps = count_steps(self.core)
        self.thread = threading.Thread(target=self.core.run_busy_loop, daemon=True)
        self.thread.start()

    def add(self, added: EngineCoreRequest) -> None:
        self.core.input_queue.put((EngineCoreRequestType.ADD, self.core.preprocess_add_request(added)))

    def receive(self) -> Any:
        try:
            item = self.core.output_queue.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise AssertionError("the loop sends nothing") from None
        assert isinstance(item, tuple)
        return item[1]

    def call(self, method: str, *args: Any) -> UtilityOutput:
        self.core.input_queue.put((EngineCoreRequestType.UTILITY, UtilityCall(0, 7, method, args)))
        answer = self.receive().utility_output
        assert isinstance(answer, UtilityOutput)
        return answer

    def end(self) -> None:
        self.core.request_shutdown()
        self.thread.join(DEADLINE_S)
        self.core.shutdown()
        assert not self.thread.is_alive()


def test_a_core_process_is_woken_when_an_adapter_is_loaded() -> None:
    loop = Loop()
    loop.add(request())
    tokens: list[int] = []
    while len(tokens) < NUM_TOKENS:
        for output in loop.receive().outputs:
            tokens += output.new_token_ids
    assert tokens == right_tokens()
    assert len(loop.steps) <= NUM_TOKENS + 3, f"{len(loop.steps)} steps: it must not poll"
    loop.end()


def test_others_are_served_meanwhile() -> None:
    loop = Loop()
    loop.add(request("cold"))
    loop.add(request("base", None))
    ended: list[str] = []
    while len(ended) < 2:
        ended += [output.request_id for output in loop.receive().outputs if output.finished]
    assert ended == ["base", "cold"]
    loop.end()


def test_a_verb_is_answered_when_the_adapter_is_loaded() -> None:
    loop = Loop()
    answer = loop.call("add_lora", ["a", 1, "/a"])
    assert answer.result == AdapterInfo(1, 1, fake_digest(LORA), 1000, 8)
    missing = loop.call("add_lora", ["b", 2, "/missing"])
    assert (missing.error_type, "adapter_config" in (missing.failure_message or "")) == ("AdapterError", True)
    assert loop.steps == []
    loop.end()


def test_a_shutdown_ends_requests_that_wait_for_an_adapter() -> None:
    loop = Loop()
    loop.add(request())
    loop.end()
    assert [output.finish_reason.name for output in loop.receive().outputs] == ["ABORT"]


def test_a_request_that_is_refused_leaves_no_reference() -> None:
    client = InprocClient(make_engine_config(), log_stats=False)
    core = client.engine_core
    long = msgspec.structs.replace(request("long"), prompt_token_ids=[1] * 300)
    empty = msgspec.structs.replace(request("empty"), prompt_token_ids=[])
    for refused in (long, empty):
        with pytest.raises(ValueError, match=r"long|no prompt tokens|tokens"):
            client.add_request(refused)
    assert [one.num_bound for one in core.adapters.registry.revisions.values()] == [0]
    client.shutdown()
