"""Workers in processes: calls, errors, deaths, the end. The workers have no model (tests/workers_apart.py)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.parallel import ParallelConfig
from quire.engine.executor.multiproc import MultiprocExecutor
from quire.engine.executor.worker_process import bind_cpus
from quire.errors import AdapterError, ConfigError, ModelLoadError, ServerError, ValidationError
from quire.lora_request import LoRARequest
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.heartbeat import WorkerEnd
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.lora import AdapterInfo, AdapterLoad
from quire.wire.worker_calls import WorkerReply
from tests.workers_apart import add_rank


def make(worker: str = "ApartWorker", **fields: Any) -> MultiprocExecutor:
    parallel = ParallelConfig(tensor_parallel_size=2, worker_cls=f"tests.workers_apart:{worker}", **fields)
    return MultiprocExecutor(EngineConfig(parallel_config=parallel))


@pytest.fixture(scope="module")
def shared() -> Iterator[MultiprocExecutor]:
    """An executor for tests that leave it whole."""
    executor = make()
    yield executor
    executor.shutdown()


def step(request: str = "") -> SchedulerOutput:
    return SchedulerOutput(num_scheduled_tokens={request: 1} if request else {}, total_num_scheduled_tokens=1)


def pids_of(executor: MultiprocExecutor) -> list[int]:
    return [worker.pid for worker in executor._workers_here.workers]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_calls_go_to_all_and_steps_are_answered_by_one(shared: MultiprocExecutor) -> None:
    assert shared.collective_rpc("get_pid") == pids_of(shared)
    assert [specs["layer"].num_kv_heads for specs in shared.get_kv_cache_specs()] == [1, 2]
    assert shared.determine_available_memory() == [1000, 1001]
    shared.initialize_from_config([KVCacheConfig(7, [], []), KVCacheConfig(8, [], [])])
    assert shared.collective_rpc("__getattribute__", args=("num_blocks",)) == [7, 8], "each gets its own config"
    assert shared.execute_model(step()) == ModelRunnerOutput(["r"], [[0]])
    assert shared.get_supported_tasks() == ("generate",)
    assert shared.take_draft_token_ids() is None
    assert (shared.worker_end, shared.take_barrier_wait()) == (WorkerEnd.NONE, 0.0)
    shared.check_health()


def test_steps_may_be_waited_for_later(shared: MultiprocExecutor) -> None:
    future = shared.execute_model(step("logits"), non_block=True)
    assert isinstance(future, Future)
    assert future.result() is None, "logits are held"
    sampled = shared.sample_tokens(None, non_block=True)
    assert isinstance(sampled, Future)
    assert sampled.result().sampled_token_ids == [[5]]


def test_a_call_of_all_is_woken_by_the_last_answer_that_is_missing(shared: MultiprocExecutor) -> None:
    call, rings = shared._send("check_health"), [worker.answers for worker in shared._workers]
    assert shared._rings_of(call) == rings[1:]
    call.answers[1] = WorkerReply(call.call_id), []
    assert shared._rings_of(call) == rings[:1]
    call.answers.clear()
    shared._wait(call)
    assert shared._rings_of(call._replace(ranks=[0])) == rings, "a step has errors of any"


def test_several_steps_may_be_on_their_way() -> None:
    """Each has its own answer, in whatever order they are asked for, with calls between them."""
    executor = make(pipeline_parallel_size=2)
    try:
        assert (executor.max_concurrent_batches, executor.needs_sampled_tokens) == (2, True)
        futures = [executor.execute_model(step("logits"), non_block=True) for _ in range(2)]
        sampled = executor.sample_tokens(None, non_block=True)
        assert executor.collective_rpc("get_pid") == pids_of(executor)
        assert isinstance(sampled, Future)
        assert sampled.done(), "its answer came before that of a later call"
        assert sampled.result().sampled_token_ids == [[7]], "the first worker of the last stage answers"
        assert [future.result() for future in futures if isinstance(future, Future)] == [None, None]
        failing = executor.execute_model(step("fail 1"), non_block=True)
        after = executor.sample_tokens(None, non_block=True)
        for future in (failing, after):
            assert isinstance(future, Future)
            with pytest.raises(ModelLoadError, match="rank 1 has a fault"):
                future.result()
    finally:
        executor.shutdown()


def test_every_step_on_its_way_has_the_error_of_the_worker_that_failed_also_if_another_answers_first() -> None:
    executor = make(pipeline_parallel_size=2)
    try:
        failing = pids_of(executor)[1]
        os.kill(failing, signal.SIGSTOP)
        futures = [executor.execute_model(step("fail 1"), non_block=True), executor.sample_tokens(None, non_block=True)]
        executor._abort()  # the other workers leave the step, and say so
        while not all(isinstance(future, Future) and future.done() for future in futures):
            executor._sleep()
        os.kill(failing, signal.SIGCONT)
        for future in futures:
            assert isinstance(future, Future)
            with pytest.raises(ModelLoadError, match="rank 1 has a fault"):
                future.result()
    finally:
        executor.shutdown()


def adapter(name: str, id_: int = 1) -> AdapterLoad:
    return AdapterLoad(LoRARequest(name, id_, "/nowhere"), 0)


def test_adapters_are_loaded_by_all_workers_beside_steps(shared: MultiprocExecutor) -> None:
    """The Futures are done without a call that waits, also those of calls from other threads."""
    found = list[Future[Any]]()
    asking = threading.Thread(target=lambda: found.append(shared.load_adapter(adapter("a"))))
    asking.start()
    measured = shared.measure_adapter(adapter("b", 2).lora_request)
    asking.join()
    assert measured.result(120) == 10 + 11, "all workers' memory"
    assert found[0].result(120) == AdapterInfo(1, 0, "same", 100 + 101, 4)
    assert shared.collective_rpc("get_loaded") == [[[1, 0]]] * 2
    shared.drop_adapter((1, 0))
    assert shared.collective_rpc("get_loaded") == [[], []], "dropped before the next call"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail 0", "^rank 0 cannot read it$"),
        ("fail 1", "^rank 1 cannot read it$"),
        ("other 1", "the files of adapter 1 were changed while 2 workers read them"),
    ],
)
def test_a_load_that_fails_on_one_worker_leaves_nothing_on_the_others(
    name: str, message: str, shared: MultiprocExecutor
) -> None:
    with pytest.raises(AdapterError, match=message):
        shared.load_adapter(adapter(name)).result(120)
    assert shared.collective_rpc("get_loaded") == [[], []]
    assert shared.execute_model(step()) == ModelRunnerOutput(["r"], [[0]]), "the engine goes on"


def test_loads_end_with_a_worker() -> None:
    executor, failed = make(), threading.Event()
    executor.register_failure_callback(failed.set)
    os.kill(pids_of(executor)[1], signal.SIGSTOP)
    future = executor.load_adapter(adapter("a"))
    os.kill(pids_of(executor)[1], signal.SIGKILL)
    with pytest.raises(ServerError, match="a worker of the engine has ended"):
        future.result(120)
    assert failed.wait(120)
    with pytest.raises(ServerError, match="a worker of the engine has ended"):
        executor.load_adapter(adapter("b")).result(120)
    executor.shutdown()


def test_functions_are_called_by_their_names(shared: MultiprocExecutor) -> None:
    assert shared.collective_rpc(add_rank, args=(10,)) == [10, 11]
    with pytest.raises(ValidationError, match="define it at the top of a module"):
        shared.collective_rpc(lambda worker: 1)


def test_an_error_of_a_call_leaves_the_workers_whole(shared: MultiprocExecutor) -> None:
    with pytest.raises(ModelLoadError, match=r"^/x does not fit$"):
        shared.collective_rpc("check_weights", args=("/x",))
    with pytest.raises(ServerError, match=r"AttributeError.*no_such_method"):
        shared.collective_rpc("no_such_method")
    assert shared.collective_rpc("get_pid") == pids_of(shared)


def test_the_error_of_any_worker_is_that_of_the_step() -> None:
    executor = make()
    with pytest.raises(ModelLoadError, match="rank 1 has a fault"):
        executor.execute_model(step("fail 1"))
    executor.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_in_a_step_ends_it(rank: int) -> None:
    executor, failed = make(), threading.Event()
    executor.register_failure_callback(failed.set)
    start = time.monotonic()
    with pytest.raises(ServerError, match=f"worker {rank} was killed by SIGKILL|another worker of the step has failed"):
        executor.execute_model(step(f"kill {rank}"))
    assert time.monotonic() - start < 50, "it does not wait for its time limit"
    assert failed.wait(120)
    with pytest.raises(ServerError, match=f"worker {rank} was killed by SIGKILL"):
        executor.check_health()
    assert executor.worker_end is WorkerEnd.KILLED
    pids = pids_of(executor)
    executor.shutdown()
    assert all(map(is_gone, pids))


def test_a_worker_that_dies_while_all_are_idle_is_noticed() -> None:
    executor, failed = make(), threading.Event()
    executor.register_failure_callback(failed.set)
    os.kill(pids_of(executor)[1], signal.SIGKILL)
    assert failed.wait(120)
    executor.shutdown()


def test_the_end_leaves_no_process_not_even_one_that_hangs() -> None:
    executor = make()
    pids = pids_of(executor)
    with pytest.raises(TimeoutError, match=r"call_method was not answered by all workers within 0.05 s"):
        executor.collective_rpc("hang", timeout=0.05)
    executor.shutdown()
    assert all(map(is_gone, pids))
    executor.shutdown()


def test_a_worker_that_cannot_be_made_is_an_error_with_its_end() -> None:
    with pytest.raises(ServerError, match=r"worker . exited with code 1; its last words are above"):
        make("NoSuchWorker")


def test_engines_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processor has two workers, of whatever engine; an engine that was added shares those of another."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def parts(engine: int, text: str = "auto") -> list[list[int]]:
        sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2, "cpu_bind": text}
        return bind_cpus(ParallelConfig(**sizes, engine_index=engine), Path("/nowhere"))  # type: ignore[arg-type]

    assert parts(0) + parts(1) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts(2) == parts(0)
    assert parts(0, "0|1|2|3") + parts(1, "0|1|2|3") == [[0], [1], [2], [3]]
    with pytest.raises(ConfigError, match="2 lists for 4 workers"):
        parts(0, "0|1")
    second = ParallelConfig(
        tensor_parallel_size=2,
        data_parallel_size=4,
        data_parallel_size_local=2,
        data_parallel_start_rank=2,
        engine_index=3,
    )
    assert bind_cpus(second, Path("/nowhere")) == [[4, 5], [6, 7]], "the second engine of the second machine"
    port = {"data_parallel_size": 2, "data_parallel_multi_port_external_lb": True, "port_index": 1, "engine_index": 1}
    assert bind_cpus(ParallelConfig(**port), Path("/nowhere")) == [[4, 5, 6, 7]], "a server of its own"  # type: ignore[arg-type]


def test_workers_share_the_processors() -> None:
    here = sorted(os.sched_getaffinity(0))

    def parts(text: str) -> list[list[int]]:
        return bind_cpus(ParallelConfig(tensor_parallel_size=2, cpu_bind=text))

    assert parts("none") == [[], []]
    if len(here) > 1:
        assert sorted(parts("auto")[0] + parts("auto")[1]) == here
        assert abs(len(parts("auto")[0]) - len(parts("auto")[1])) <= 1
    assert parts(f"{here[0]}|{here[-1]}") == [[here[0]], [here[-1]]]
    with pytest.raises(ConfigError, match="1 lists for 2 workers"):
        parts("0")
    with pytest.raises(ConfigError, match="is not a list of processors"):
        parts("a|b")
    with pytest.raises(ConfigError, match="may not use processor 100000"):
        parts("0|100000")
