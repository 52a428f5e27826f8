"""`InprocClient` against a core made of recorded calls: which ones, in which order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError, EngineDeadError, ValidationError
from quire.frontend.client import inproc
from quire.frontend.client.base import make_async_client, make_client
from quire.frontend.client.inproc import MAX_UNTAKEN_STEPS, AsyncInprocClient, InprocClient
from quire.sampling_params import SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason


class FakeCore:
    def __init__(self, config: Any, executor_class: type, log_stats: bool, *, wake: Callable[[], None]) -> None:
        self.calls: list[Any] = [("init", executor_class, log_stats)]
        self.ready_response = "ready"
        self.lifecycle = self.executor = self
        self.outputs: Any = {0: EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1])])}

    def step_fn(self) -> Any:
        self.calls.append("step")
        return self.outputs, True

    def is_blocked(self) -> bool:
        return False

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[str, int]:
        return f"core {request.request_id}", 3

    def reset_prefix_cache(self, *args: bool) -> bool:
        self.calls.append(("reset", *args))
        return True

    def collective_rpc(self, *args: Any) -> list[Any]:
        return [args]

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def client(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> InprocClient:
    monkeypatch.setattr(inproc, "ENGINE_CORE", f"{__name__}:FakeCore")
    config = EngineArgs(str(model_dir), distributed_executor_backend=f"{__name__}:FakeExecutor").create_engine_config()
    made = make_client(config, log_stats=True)
    assert isinstance(made, InprocClient)
    return made


def test_composition_by_name(client: InprocClient) -> None:
    assert client.engine_core.calls[0][0] == "init"
    assert client.engine_core.calls[0][1].__name__ == "FakeExecutor"
    assert client.engine_core.calls[0][2] is True
    assert client.ready_response == "ready"


def test_a_step_per_output(client: InprocClient) -> None:
    assert client.get_output().outputs == [EngineCoreOutput("a", [1])]
    assert client.engine_core.calls[1:] == ["step", ("post_step", True)]
    for nothing in (None, {}, {1: EngineCoreOutputs()}):
        client.engine_core.outputs = nothing
        assert client.get_output().outputs == []


def test_requests_and_control(client: InprocClient) -> None:
    client.add_request(EngineCoreRequest("a", [1], SamplingParams(), None, 0.0))
    client.abort_requests([])
    client.abort_requests(["a"])
    assert client.call_utility("reset_prefix_cache", True) is True
    assert client.call_utility("collective_rpc", "m", 1.0, (2,), {"k": 3}) == [("m", 1.0, (2,), {"k": 3})]
    assert client.call_utility("collective_rpc", len) == [(len,)]
    client.call_utility("profile", True, "/p")
    client.shutdown()
    assert client.engine_core.calls[1:] == [
        ("add_request", "core a", 3),
        ("abort_requests", ["a"]),
        ("reset", True),
        ("profile", True, "/p"),
        ("shutdown",),
    ]


def test_an_unknown_executor_is_named(model_dir: Path) -> None:
    config = EngineArgs(str(model_dir), distributed_executor_backend="nowhere:Nothing").create_engine_config()
    with pytest.raises(ConfigError, match="nowhere"):
        make_client(config, log_stats=False)


DEADLINE_S = 120.0


class Gate:
    """Where a step stands still until the test lets it go on."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)

    def pass_through(self) -> None:
        self.begun.release()
        assert self.may_go_on.acquire(timeout=DEADLINE_S)

    async def wait_for_step(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=DEADLINE_S)


class GatedExecutor(FakeExecutor):
    gate: ClassVar[Gate]
    num_steps: ClassVar[int]

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        GatedExecutor.num_steps += 1
        self.gate.pass_through()
        return super().execute_model(*args, **kwargs)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(GatedExecutor, "gate", made, raising=False)
    monkeypatch.setattr(GatedExecutor, "num_steps", 0, raising=False)
    return made


class FailingExecutor(FakeExecutor):
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("no more memory")


def make(model_dir: Path, executor: type = FakeExecutor) -> AsyncInprocClient:
    name = f"{executor.__module__}:{executor.__name__}"
    config = EngineArgs(str(model_dir), distributed_executor_backend=name).create_engine_config("serving")
    client = make_async_client(config, log_stats=False)
    assert isinstance(client, AsyncInprocClient)
    return client


def request(request_id: str, max_tokens: int = 4, prompt: tuple[int, ...] = (5, 6)) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True), None, 0.0
    )


async def collect(client: AsyncInprocClient, until: Callable[[list[EngineCoreOutput]], bool]) -> list[EngineCoreOutput]:
    seen: list[EngineCoreOutput] = []
    while not until(seen):
        seen += (await asyncio.wait_for(client.get_output_async(), DEADLINE_S)).outputs
    return seen


def is_finished(outputs: list[EngineCoreOutput]) -> bool:
    return bool(outputs) and outputs[-1].finished


def run(client: AsyncInprocClient, test: Callable[[], Any]) -> Any:
    try:
        return asyncio.run(test())
    finally:
        client.shutdown()
        assert not any(t.name == "quire-engine-core" for t in threading.enumerate())


def test_a_request_is_served_in_process(model_dir: Path) -> None:
    client = make(model_dir)

    async def test() -> list[EngineCoreOutput]:
        await client.add_request_async(request("a"))
        return await collect(client, is_finished)

    outputs = run(client, test)
    params = request("a").sampling_params
    assert params is not None
    assert [o.new_token_ids[0] for o in outputs] == expected_output(FakeModel(), [5, 6], params, 64).token_ids
    assert client.ready_response.supported_tasks == ("generate",)


def test_start_up_errors_come_out_of_the_constructor(model_dir: Path) -> None:
    config = EngineArgs(str(model_dir), distributed_executor_backend="nowhere:Nothing").create_engine_config()
    with pytest.raises(ConfigError, match="nowhere"):
        make_async_client(config, log_stats=False)


def test_a_refused_request_is_answered(model_dir: Path) -> None:
    client = make(model_dir)

    async def test() -> list[EngineCoreOutput]:
        await client.add_request_async(request("long", prompt=tuple(range(80))))
        return await collect(client, is_finished)

    (refusal,) = run(client, test)
    assert (refusal.request_id, refusal.finish_reason) == ("long", FinishReason.ERROR)
    assert refusal.error_message is not None
    assert "80" in refusal.error_message


def test_an_abort_during_a_step_takes_effect_with_that_step(model_dir: Path, gate: Gate) -> None:
    client = make(model_dir, GatedExecutor)

    async def test() -> list[EngineCoreOutput]:
        for name in ("a", "b"):
            await client.add_request_async(request(name, max_tokens=2))
        await gate.wait_for_step()
        await client.abort_requests_async(["a", "unknown"])
        for _ in range(8):
            gate.may_go_on.release()
        return await collect(client, is_finished)

    outputs = run(client, test)
    assert {o.request_id for o in outputs if o.new_token_ids} == {"b"}


def test_the_core_waits_for_a_loop_that_is_behind(model_dir: Path, gate: Gate) -> None:
    client = make(model_dir, GatedExecutor)

    async def test() -> int:
        for _ in range(100):
            gate.may_go_on.release()
        await client.add_request_async(request("a", max_tokens=30))
        await client.get_output_async()
        for _ in range(MAX_UNTAKEN_STEPS + 1):  # as many as there is room for, without taking one
            await gate.wait_for_step()
        await client.call_utility_async("is_scheduler_paused")  # the thread listens, and what it began is done
        num_steps = GatedExecutor.num_steps
        await collect(client, is_finished)
        return num_steps

    assert run(client, test) == 1 + MAX_UNTAKEN_STEPS


def test_control_calls_are_answered_in_process(model_dir: Path) -> None:
    client = make(model_dir)

    async def test() -> None:
        await client.call_utility_async("pause_scheduler", "keep")
        assert await client.call_utility_async("is_scheduler_paused") is True
        await client.add_request_async(request("a"))
        assert await client.call_utility_async("collective_rpc", lambda executor: type(executor).__name__) == [
            "FakeExecutor"
        ]
        await client.call_utility_async("resume_scheduler")
        await collect(client, is_finished)
        assert await client.call_utility_async("reset_prefix_cache") is True
        with pytest.raises(ValidationError, match="no control verb 'shut_down'"):
            await client.call_utility_async("shut_down")

    run(client, test)


@pytest.mark.parametrize("verb", ["pause_scheduler", "sleep"])
def test_a_pause_by_wait_lets_requests_end_first(model_dir: Path, gate: Gate, verb: str) -> None:
    client = make(model_dir, GatedExecutor)

    async def test() -> None:
        await client.add_request_async(request("a", max_tokens=2))
        await gate.wait_for_step()
        paused = asyncio.ensure_future(client.call_utility_async(verb, *([2] if verb == "sleep" else []), "wait"))
        await asyncio.sleep(0)
        gate.may_go_on.release()
        await gate.wait_for_step()
        assert not paused.done()
        gate.may_go_on.release()
        assert len(await collect(client, is_finished)) == 2
        gate.may_go_on.release(10)  # steps that send the worker the ids of finished requests
        await asyncio.wait_for(paused, DEADLINE_S)
        assert await client.call_utility_async("is_scheduler_paused") is True
        assert await client.call_utility_async("is_sleeping") is (verb == "sleep")
        await client.add_request_async(request("b", max_tokens=1))
        assert await client.call_utility_async("wake_up") is True
        assert (await collect(client, is_finished))[0].request_id == "b"

    run(client, test)


def test_a_step_that_fails_is_the_end(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = make(model_dir, FailingExecutor)
    assert client.is_ready

    async def test() -> None:
        await client.add_request_async(request("a"))
        with pytest.raises(EngineDeadError, match="OSError: no more memory") as caught:
            await asyncio.wait_for(client.get_output_async(), DEADLINE_S)
        assert isinstance(caught.value.__cause__, OSError)
        assert client.engine_dead
        assert not client.is_ready
        with pytest.raises(EngineDeadError, match="no more memory"):
            await client.add_request_async(request("b"))
        with pytest.raises(EngineDeadError, match="no more memory"):
            await client.call_utility_async("is_scheduler_paused")
        await client.abort_requests_async(["a"])

    run(client, test)


def test_a_shutdown_ends_what_is_running(model_dir: Path) -> None:
    client = make(model_dir)

    async def test() -> None:
        await client.add_request_async(request("a", max_tokens=50))
        await client.get_output_async()
        client.shutdown()
        client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(client, lambda outputs: False)

    run(client, test)


def test_shutdown_before_anything(model_dir: Path) -> None:
    make(model_dir).shutdown()
