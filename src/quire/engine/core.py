"""The engine core: turns queued requests into outputs, in whatever process it runs.

A step is: schedule, execute, take in the result. This class runs one step per call and answers control calls;
`InprocClient` calls it from the user's thread, `EngineCoreProc` from its loop.
"""

from __future__ import annotations

import gc
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple, cast

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.engine.heartbeat import HeartbeatWriter
from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.kv_cache.sizing import KVCacheSizes, initialize_kv_caches
from quire.engine.kv_events import find_source
from quire.engine.lifecycle import Lifecycle
from quire.engine.lora.manager import AdapterManager
from quire.engine.request import BlockHasher, Request, RequestStatus
from quire.engine.sched.drafts import DraftFitter
from quire.engine.sched.exchange import check_connector, connect_stores
from quire.engine.sched.interface import (
    AdmissionGate,
    ObservedScheduler,
    SchedulerInterface,
    StructuredOutputManager,
)
from quire.engine.structured_output.manager import make_structured_output_manager
from quire.engine.tracing import describe_iteration, log_error_detail, make_observers
from quire.errors import ClientError, ServerError, ValidationError
from quire.failpoints import failpoint
from quire.interrupts import InterruptShield
from quire.logger import init_logger
from quire.resolve import resolve
from quire.timeline import stamp
from quire.wire.elastic import EEPNotificationType, ReconfigureDistributedRequest
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.trace import TraceWindow

logger = init_logger(__name__)

StepResult = tuple[dict[int, EngineCoreOutputs] | None, bool]
"""Outputs by client index (None: none this time) and whether a model ran."""


class _QueuedStep(NamedTuple):
    """A step on its way through the executor. `sample_future` is None where nothing is sampled."""

    output: SchedulerOutput
    exec_future: Future[ModelRunnerOutput | None]
    sample_future: Future[ModelRunnerOutput] | None

    def result(self) -> ModelRunnerOutput:
        """Waits for the result. Raises what the worker raised; an error of the forward pass before one that it
        caused."""
        model_output = self.exec_future.result()
        if model_output is None and self.sample_future is not None:
            model_output = self.sample_future.result()
        if model_output is None:
            raise ServerError("the executor returned neither an output nor an error for a step")
        return model_output


NOTHING_SHARED = "this engine shares no experts with others: it has nothing to prepare"


def _has_peers(config: EngineConfig) -> bool:
    return config.parallel_config.data_parallel_size > 1 or config.parallel_config.shares_experts


class EngineCore:
    """Owns the executor and the scheduler of one engine. All methods but `preprocess_add_request` and
    `aborts_queue.put` belong to one thread.

    Ctrl-C during a call takes effect at its end, so that the engine stays usable; outputs that were ready by then
    come from the next step. `lifecycle` holds the control verbs.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        log_stats: bool,
        executor_fail_callback: Callable[[], None] | None = None,
        include_finished_set: bool = False,
        heartbeat: HeartbeatWriter | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called on any thread when a grammar is compiled, an adapter loaded or a transfer ends: call
        `take_news` then."""
        logger.info("engine core: model %s, executor %s", config.model_config.name, executor_class.__name__)
        check_connector(config)
        self.heartbeat = heartbeat if heartbeat is not None else HeartbeatWriter()
        self.structured_output_manager = make_structured_output_manager(config, wake)
        self.structured_output_manager.preload()
        self.executor = executor_class(config)
        if executor_fail_callback is not None:
            self.executor.register_failure_callback(executor_fail_callback)
        sizes = self._make_kv_caches(config)
        cache_config = config.cache_config
        max_steps = self.executor.max_concurrent_batches
        observers, self._traces = make_observers(config, sizes, self.heartbeat, max_steps)
        grammars: StructuredOutputManager | None = self.structured_output_manager
        self.adapters = AdapterManager(config.lora_config, self.executor, sizes.adapter_bytes, wake=wake)
        adapters: AdmissionGate = self.adapters
        for observer in observers:
            grammars, adapters = observer.watch_grammars(grammars), observer.watch_adapters(adapters)
        drafts = DraftFitter.from_config(config, sizes.max_model_len)
        self.scheduler: SchedulerInterface = resolve(config.scheduler_config.scheduler_cls)(
            sizes.config,
            config.scheduler_config,
            max_model_len=sizes.max_model_len,
            enable_caching=cache_config.enable_prefix_caching,
            log_stats=log_stats,
            include_finished_set=include_finished_set,
            kv_cache_metrics_sample=cache_config.kv_cache_metrics_sample if cache_config.kv_cache_metrics else None,
            structured_output_manager=grammars,
            gates=(adapters,) if config.lora_config.enable_lora else (),
            drafts=drafts,
            max_concurrent_steps=max_steps,
            sends_tokens=self.executor.needs_sampled_tokens,
        )
        exchange = connect_stores(self.scheduler, config, sizes, self.executor, observers, wake)
        if observers:
            self.scheduler = ObservedScheduler(self.scheduler, observers)
        self.ready_response = EngineCoreReadyResponse(
            max_model_len=sizes.max_model_len,
            num_gpu_blocks=sizes.config.num_blocks,
            block_size=sizes.block_size,
            kv_cache_size_tokens=sizes.num_tokens,
            kv_cache_max_concurrency=sizes.max_concurrency,
            supported_tasks=self.executor.get_supported_tasks(),
            kv_events=find_source(config),
            numerics_id=self.executor.get_numerics_id() if _has_peers(config) else "",
        )
        self.batch_queue_size = max_steps
        self.batch_queue: deque[_QueuedStep] = deque()
        """Steps in flight, newest left."""
        self.step_fn = self.step if self.batch_queue_size == 1 else self.step_with_batch_queue
        self.block_hasher: BlockHasher | None = (
            make_block_hasher(sizes.block_size) if cache_config.enable_prefix_caching else None
        )
        self.aborts_queue: queue.Queue[str | list[str]] = queue.Queue()
        """Ids to abort even while a step is in flight; the only part another thread may touch."""
        self._log_iterations = config.observability_config.enable_logging_iteration_details
        self._num_iterations = 0
        self._undelivered: deque[StepResult] = deque()
        """Results of steps that `step_fn` has not returned yet."""
        self.lifecycle = Lifecycle(
            self.scheduler, self.executor, self.has_work, self.finish_steps, self.adapters, exchange
        )
        gc.collect()
        gc.freeze()  # objects created during start-up are never collected: full collections need not visit them
        stamp("engine core")

    def _make_kv_caches(self, config: EngineConfig) -> KVCacheSizes:
        if config.parallel_config.is_scale_up_launch:
            self._eep_scale_up_before_kv_init()
        return initialize_kv_caches(config, self.executor)

    # -- another number of engines: those that share experts have it (`DPEngineCoreProc`) ---------------------------

    def _eep_scale_up_before_kv_init(self) -> None:
        """Checks, before there is a KV cache, an engine that is added to others."""
        raise NotImplementedError("only engines that share experts are started for a group that does not compute yet")

    def _eep_send_engine_core_notification(self, notification: EEPNotificationType) -> None:
        """Reports how far this engine is when the number of engines changes."""
        raise NotImplementedError("only engines that share experts report changes of their number")

    def reinitialize_distributed(self, request: ReconfigureDistributedRequest) -> Future[str]:
        """Begins to prepare for a group of another number of engines, beside the steps. Returns a Future of the key
        `eep_ready/RANK`. Raises ClientError for engines that share no experts, and for one that is asleep."""
        raise ClientError(NOTHING_SHARED)

    def commit_prepared_elastic_ep(self) -> Future[None]:
        """Orders this engine to go over to the group that it has prepared for. Returns a Future, which ends when it
        has. Raises ClientError if it has prepared for none."""
        raise ClientError(NOTHING_SHARED)

    def discard_prepared_elastic_ep(self) -> None:
        """Gives up what has been prepared. Raises ClientError after the order to go over."""
        raise ClientError(NOTHING_SHARED)

    # -- requests ----------------------------------------------------------------------------------------------

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """Prepares a request outside the loop's thread: binds its adapter, hashes its blocks and starts to compile its
        grammar.

        Returns (request, wave). Raises ClientError, which concerns this request only.
        """
        adapter = self.adapters.bind(request)
        try:
            core_request = Request(request, self.block_hasher, adapter, self.adapters.find_start(request, adapter))
            self.structured_output_manager.grammar_init(core_request)
        except BaseException:
            self.adapters.unbind(adapter)
            raise
        return core_request, request.current_wave

    def add_request(self, request: Request, wave: int = 0) -> None:
        """Queues a request (`wave` matters to data-parallel engines only).

        Raises, with nothing changed: TypeError for an id that is no string; ValidationError for a task that the model
        does not have, an id in use, or a prompt that is too long.
        """
        try:
            self._queue_request(request)
        except BaseException:
            self.adapters.unbind(request.adapter)
            raise

    def _queue_request(self, request: Request) -> None:
        if not isinstance(request.request_id, str):
            raise TypeError(f"request_id must be a str, got {type(request.request_id).__name__}")
        pooling_params = request.origin.pooling_params
        task = "generate" if pooling_params is None else pooling_params.task
        supported = self.ready_response.supported_tasks
        if task not in supported:
            raise ValidationError(
                f"task {task!r} is not supported by this model; it does: {', '.join(supported)}",
                param="task",
                value=task,
            )
        with InterruptShield():
            self.scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests that their client does not want any more. Ignores unknown and finished ids."""
        with InterruptShield():
            self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def _process_aborts_queue(self) -> None:
        request_ids: list[str] = []
        while not self.aborts_queue.empty():
            item = self.aborts_queue.get_nowait()
            request_ids.extend((item,) if isinstance(item, str) else item)
        if request_ids:
            self.abort_requests(request_ids)

    # -- steps -------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Runs one step, from start to end. Returns the result of the oldest step that was not returned."""
        with self._whole_steps() as shield:
            if not self._undelivered:
                if not self.scheduler.has_requests():
                    return {}, False
                start, output = time.perf_counter(), self._schedule()
                outputs = self._update(output, self._execute(output, shield), start)
                self._undelivered.append((outputs, output.total_num_scheduled_tokens > 0))
        return self._undelivered.popleft()

    def step_with_batch_queue(self) -> StepResult:
        """Keeps up to `batch_queue_size` steps in flight. Filling the queue comes before waiting for a result."""
        with self._whole_steps() as shield:
            if not self._undelivered:
                self._undelivered.append(self._fill_or_take(shield))
        return self._undelivered.popleft()

    def has_work(self) -> bool:
        """Returns whether a call of `step_fn` would do anything or return a result."""
        return bool(self._undelivered or self.batch_queue) or self.scheduler.has_requests()

    def is_blocked(self) -> bool:
        """Returns whether every request waits for a grammar, an adapter or a transfer: nothing is to be done before
        `wake` is called."""
        return not (self._undelivered or self.batch_queue) and self.scheduler.is_blocked()

    def take_news(self) -> None:
        """Takes in adapters that have been loaded."""
        self.adapters.take_results()

    def finish_steps(self) -> None:
        """Takes in the results of all steps in flight, and starts no other. The next calls of `step_fn` return them."""
        while self.batch_queue:
            with self._whole_steps() as shield:
                self._undelivered.append((self._take_oldest(shield), True))

    @contextmanager
    def _whole_steps(self) -> Iterator[InterruptShield]:
        """Ctrl-C waits for the end of the block. After an error all steps in flight are given up: the engine stays
        usable, and their requests are computed again."""
        with InterruptShield() as shield:
            try:
                yield shield
            except BaseException:
                shield.may_break = False
                self.batch_queue.clear()
                self.scheduler.abandon_steps()
                raise

    def _schedule(self) -> SchedulerOutput:
        self.heartbeat.schedule()
        failpoint("core.step.schedule")
        self.adapters.take_results()
        output = self.scheduler.schedule()
        self._announce(output)
        return output

    def _execute(self, output: SchedulerOutput, shield: InterruptShield) -> ModelRunnerOutput:
        with self._executing(output, shield):
            future = self._execute_later(output)
            grammar_output = self.scheduler.get_grammar_bitmask(output)  # while the model runs
            model_output = future.result()
            if model_output is None:
                self.scheduler.note_forward(output)
                model_output = cast("ModelRunnerOutput", self.executor.sample_tokens(grammar_output))
        return model_output

    def _execute_later(self, output: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        failpoint("core.step.execute", output.num_scheduled_tokens)
        return cast("Future[ModelRunnerOutput | None]", self.executor.execute_model(output, non_block=True))

    def _update(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput, start: float
    ) -> dict[int, EngineCoreOutputs]:
        self.heartbeat.update()
        failpoint("core.step.update")
        self._process_aborts_queue()  # what was aborted while the model ran must not be sent
        outputs = self.scheduler.update_from_output(output, model_output)
        for batch in outputs.values():
            if batch.scheduler_stats is not None:
                batch.scheduler_stats.barrier_wait_seconds = self.executor.take_barrier_wait()
        if self._log_iterations:
            logger.info(describe_iteration(self._num_iterations, output, time.perf_counter() - start))
            self._num_iterations += 1
        return outputs

    # -- several steps in flight -------------------------------------------------------------------------------

    def _fill_or_take(self, shield: InterruptShield) -> StepResult:
        """Submits a step if the queue has room, and takes the oldest result if it is there or the queue is full."""
        executed = False
        deferred: _QueuedStep | None = None
        if len(self.batch_queue) < self.batch_queue_size and self.scheduler.has_requests():
            step = self._submit(shield)
            executed = step.output.total_num_scheduled_tokens > 0
            if executed and step.output.pending_structured_output_tokens:
                deferred = step
            else:
                self.batch_queue.appendleft(step)
                is_full = len(self.batch_queue) == self.batch_queue_size
                if executed and not is_full and not self.batch_queue[-1].exec_future.done():
                    return None, True
        if not self.batch_queue:
            assert deferred is None  # it waits for a step in the queue
            return None, False
        executed = executed or self.batch_queue[-1].output.total_num_scheduled_tokens > 0
        outputs = self._take_oldest(shield)
        if deferred is not None:  # the steps before it have given their tokens to its grammars
            with self._executing(deferred.output, shield):
                self.batch_queue.appendleft(deferred._replace(sample_future=self._sample_later(deferred.output)))
        return outputs, executed

    def _take_oldest(self, shield: InterruptShield) -> dict[int, EngineCoreOutputs]:
        """Waits for the oldest step in flight and takes its result in."""
        start = time.perf_counter()
        oldest = self.batch_queue.pop()
        self._announce(oldest.output)
        with self._executing(oldest.output, shield):
            model_output = oldest.result()
        return self._update(oldest.output, model_output, start)

    def _submit(self, shield: InterruptShield) -> _QueuedStep:
        """Schedules a step and hands it to the executor, without waiting."""
        output = self._schedule()
        with self._executing(output, shield):
            exec_future = self._execute_later(output)
            sample_future = None
            if output.total_num_scheduled_tokens and not (
                "generate" not in self.ready_response.supported_tasks or output.pending_structured_output_tokens
            ):
                sample_future = self._sample_later(output)
        return _QueuedStep(output, exec_future, sample_future)

    def _sample_later(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future = self.executor.sample_tokens(self.scheduler.get_grammar_bitmask(output), non_block=True)
        return cast("Future[ModelRunnerOutput]", future)

    def _announce(self, output: SchedulerOutput) -> None:
        """Writes the requests of all steps in flight to the heartbeat, so that a supervisor knows the suspects if a
        step never ends."""
        num_tokens, request_ids = output.total_num_scheduled_tokens, output.num_scheduled_tokens
        if not self.batch_queue:
            self.heartbeat.execute(request_ids, num_tokens)
        else:
            steps = [output, *(step.output for step in self.batch_queue)]
            together = dict.fromkeys(chain.from_iterable(step.num_scheduled_tokens for step in steps))
            self.heartbeat.execute(together, sum(step.total_num_scheduled_tokens for step in steps))

    @contextmanager
    def _executing(self, output: SchedulerOutput, shield: InterruptShield) -> Iterator[None]:
        """Wraps calls into the executor: a second Ctrl-C interrupts them, and a failure is described in the log."""
        shield.may_break = True
        try:
            yield
        except Exception:
            log_error_detail(logger, output, self.scheduler.get_request_counts())
            raise
        finally:
            shield.may_break = False

    def post_step(self, model_executed: bool) -> None:
        """Drafts the next tokens of the requests that have just got some, whose clients do not wait for it."""
        if not model_executed or self.executor.config.speculative_config.drafting is None:
            return
        with InterruptShield():
            self.heartbeat.draft()
            failpoint("core.step.draft")
            drafts = self.executor.take_draft_token_ids()
            self.heartbeat.drafted(0.0 if drafts is None else drafts.seconds)
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)

    def get_dropped_messages(self) -> dict[str, int]:
        """Returns the number of messages that could not be read, by reason: none in a core without a process of its
        own."""
        return {}

    def admit_clients(self) -> None:
        """Lets clients other than the owner use the core. Idempotent; a core in its user's process has no others."""

    def get_trace(self, seconds: float = 10.0) -> TraceWindow:
        """Returns the recorded steps of the last `seconds`. Raises ValidationError if nothing is recorded."""
        if self._traces is None:
            raise ValidationError(
                "the engine keeps no traces; start it with --trace-events 50000, or --trace-file FILE"
            )
        return self._traces.get_window(seconds)

    # -- the end -----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the workers and releases everything. May be called twice."""
        self.structured_output_manager.clear_backend()
        self.scheduler.shutdown()
        self.executor.shutdown()
        gc.unfreeze()
