"""Several workers of one engine in the process of a test, a thread each: an executor to be named by
`distributed_executor_backend`. Calls and answers pass the encoding that workers in processes get them in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.wire import worker_calls
from quire.wire.execution import DraftTokenIds, GrammarOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.wire.serial import MsgpackEncoder
from quire.wire.shared_memory import set_abort_word
from quire.wire.topology import Topology
from quire.wire.worker_calls import WORKER_VERBS, WorkerCall, decode_call, encode_call
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native import NativeKernels
from quire.worker.worker import Worker

from .unit.worker.parallel.together import close_links, make_links

THREADS = "tests.worker_threads:ThreadExecutor"


@contextmanager
def contexts_of_their_own() -> Iterator[None]:
    """Gives each worker kernels with one thread, while the block runs."""
    library = native_library()
    if library is None:
        pytest.skip("the native library was not built")
    with pytest.MonkeyPatch.context() as patch:
        name = library.instruction_sets()[0]
        patch.setattr("quire.worker.worker.choose_kernels", lambda *_: NativeKernels(Context(library, 1, name)))
        yield


def _make_decoders() -> None:
    """Makes the decoders of all calls. A collection of garbage in one thread, while another makes a decoder, has ended
    the process: msgspec's descriptions of types are incomplete then. Workers in processes have one thread."""
    for name, verb in WORKER_VERBS.items():
        worker_calls._decoder((name, False), tuple.__class_getitem__(verb.arguments))


class ThreadExecutor(Executor):
    """Owns the workers, and a thread and a queue of calls for each."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        parallel = config.parallel_config
        self._topology = Topology(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
        self._links = make_links(self._topology)
        self._encoder = MsgpackEncoder()
        self._queues = [SimpleQueue[Callable[[], None] | None]() for _ in self._links]
        self.workers = [Worker(config, rank, links) for rank, links in enumerate(self._links)]
        self._threads = [threading.Thread(target=self._serve, args=(queue,), daemon=True) for queue in self._queues]
        _make_decoders()
        for thread in self._threads:
            thread.start()
        self._call("init_device")

    @staticmethod
    def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := queue.get()) is not None:
            work()

    def _send(self, verb: str, *arguments: Any) -> list[Future[Any]]:
        """Makes all workers run a call. Returns the Future of each."""
        frames = [bytes(f) for f in encode_call(WorkerCall(1, verb), arguments, self._encoder)]
        futures: list[Future[Any]] = [Future() for _ in self.workers]
        for worker, queue, future in zip(self.workers, self._queues, futures, strict=True):
            queue.put(lambda worker=worker, future=future: self._run(worker, verb, frames, future))
        return futures

    def _run(self, worker: Worker, verb: str, frames: list[bytes], future: Future[Any]) -> None:
        _, arguments = decode_call(frames)
        try:
            if verb == "call_method":
                name, args, kwargs = arguments
                future.set_result(getattr(worker, name)(*args, **kwargs))
            elif verb == "initialize_from_config":
                future.set_result(worker.initialize_from_config(arguments[0][worker.rank]))
            else:
                future.set_result(getattr(worker, verb)(*arguments))
        except BaseException as e:
            if WORKER_VERBS[verb].is_step and worker._links is not None:
                set_abort_word(worker._links.shared_file)
            future.set_exception(e)

    def _call(self, verb: str, *arguments: Any) -> list[Any]:
        return [future.result(60) for future in self._send(verb, *arguments)]

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Does nothing: threads do not die."""

    @property
    def max_concurrent_batches(self) -> int:
        return 1 if self.config.speculative_config.drafting is not None else self._topology.pp

    @property
    def needs_sampled_tokens(self) -> bool:
        return self._topology.pp > 1

    def get_kv_cache_specs(self) -> list[dict[str, AnyKVCacheSpec]]:
        return self._call("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        return self._call("determine_available_memory")

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self._call("initialize_from_config", kv_cache_configs)
        self._call("compile_or_warm_up_model")

    def _step(self, verb: str, non_block: bool, *arguments: Any) -> Any:
        future = self._send(verb, *arguments)[self._topology.output_rank]
        return future if non_block else future.result(60)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        return self._step("execute_model", non_block, scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        return self._step("sample_tokens", non_block, grammar_output)

    def execute_dummy_batch(self) -> None:
        self._call("execute_dummy_batch")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        found: DraftTokenIds | None = self._call("take_draft_token_ids")[self._topology.output_rank]
        return found

    def get_supported_tasks(self) -> tuple[str, ...]:
        return tuple(self._call("get_supported_tasks")[0])

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        assert isinstance(method, str)
        return self._call("call_method", method, list(args), kwargs or {})

    def check_health(self) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        if not self._threads:
            return
        self._call("shutdown")
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            thread.join(60)
        self._threads = []
        for links in self._links:
            close_links(links)
        shared = next((links.shared_file for links in self._links if links is not None), None)
        if shared is not None:
            os.close(shared)
