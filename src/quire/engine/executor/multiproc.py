"""An executor whose workers are processes that compute each step together.

Calls go down one ring, which all workers read; each worker answers by a ring of its own. Several calls may be on their
way: a worker runs them one after the other. Stages of a pipeline pass hidden states by rings of their own. The end of a
worker is noticed by its process descriptor. Then the abort word makes the others leave their barriers, and the core
ends, as it does after any error in a step; its supervisor starts it again, with new workers.

Loads of adapters go down the same ring, from any thread, so that all workers begin and drop them between the same
steps. They are answered beside the steps, as are transfers of KV blocks: late_answers.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn, cast

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.engine.executor.late_answers import LateAnswers, join_infos
from quire.engine.executor.worker_hub import RemoteWorker, WorkerHub
from quire.engine.executor.worker_process import END_S, WorkerGroup, WorkerProcess
from quire.errors import ConfigError, ServerError, ValidationError, make_error
from quire.logger import init_logger
from quire.lora_request import LoRARequest
from quire.timeline import stamp
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.handshake import HANDSHAKE_TIMEOUT_S
from quire.wire.heartbeat import WorkerEnd
from quire.wire.kv_cache import AnyKVCacheSpec, KVCacheConfig
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput
from quire.wire.lora import AdapterInfo, AdapterKey, AdapterLoad
from quire.wire.nodes import read_fleet_key
from quire.wire.ring import NO_BELL, RingReader, Waiter, make_bell
from quire.wire.serial import MsgpackEncoder
from quire.wire.shared_memory import read_barrier_wait, set_abort_word
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
        self._sending = threading.Lock()
        """Guards the encoder, the call id and the ring."""
        self._on_failure: Callable[[], None] = lambda: None
        self._is_ending = False
        self._pending = dict[int, _Call]()
        """Calls that are waited for, by their ids."""
        self._lost: tuple[WorkerReply, int] | None = None
        """The answer that has ended all steps, and the rank of its worker."""
        self._waited = 0.0
        """Seconds in barriers that were reported."""
        self._late = LateAnswers(self._topology.world_size)
        self._workers: list[WorkerProcess | RemoteWorker] = []
        """All workers, by rank."""
        self._group: WorkerGroup | None = None
        """Workers on this machine."""
        self._hub: WorkerHub | None = None
        """The link with those on other machines; None: there are none."""
        self._waiter = Waiter(make_bell())
        """Waits for answers and for ends of workers."""
        self._monitor = threading.Thread(target=self._watch, name="WorkerMonitor", daemon=True)
        try:
            self._start(self._find_parts())
            for worker in self._workers:
                if worker.pidfd is not None:
                    self._waiter.watch(worker.pidfd)
                if self._waiter.bell == NO_BELL:
                    self._waiter.watch(worker.waker.fileno())
            self._monitor.start()
            self._call_all("init_device")
        except BaseException:
            self.shutdown()
            raise

    def _find_parts(self) -> list[int]:
        """Returns the number of workers on each machine, this one first."""
        parallel = self.config.parallel_config
        return [len(parallel.local_ranks)] * parallel.nnodes

    def _make_hub(self, parts: Sequence[int]) -> WorkerHub:
        """Returns the link with workers on other machines."""
        path = self.config.parallel_config.fleet_key
        assert path is not None, "ParallelConfig has checked it"
        return WorkerHub(self.config, read_fleet_key(path), parts, self._late.theirs.send, self._waiter.bell)

    def _start(self, parts: Sequence[int]) -> None:
        """Starts the workers of this machine, and waits for the others."""
        if len(parts) > 1:
            self._hub = self._make_hub(parts)
        network = None if self._hub is None else self._hub.network
        self._group = group = WorkerGroup(self.config, range(parts[0]), self._late.theirs, network, self._waiter.bell)
        self._workers += group.workers
        if self._hub is not None:
            assert group.calls_reader is not None, "there is a network"
            stamp("executor", allowance_s=HANDSHAKE_TIMEOUT_S)
            self._hub.serve(group.calls_reader, group.outlet)
            self._hub.wait(check=self._check_starting)
            stamp("machines")
            self._workers += self._hub.workers

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        self._on_failure = callback

    def _check_starting(self) -> None:
        """Raises an error if a worker has ended while others are waited for."""
        self._check_alive()

    # -- calls --------------------------------------------------------------------------------------------------------

    def _send(self, verb: str, *arguments: Any) -> _Call:
        """Sends a call, which all workers answer, or of a step the output rank. It must be waited for."""
        ranks = [self._topology.output_rank] if WORKER_VERBS[verb].is_step else range(len(self._workers))
        call_id = self._put(verb, arguments)
        call = self._pending[call_id] = _Call(call_id, verb, ranks, {})
        return call

    def _put(self, verb: str, arguments: Sequence[Any], prepare: Callable[[int], None] = lambda _: None) -> int:
        """Writes a call into the ring, and returns its id, which `prepare` gets before. May be called on any thread."""
        with self._sending:
            self._call_id += 1
            prepare(self._call_id)
            call = encode_call(WorkerCall(self._call_id, verb), arguments, self._encoder)
            self._workers_here.calls.send(call, self._check_alive)
            return self._call_id

    def _call_all(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Returns the results of all workers; of a step only the output rank's."""
        return self._wait(self._send(verb, *arguments), timeout_s)

    def _wait(self, call: _Call, timeout_s: float | None = None) -> list[Any]:
        """Returns the answers to a call. Raises the error of any worker, ServerError if one has ended, and
        TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._is_answered(call):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{call.verb} was not answered by all workers within {timeout_s:g} s")
                self._sleep(deadline, call)
        finally:
            self._pending.pop(call.call_id, None)
        if self._lost is not None:
            self._raise(*self._find_cause(*self._lost))
        for rank, (reply, _) in call.answers.items():
            if reply.error is not None:
                self._raise(reply, rank)
        return [decode_result(call.answers[rank][1], call.verb) for rank in call.ranks]

    def _is_answered(self, call: _Call) -> bool:
        """Takes in the answers that have come. Returns whether `call` has all of its, or an error has ended it."""
        for worker in self._workers:
            while self._lost is None and worker.answers.is_ready():
                frames = worker.answers.take()
                reply = decode_reply(frames)
                if reply.is_fatal:
                    self._lost = reply, worker.rank
                    self._abort()  # in all stages
                elif reply.call_id in self._pending:  # else it has been given up
                    self._pending[reply.call_id].answers[worker.rank] = reply, frames
        return self._lost is not None or len(call.answers) == len(call.ranks)

    def _rings_of(self, call: _Call | None) -> list[RingReader]:
        """Returns the rings whose answers wake the thread that waits for `call`. Of a call of all workers it is that of
        the last one that is missing: each time it woke it would take a processor that another worker may need."""
        if call is None or len(call.ranks) == 1:
            return [worker.answers for worker in self._workers]  # also of those whose only answer is an error
        return [self._workers[max(rank for rank in call.ranks if rank not in call.answers)].answers]

    def _sleep(self, deadline: float | None = None, call: _Call | None = None) -> None:
        """Returns once an answer may have come, to `call` if it is given. Raises ServerError if a worker has ended."""
        rings, is_rung = self._rings_of(call), True
        sleeping = [ring for ring in rings if ring.begin_sleep()]
        if len(sleeping) == len(rings):
            left = 1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))
            is_rung = self._waiter.wait(left) == [self._waiter.bell]
        for ring in sleeping:
            ring.end_sleep()
        if not is_rung:
            self._check_alive()

    def _find_cause(self, reply: WorkerReply, rank: int) -> tuple[WorkerReply, int]:
        """Returns what has ended all steps: behind an echo, the error of the worker that has failed. Remembers it, for
        each call on its way raises it."""
        deadline = time.monotonic() + CAUSE_S
        while reply.is_echo and time.monotonic() < deadline:
            self._sleep(deadline)
            for worker in self._workers:
                while reply.is_echo and worker.answers.is_ready():
                    found = decode_reply(worker.answers.take())
                    if found.is_fatal and not found.is_echo:
                        reply, rank = found, worker.rank
        self._lost = reply, rank
        return self._lost

    def _raise(self, reply: WorkerReply, rank: int) -> NoReturn:
        """Raises a worker's error."""
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
        set_abort_word(self._workers_here.shared_file)
        if self._hub is not None:
            self._hub.abort()

    @property
    def _workers_here(self) -> WorkerGroup:
        assert self._group is not None, "the workers have been started"
        return self._group

    def _watch(self) -> None:
        """Waits for the end of any worker, and for late answers. The body of the monitor's thread."""
        fds = [worker.pidfd for worker in self._workers if worker.pidfd is not None]
        while not self._is_ending:
            ready = select.select([self._late.fileno(), *fds], [], [], 1.0 if fds else 0.1)[0]
            if self._late.fileno() in ready:
                self._late.take()
            has_ended = any(fd in ready for fd in fds)
            if not fds:  # a system without process descriptors
                has_ended = any(worker.describe_end() is not None for worker in self._workers)
            if has_ended and not self._is_ending:
                self._abort()
                self._late.fail_all(ServerError("a worker of the engine has ended"))
                self._on_failure()
                return

    # -- the interface ------------------------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, AnyKVCacheSpec]]:
        return self._call_all("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        self._call_all("load_model")
        if self._hub is not None:
            self._check_numerics(self._call_all("get_numerics_id"))
        return self._call_all("determine_available_memory")

    def _check_numerics(self, ids: Sequence[str]) -> None:
        """Raises ConfigError unless workers on all machines compute the same bits."""
        other = next((rank for rank, text in enumerate(ids) if text != ids[0]), None)
        if other is not None:
            raise ConfigError(
                f"workers of one engine must compute the same bits: worker 0 has {ids[0]}, worker {other}, on another "
                f"machine, {ids[other]}; use machines with one instruction set and copies of one checkpoint"
            )

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self._call_all("initialize_from_config", kv_cache_configs)
        self._call_all("compile_or_warm_up_model")

    @property
    def max_concurrent_batches(self) -> int:
        return (
            1 if self.config.speculative_config.drafting is not None else self._topology.pp
        )  # drafts follow each step

    @property
    def needs_sampled_tokens(self) -> bool:
        return self._topology.pp > 1

    def _step(self, verb: str, non_block: bool, *arguments: Any) -> Any:
        if not non_block:
            return self._call_all(verb, *arguments)[0]
        try:
            call = self._send(verb, *arguments)
        except Exception as e:
            failed: Future[Any] = Future()
            failed.set_exception(e)
            return failed
        return _Answer(lambda: self._wait(call)[0], lambda: self._is_answered(call))

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

    # -- adapters -----------------------------------------------------------------------------------------------------

    def measure_adapter(self, lora_request: LoRARequest) -> Future[int]:
        return self._ask("measure_adapter", lora_request, combine=sum)

    def load_adapter(self, load: AdapterLoad) -> Future[AdapterInfo]:
        return self._ask("load_adapter", load, combine=join_infos, undo=lambda: self.drop_adapter(load.key))

    def drop_adapter(self, key: AdapterKey) -> None:
        with contextlib.suppress(ServerError):  # a worker is gone, and the engine ends
            self._put("drop_adapter", [key])

    def _ask(
        self,
        verb: str,
        argument: Any,
        *,
        combine: Callable[[Sequence[Any]], Any],
        undo: Callable[[], None] = lambda: None,
    ) -> Future[Any]:
        """Sends a call that is answered late, and returns its Future."""
        futures = list[Future[Any]]()
        try:
            self._put(verb, [argument], lambda id_: futures.append(self._late.expect(id_, verb, combine, undo)))
        except ServerError as e:
            self._late.fail_all(e)
        return futures[0]

    # -- transfers of blocks ------------------------------------------------------------------------------------------

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], None]) -> None:
        self._late.transfers.register_callback(callback)

    def send_transfers(self, orders: KVConnectorMetadata) -> None:
        with contextlib.suppress(ServerError):  # a worker is gone, and the engine ends
            self._put("start_transfers", [orders])

    # -- observations -------------------------------------------------------------------------------------------------

    def take_barrier_wait(self) -> float:
        size = self._topology
        before, self._waited = self._waited, read_barrier_wait(self._workers_here.shared_file, size.pp, size.tp)
        return self._waited - before

    @property
    def worker_end(self) -> WorkerEnd:
        return next(filter(None, (worker.end_kind for worker in self._workers)), WorkerEnd.NONE)

    # -- the end ------------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        self._check_alive()

    def shutdown(self) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        self._late.wake()
        if self._monitor.is_alive() and self._monitor is not threading.current_thread():
            self._monitor.join(END_S)
        try:
            if self._workers and all(worker.describe_end() is None for worker in self._workers):
                self._abort()  # a worker that waits for another one must not outlast it
                self._send("shutdown")
        except Exception as e:
            logger.debug("workers are ended without a word: %s", e)
        if self._hub is not None:
            self._hub.end()
            for worker in self._hub.workers:
                worker.end()
        if self._group is not None:
            self._group.close()
        self._late.fail_all(ServerError("the engine has ended"))
        self._late.close()
        self._waiter.close()
        if self._waiter.bell != NO_BELL:
            os.close(self._waiter.bell)


class _Call(NamedTuple):
    """A call that has been sent."""

    call_id: int
    verb: str
    ranks: Sequence[int]
    """Workers that answer."""
    answers: dict[int, tuple[WorkerReply, list[memoryview]]]
    """The answers that have come, with their frames, by rank."""


class _Answer(Future[Any]):
    """The answer to a call that has been sent. `result` waits for it on the calling thread."""

    def __init__(self, wait: Callable[[], Any], is_here: Callable[[], bool]) -> None:
        super().__init__()
        self._take: Callable[[], Any] | None = wait
        self._is_here = is_here

    def done(self) -> bool:
        """Returns whether `result` would not wait. Must be called on the thread that calls `result`."""
        return self._take is None or self._is_here()

    def result(self, timeout: float | None = None) -> Any:
        """Returns the answer, or raises the error of a worker."""
        if self._take is not None:
            take, self._take = self._take, None
            try:
                self.set_result(take())
            except Exception as e:
                self.set_exception(e)
        return super().result(timeout)
