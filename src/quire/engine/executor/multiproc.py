"""An executor whose workers are processes that compute each step together.

Calls go down one ring, which all workers read; each worker answers by a ring of its own. The end of a worker is noticed
by its process descriptor. Then the abort word makes the others leave their barriers, and the core ends, as it does
after any error in a step; its supervisor starts it again, with new workers.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NoReturn, cast

from quire.config.engine import EngineConfig
from quire.config.server import encode_config
from quire.engine.executor.abstract import Executor
from quire.engine.executor.worker_process import WorkerProcess, bind_cpus
from quire.errors import ServerError, ValidationError, make_error
from quire.logger import init_logger
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.wire.ring import RingWriter, make_ring_file
from quire.wire.serial import MsgpackEncoder
from quire.wire.shared_memory import WORKERS_FILE_BYTES, make_shared_file, set_abort_word
from quire.wire.topology import Topology
from quire.wire.worker_calls import WORKER_VERBS, WorkerCall, WorkerReply, decode_reply, decode_result, encode_call

logger = init_logger(__name__)

CAUSE_S = 1.0
"""Seconds to wait for the error behind an error that only says that another worker has failed."""


class MultiprocExecutor(Executor):
    """Owns the workers of one engine, each in a process. A non-blocking call returns a Future whose `result` waits."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        parallel = config.parallel_config
        self._topology = Topology(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
        self._encoder = MsgpackEncoder()
        self._call_id = 0
        self._on_failure: Callable[[], None] = lambda: None
        self._is_ending = False
        self._shared_file, calls = make_shared_file(WORKERS_FILE_BYTES), make_ring_file(self._topology.world_size)
        self._workers: list[WorkerProcess] = []
        try:
            data = encode_config(config)
            for rank, cpus in enumerate(bind_cpus(parallel)):
                self._workers.append(WorkerProcess(rank, data, self._shared_file, calls, cpus))
            self._calls = RingWriter(calls, [worker.waker for worker in self._workers])
            self._monitor = threading.Thread(target=self._watch, name="WorkerMonitor", daemon=True)
            self._monitor.start()
            self._call_all("init_device")
        except BaseException:
            self.shutdown()
            raise
        finally:
            os.close(calls)

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        self._on_failure = callback

    # -- calls --------------------------------------------------------------------------------------------------------

    def _send(self, verb: str, *arguments: Any) -> int:
        self._call_id += 1
        self._calls.send(encode_call(WorkerCall(self._call_id, verb), arguments, self._encoder), self._check_alive)
        return self._call_id

    def _call_all(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Returns the results of all workers; of a step only the output rank's."""
        ranks = [self._topology.output_rank] if WORKER_VERBS[verb].is_step else range(len(self._workers))
        return self._wait(self._send(verb, *arguments), verb, ranks, timeout_s)

    def _wait(self, call_id: int, verb: str, ranks: Collection[int], timeout_s: float | None = None) -> list[Any]:
        """Returns the answers of `ranks`. Raises the error of any worker, ServerError if one has ended, and
        TimeoutError."""
        results, errors = dict[int, Any](), dict[int, WorkerReply]()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(results) + len(errors) < len(ranks):
            for worker in self._workers:
                while worker.answers.is_ready():
                    frames = worker.answers.take()
                    reply = decode_reply(frames)
                    if reply.is_fatal:
                        self._raise(reply, worker.rank)
                    if reply.call_id != call_id or worker.rank not in ranks:
                        continue  # of a call that has been given up
                    if reply.error is None:
                        results[worker.rank] = decode_result(frames, verb)
                    else:
                        errors[worker.rank] = reply
            if len(results) + len(errors) < len(ranks):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{verb} was not answered by all workers within {timeout_s:g} s")
                self._sleep(deadline)
        for rank, reply in errors.items():
            self._raise(reply, rank)
        return [results[rank] for rank in ranks]

    def _sleep(self, deadline: float | None = None) -> None:
        """Returns once an answer may have come. Raises ServerError if a worker has ended."""
        sleeping = [worker for worker in self._workers if worker.answers.begin_sleep()]
        try:
            if len(sleeping) == len(self._workers):
                self._check_alive()
                left = 1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))
                fds = [worker.waker.fileno() for worker in sleeping]
                select.select([*fds, *(w.pidfd for w in sleeping if w.pidfd is not None)], [], [], left)
        finally:
            for worker in sleeping:
                worker.answers.end_sleep()

    def _raise(self, reply: WorkerReply, rank: int) -> NoReturn:
        """Raises a worker's error; behind an echo, the error of the worker that has failed."""
        deadline = time.monotonic() + CAUSE_S
        while reply.is_echo and time.monotonic() < deadline:
            self._sleep(deadline)
            for worker in self._workers:
                while reply.is_echo and worker.answers.is_ready():
                    found = decode_reply(worker.answers.take())
                    if found.is_fatal and not found.is_echo:
                        reply, rank = found, worker.rank
        message = reply.error if reply.error_type else f"worker {rank}: {reply.error}"
        raise make_error(reply.error_type, str(message), ServerError)

    # -- deaths -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        """Raises ServerError if a worker has ended."""
        for worker in self._workers:
            if (end := worker.describe_end()) is not None:
                self._abort()
                raise ServerError(f"worker {worker.rank} {end}; its last words are above, on standard error")

    def _abort(self) -> None:
        """Makes all workers leave their barriers."""
        set_abort_word(self._shared_file)

    def _watch(self) -> None:
        """Waits for the end of any worker. The body of the monitor's thread."""
        fds = [worker.pidfd for worker in self._workers if worker.pidfd is not None]
        while not self._is_ending:
            if fds:
                ended = bool(select.select(fds, [], [], 1.0)[0])
            else:  # a system without process descriptors
                time.sleep(0.1)
                ended = any(worker.describe_end() is not None for worker in self._workers)
            if ended and not self._is_ending:
                self._abort()
                self._on_failure()
                return

    # -- the interface ------------------------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, AnyKVCacheSpec]]:
        return self._call_all("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        self._call_all("load_model")
        return self._call_all("determine_available_memory")

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self._call_all("initialize_from_config", kv_cache_configs)
        self._call_all("compile_or_warm_up_model")

    def _step(self, verb: str, non_block: bool, *arguments: Any) -> Any:
        ranks = [self._topology.output_rank]
        if not non_block:
            return self._wait(self._send(verb, *arguments), verb, ranks)[0]
        try:
            call_id = self._send(verb, *arguments)
        except Exception as e:
            failed: Future[Any] = Future()
            failed.set_exception(e)
            return failed
        return _Answer(lambda: self._wait(call_id, verb, ranks)[0])

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        return cast("ModelRunnerOutput | None", self._step("execute_model", non_block, scheduler_output))

    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        return cast("ModelRunnerOutput", self._step("sample_tokens", non_block, grammar_output))

    def execute_dummy_batch(self) -> None:
        self._call_all("execute_dummy_batch")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return cast("DraftTokenIds | None", self._call_all("take_draft_token_ids")[self._topology.output_rank])

    def get_supported_tasks(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self._call_all("get_supported_tasks")[0])

    def get_numerics_id(self) -> str:
        return cast("str", self._call_all("get_numerics_id")[0])

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Raises ValidationError for a function without a name that a worker could import."""
        if isinstance(method, str):
            if method in WORKER_VERBS and not kwargs and not WORKER_VERBS[method].is_step:
                return self._call_all(method, *args, timeout_s=timeout)
            return self._call_all("call_method", method, list(args), kwargs or {}, timeout_s=timeout)
        name = f"{method.__module__}:{method.__qualname__}"
        if "<" in name or method.__module__ == "__main__":
            raise ValidationError(
                f"collective_rpc({method.__qualname__}): workers are processes and get a function by its name; define "
                "it at the top of a module that they can import, or name a method of the worker",
                param="method",
            )
        return self._call_all("call_function", name, list(args), kwargs or {}, timeout_s=timeout)

    def check_health(self) -> None:
        self._check_alive()

    def shutdown(self) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        try:
            if self._workers and all(worker.describe_end() is None for worker in self._workers):
                self._abort()  # a worker that waits for another one must not outlast it
                self._send("shutdown")
        except Exception as e:
            logger.debug("workers are ended without a word: %s", e)
        for worker in self._workers:
            worker.end()
        os.close(self._shared_file)


class _Answer(Future[Any]):
    """The answer to a call that has been sent. `result` waits for it on the calling thread."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._take: Callable[[], Any] | None = wait

    def result(self, timeout: float | None = None) -> Any:
        """Returns the answer, or raises the error of a worker."""
        if self._take is not None:
            take, self._take = self._take, None
            try:
                self.set_result(take())
            except Exception as e:
                self.set_exception(e)
        return super().result(timeout)
