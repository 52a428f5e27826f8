"""One worker, called directly."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.parallel import ParallelConfig
from quire.engine.executor.uniproc import UniProcExecutor
from quire.wire.execution import EMPTY_MODEL_RUNNER_OUTPUT, SchedulerOutput
from quire.wire.kv_cache import KVCacheConfig

from ..harness import SPEC


class RecordingWorker:
    """Records its calls and answers with constants."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self.log: list[Any] = [("init", rank)]
        self.error: BaseException | None = None

    def init_device(self) -> None:
        self.log.append("init_device")

    def load_model(self) -> None:
        self.log.append("load_model")

    def get_kv_cache_spec(self) -> Any:
        return {"layer": SPEC}

    def determine_available_memory(self) -> int:
        self.log.append("determine_available_memory")
        return 123

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.log.append(("initialize_from_config", kv_cache_config))

    def compile_or_warm_up_model(self) -> None:
        self.log.append("compile_or_warm_up_model")

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.log.append(("execute_model", scheduler_output))
        if self.error is not None:
            raise self.error

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.log.append(("sample_tokens", grammar_output))
        if self.error is not None:
            raise self.error
        return EMPTY_MODEL_RUNNER_OUTPUT

    def execute_dummy_batch(self) -> None:
        self.log.append("execute_dummy_batch")

    def take_draft_token_ids(self) -> None:
        self.log.append("take_draft_token_ids")

    def get_supported_tasks(self) -> list[str]:
        return ["generate"]

    def add(self, a: int, b: int = 0) -> int:
        return a + b

    def check_health(self) -> None:
        self.log.append("check_health")

    def profile(self, *args: Any) -> None:
        self.log.append(("profile", *args))

    def shutdown(self) -> None:
        self.log.append("shutdown")


@pytest.fixture
def executor() -> UniProcExecutor:
    return UniProcExecutor(EngineConfig(parallel_config=ParallelConfig(worker_cls=f"{__name__}:RecordingWorker")))


def test_it_brings_its_worker_up_in_order(executor: UniProcExecutor) -> None:
    config = KVCacheConfig(5, [], [])
    assert executor.get_kv_cache_specs() == [{"layer": SPEC}]
    assert executor.determine_available_memory() == [123]
    executor.initialize_from_config([config])
    assert executor.worker.log == [
        ("init", 0),
        "init_device",
        "load_model",
        "determine_available_memory",
        ("initialize_from_config", config),
        "compile_or_warm_up_model",
    ]
    assert executor.max_concurrent_batches == 1


def test_a_step_runs_in_the_worker(executor: UniProcExecutor) -> None:
    output = SchedulerOutput()
    assert executor.execute_model(output) is None
    assert executor.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert executor.worker.log[-2:] == [("execute_model", output), ("sample_tokens", None)]


def test_non_blocking_calls_are_done_when_they_return(executor: UniProcExecutor) -> None:
    executed = executor.execute_model(SchedulerOutput(), non_block=True)
    assert isinstance(executed, Future)
    assert executed.result(timeout=0) is None
    sampled = executor.sample_tokens(None, non_block=True)
    assert isinstance(sampled, Future)
    assert sampled.result(timeout=0) is EMPTY_MODEL_RUNNER_OUTPUT


def test_errors_come_out_of_the_future(executor: UniProcExecutor) -> None:
    executor.worker.error = ValueError("broken")
    for future in (
        executor.execute_model(SchedulerOutput(), non_block=True),
        executor.sample_tokens(None, non_block=True),
    ):
        assert isinstance(future, Future)
        assert future.exception(timeout=0) is executor.worker.error
    with pytest.raises(ValueError, match="broken"):
        executor.execute_model(SchedulerOutput())
    with pytest.raises(ValueError, match="broken"):
        executor.sample_tokens(None)


def test_an_interrupt_is_no_error_of_the_worker(executor: UniProcExecutor) -> None:
    executor.worker.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        executor.execute_model(SchedulerOutput(), non_block=True)


def test_rpc_by_name_and_by_function(executor: UniProcExecutor) -> None:
    assert executor.collective_rpc("add", args=(2,), kwargs={"b": 3}) == [5]
    assert executor.collective_rpc(lambda worker, a: worker.add(a, 1), args=(2,)) == [3]
    with pytest.raises(AttributeError):
        executor.collective_rpc("no_such_method")


def test_the_rest_is_passed_on(executor: UniProcExecutor) -> None:
    executor.register_failure_callback(lambda: None)
    executor.execute_dummy_batch()
    assert executor.take_draft_token_ids() is None
    assert executor.get_supported_tasks() == ("generate",)
    executor.check_health()
    executor.profile(True, "p", 3, 4)
    executor.shutdown()
    assert executor.worker.log[2:] == [
        "execute_dummy_batch",
        "take_draft_token_ids",
        "check_health",
        ("profile", True, "p", 3, 4),
        "shutdown",
    ]
