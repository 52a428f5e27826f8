"""The engine core: the loop body that turns queued requests into outputs, in whatever process it lives.

A step is: schedule, execute, take in the result. This class runs steps when it is told to and answers control calls;
`InprocClient` drives it from the user's thread.
"""

from __future__ import annotations

import gc
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.engine.kv_cache.hashing import make_block_hasher
from quire.engine.kv_cache_init import initialize_kv_caches
from quire.engine.request import BlockHasher, Request, RequestStatus
from quire.engine.sched.interface import PauseState, SchedulerInterface
from quire.engine.step_report import describe_iteration, log_error_detail
from quire.errors import ServerError, ValidationError
from quire.interrupts import InterruptShield
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest, PauseMode
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput

logger = init_logger(__name__)

StepResult = tuple[dict[int, EngineCoreOutputs] | None, bool]
"""Outputs by client index (None: none this time) and whether a model ran."""


class _QueuedStep(NamedTuple):
    """A step on its way through the executor. `sample_future` is None where nothing is sampled."""

    output: SchedulerOutput
    exec_future: Future[ModelRunnerOutput | None]
    sample_future: Future[ModelRunnerOutput] | None

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what the worker raised; an error of the forward pass before one it led to."""
        model_output = self.exec_future.result()
        if model_output is None and self.sample_future is not None:
            model_output = self.sample_future.result()
        if model_output is None:
            raise ServerError("the executor returned neither an output nor an error for a step")
        return model_output


class EngineCore:
    """Owns the executor and the scheduler of one engine. All methods but `preprocess_add_request` and
    `aborts_queue.put` belong to one thread.

    Ctrl-C during a call takes effect at its end, so that the engine stays usable; outputs that were ready by then
    come from the next step.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        log_stats: bool,
        executor_fail_callback: Callable[[], None] | None = None,
        include_finished_set: bool = False,
    ) -> None:
        logger.info("engine core: model %s, executor %s", config.model_config.name, executor_class.__name__)
        self.executor = executor_class(config)
        if executor_fail_callback is not None:
            self.executor.register_failure_callback(executor_fail_callback)
        sizes = initialize_kv_caches(config, self.executor)
        cache_config = config.cache_config
        self.scheduler: SchedulerInterface = resolve(config.scheduler_config.scheduler_cls)(
            sizes.config,
            config.scheduler_config,
            max_model_len=sizes.max_model_len,
            enable_caching=cache_config.enable_prefix_caching,
            log_stats=log_stats,
            include_finished_set=include_finished_set,
            kv_cache_metrics_sample=cache_config.kv_cache_metrics_sample if cache_config.kv_cache_metrics else None,
        )
        self.ready_response = EngineCoreReadyResponse(
            max_model_len=sizes.max_model_len,
            num_gpu_blocks=sizes.config.num_blocks,
            block_size=sizes.block_size,
            kv_cache_size_tokens=sizes.num_tokens,
            kv_cache_max_concurrency=sizes.max_concurrency,
            supported_tasks=self.executor.get_supported_tasks(),
        )
        self.batch_queue_size = self.executor.max_concurrent_batches
        self.batch_queue: deque[_QueuedStep] = deque()
        """Steps in flight, newest left."""
        self.step_fn = self.step if self.batch_queue_size == 1 else self.step_with_batch_queue
        self.block_hasher: BlockHasher | None = (
            make_block_hasher(sizes.block_size) if cache_config.enable_prefix_caching else None
        )
        self.aborts_queue: queue.Queue[str | list[str]] = queue.Queue()
        """Ids to abort even while a step is in flight; the only part another thread may touch."""
        self._is_pooling_model = "generate" not in self.ready_response.supported_tasks
        self._log_iterations = config.observability_config.enable_logging_iteration_details
        self._num_iterations = 0
        self._undelivered: StepResult | None = None
        gc.collect()
        gc.freeze()  # what lives now lives for ever: full collections need not walk it

    # -- requests ----------------------------------------------------------------------------------------------

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """Everything that can be done for a request outside the loop's thread: (request, its wave).

        Raises ValidationError; that concerns this request only.
        """
        return Request.from_engine_core_request(request, self.block_hasher), request.current_wave

    def add_request(self, request: Request, wave: int = 0) -> None:
        """Queue a request (`wave` matters to data-parallel engines only).

        Raises, with nothing changed: TypeError for an id that is no string; ValidationError for a task the model does
        not do, an id in use, a prompt that is too long.
        """
        if not isinstance(request.request_id, str):
            raise TypeError(f"request_id must be a str, got {type(request.request_id).__name__}")
        task = "generate" if request.pooling_params is None else request.pooling_params.task
        if task not in self.get_supported_tasks():
            raise ValidationError(
                f"task {task!r} is not supported by this model; it does: {', '.join(self.get_supported_tasks())}",
                param="task",
                value=task,
            )
        with InterruptShield():
            self.scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests their client no longer wants. Unknown and finished ids are ignored."""
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
        """One step, start to end."""
        return self._deliver(self._step)

    def step_with_batch_queue(self) -> StepResult:
        """Keep up to `batch_queue_size` steps in flight. Filling the queue comes before waiting for a result."""
        return self._deliver(self._step_with_batch_queue)

    def _deliver(self, run_step: Callable[[InterruptShield], StepResult]) -> StepResult:
        """Run a step whole, or give up all steps in flight: should anyone go on, their requests are computed again."""
        if self._undelivered is None:
            with InterruptShield() as shield:
                try:
                    self._undelivered = run_step(shield)
                except BaseException:
                    shield.may_break = False
                    self.batch_queue.clear()
                    self.scheduler.abandon_steps()
                    raise
        result, self._undelivered = self._undelivered, None
        return result

    def _step(self, shield: InterruptShield) -> StepResult:
        if not self.scheduler.has_requests():
            return {}, False
        start = time.perf_counter()
        scheduler_output = self.scheduler.schedule()
        with self._executing(scheduler_output, shield):
            future = self._execute_later(scheduler_output)
            grammar_output = self.scheduler.get_grammar_bitmask(scheduler_output)  # while the model runs
            model_output = future.result()
            if model_output is None:
                model_output = cast("ModelRunnerOutput", self.executor.sample_tokens(grammar_output))
        outputs = self._update(scheduler_output, model_output)
        self._log_iteration(scheduler_output, start)
        return outputs, scheduler_output.total_num_scheduled_tokens > 0

    def _step_with_batch_queue(self, shield: InterruptShield) -> StepResult:
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
        start = time.perf_counter()
        oldest = self.batch_queue.pop()
        with self._executing(oldest.output, shield):
            model_output = oldest.result()
        outputs = self._update(oldest.output, model_output)
        if deferred is not None:  # its grammars have seen all tokens now
            with self._executing(deferred.output, shield):
                self.batch_queue.appendleft(deferred._replace(sample_future=self._sample_later(deferred.output)))
        self._log_iteration(oldest.output, start)
        return outputs, executed

    def _submit(self, shield: InterruptShield) -> _QueuedStep:
        """Schedule a step and hand it to the executor, without waiting."""
        scheduler_output = self.scheduler.schedule()
        with self._executing(scheduler_output, shield):
            exec_future = self._execute_later(scheduler_output)
            sample_future = None
            if scheduler_output.total_num_scheduled_tokens and not (
                self._is_pooling_model or scheduler_output.pending_structured_output_tokens
            ):
                sample_future = self._sample_later(scheduler_output)
        return _QueuedStep(scheduler_output, exec_future, sample_future)

    def _execute_later(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        future = self.executor.execute_model(scheduler_output, non_block=True)
        return cast("Future[ModelRunnerOutput | None]", future)

    def _sample_later(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        grammar_output = self.scheduler.get_grammar_bitmask(scheduler_output)
        future = self.executor.sample_tokens(grammar_output, non_block=True)
        return cast("Future[ModelRunnerOutput]", future)

    @contextmanager
    def _executing(self, scheduler_output: SchedulerOutput, shield: InterruptShield) -> Iterator[None]:
        """Around calls into the executor: a second Ctrl-C breaks them off, and a failure is described in the log."""
        shield.may_break = True
        try:
            yield
        except Exception:
            log_error_detail(logger, scheduler_output, self.scheduler.get_request_counts())
            raise
        finally:
            shield.may_break = False

    def _update(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._process_aborts_queue()  # what was aborted while the model ran must not be sent
        return self.scheduler.update_from_output(scheduler_output, model_output)

    def post_step(self, model_executed: bool) -> None:
        """After each step: draft tokens for the next one."""
        if model_executed:
            drafts = self.executor.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)

    def _log_iteration(self, scheduler_output: SchedulerOutput, start: float) -> None:
        if self._log_iterations:
            logger.info(describe_iteration(self._num_iterations, scheduler_output, time.perf_counter() - start))
            self._num_iterations += 1

    # -- control -----------------------------------------------------------------------------------------------

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do."""
        return self.ready_response.supported_tasks

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. False if running requests are in the way and may not be preempted."""
        with InterruptShield():
            return self.scheduler.reset_prefix_cache(reset_running_requests)

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling. abort: end all requests first. keep: freeze them, to go on after `resume_scheduler`.

        With abort their clients hear of it from the next step. `clear_cache` forgets all cached prefixes; frozen
        requests are then computed again. Raises ValueError for "wait" (the caller's thread runs the steps: it can wait
        by itself) and for an unknown mode.
        """
        if mode not in ("abort", "keep"):
            hint = "run steps until none is left, then pause" if mode == "wait" else "use 'abort' or 'keep'"
            raise ValueError(f"pause mode {mode!r} is not possible for an engine in this process; {hint}")
        with InterruptShield():
            if mode == "abort":
                self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED, report=True)
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
            if clear_cache:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def resume_scheduler(self) -> None:
        """Schedule everything again."""
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def is_scheduler_paused(self) -> bool:
        """Whether new requests are not scheduled."""
        return self.scheduler.pause_state is not PauseState.UNPAUSED

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method on every worker; one result each."""
        return self.executor.collective_rpc(method, timeout, args, kwargs)

    def profile(self, is_start: bool = True, prefix: str | None = None) -> None:
        """Start or stop the workers' profiler."""
        self.executor.profile(is_start, prefix)

    def execute_dummy_batch(self) -> None:
        """A forward pass that serves nobody."""
        self.executor.execute_dummy_batch()

    def shutdown(self) -> None:
        """End the workers and release everything. May be called twice."""
        self.executor.shutdown()
        self.scheduler.shutdown()
        gc.unfreeze()
