"""The engine as a synchronous object: add requests, step, collect outputs.

Composition root of the offline frontend: tokenizer, input and output processor, statistics, and a client of an engine
core wherever that lives.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError
from quire.frontend.admission import count_requests
from quire.frontend.client.base import EngineCoreClient, make_client
from quire.frontend.metrics.collect.ledger import Receipt
from quire.frontend.metrics.publish.snapshot import Metric, read_metrics
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.frontend.new_request import NewRequest, PromptType
from quire.frontend.request_pipeline import TIMEOUT_S, Deadlines, RequestPipeline, deadline_error, load_tokenizer
from quire.frontend.session import SessionInput
from quire.frontend.text.tokenizer import Tokenizer
from quire.interrupts import InterruptShield
from quire.lora_request import LoRARequest
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.timeline import stamp
from quire.wire.engine_core import EngineCoreRequest, PauseMode


class LLMEngine:
    """Requests in, outputs out, one step at a time. Not thread-safe.

    `client` is the engine core to use; without one a new core is started as `config` says, which raises ConfigError or
    ModelLoadError when that cannot work.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_stats: bool | None = None,
        client: EngineCoreClient | None = None,
        stat_loggers: Sequence[StatLogger] | None = None,
    ) -> None:
        self.model_config = config.model_config
        self.log_stats = not config.observability_config.disable_log_stats if log_stats is None else log_stats
        stamp("configuration")
        get_tokenizer = functools.cache(partial(load_tokenizer, config.model_config))
        if client is None:
            client = make_client(config, log_stats=self.log_stats, meanwhile=get_tokenizer)
        self.engine_core, tokenizer = client, get_tokenizer()
        self.pipeline = RequestPipeline(
            config,
            tokenizer,
            self.engine_core.ready_response,
            log_stats=self.log_stats,
            stat_loggers=stat_loggers,
            engines=self.engine_core.engine_responses,
        )
        self.pipeline.input_processor.get_ranks = lambda: self.engine_core.engine_responses
        self.pipeline.stats.attach(self.engine_core)
        self.tokenizer = tokenizer
        self.input_processor = self.pipeline.input_processor
        self.output_processor = self.pipeline.output_processor
        self._request_timeout_s = config.frontend_config.request_timeout_s
        self._deadlines: Deadlines[tuple[str, float]] = Deadlines(
            lambda item: not self.output_processor.is_live(item[0])
        )
        """Requests and the seconds they were given."""
        self._undelivered: list[RequestOutput | PoolingRequestOutput] = []
        self.pause_mode: PauseMode | None = None
        """Mode in which this engine was paused or sent to sleep; None while it runs."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: str = "offline") -> LLMEngine:
        """Returns an engine for the arguments. `usage_context` picks the default budgets: "offline" or "serving"."""
        return cls(engine_args.create_engine_config(usage_context))

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | EngineCoreRequest,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        *,
        prompt_text: str | None = None,
        resumable: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Validates a request and queues it. Returns its internal id. `params` of None are the model's defaults.

        After `timeout_s` (default: --request-timeout-s) it ends with finish reason "error", at the end of a step. An
        `EngineCoreRequest` made by the input processor is taken as it is, with `prompt_text` to show. Raises
        ValidationError for what the request holds, TypeError for an id that is not a str.

        `resumable` opens a streaming-input session: what is added later with the same id is its next input, and the one
        without `resumable` its last, which may be empty ("" or []). See `frontend/session.py` for its answers. It has
        no time limit but that given with its first input.
        """
        TIMEOUT_S.validate(timeout_s)
        new = NewRequest(
            request_id=request_id,
            prompt=prompt,
            params=self.pipeline.choose_params(prompt, params),
            prompt_text=prompt_text,
            arrival_time=arrival_time,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs or {},
            trace_headers=trace_headers,
            lora_request=lora_request,
            resumable=resumable,
            timeout_s=timeout_s,
        )
        session = self.output_processor.find_session(request_id)
        if session is not None and not isinstance(prompt, EngineCoreRequest):
            return self._submit_input(session.request_id, self.pipeline.prepare_input(session, new))
        return self._add(new)

    def _add(self, new: NewRequest) -> str:
        start = time.monotonic()
        receipt = self.pipeline.ledger.receive(count_requests(new.params))
        try:
            request, text = self.input_processor.process_inputs(new)
            timeout_s = self._request_timeout_s if new.timeout_s is None and not new.resumable else new.timeout_s
            self._submit(request, text, receipt, None if timeout_s is None else (start, timeout_s))
        except BaseException as e:
            receipt.reject(e)
            raise
        return request.request_id

    def add_prepared(self, request: EngineCoreRequest, text: str | None) -> None:
        """Queues a request that the input processor has made; `text` is shown as its prompt."""
        params = request.sampling_params
        receipt = self.pipeline.ledger.receive(1 if params is None else params.n)
        limit = None if self._request_timeout_s is None else (time.monotonic(), self._request_timeout_s)
        try:
            self._submit(request, text, receipt, limit)
        except BaseException as e:
            receipt.reject(e)
            raise

    def _submit(
        self, request: EngineCoreRequest, text: str | None, receipt: Receipt, limit: tuple[float, float] | None
    ) -> None:
        """Registers a request here, then sends it to the core. If that fails, neither keeps it.

        `limit` is (when its time began, how many seconds it has).
        """
        self.input_processor.assign_request_id(request)
        try:
            with InterruptShield():
                children = self.output_processor.register(request, text, receipt)
            for child in children:
                self.engine_core.add_request(child)
        except BaseException:
            self.abort_request([request.request_id], internal=True)
            raise
        if limit is not None:
            self._deadlines.add((request.request_id, limit[1]), sum(limit))

    def _submit_input(self, session_id: str, new: SessionInput) -> str:
        with InterruptShield():
            result = self.pipeline.add_input(session_id, new)
            self._undelivered += result.request_outputs
        self._send(result.reqs_to_add)
        return session_id

    def _send(self, reqs_to_add: list[EngineCoreRequest]) -> None:
        """Sends further requests of sessions; on failure these sessions end."""
        try:
            for request in reqs_to_add:
                self.engine_core.add_request(request)
        except BaseException:
            self.abort_request([request.request_id for request in reqs_to_add], internal=True)
            raise

    def abort_request(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """Aborts requests by the users' ids (or internal ones). Unknown and finished ids are ignored."""
        with InterruptShield():
            aborted = self.pipeline.forget(request_ids, internal=internal)
            if aborted:
                self.engine_core.abort_requests(aborted)

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Runs one step. Returns its outputs.

        Ctrl-C takes effect between the core's work and the frontend's, or after it; then the next step returns the
        outputs.
        """
        if not self._undelivered or self.output_processor.has_unfinished_requests():
            outputs = self.engine_core.get_output()
            with InterruptShield():
                (processed,) = self.pipeline.process(outputs)
                self._undelivered += processed.request_outputs
                if processed.reqs_to_abort:
                    self.engine_core.abort_requests(processed.reqs_to_abort)
                if processed.reqs_to_add:
                    self._send(processed.reqs_to_add)
                if self._deadlines:
                    self._expire()
        delivered, self._undelivered = self._undelivered, []
        return delivered

    def _expire(self) -> None:
        for request_id, timeout_s in self._deadlines.take_due(time.monotonic()):
            failed = self.pipeline.fail([request_id], deadline_error(timeout_s))
            self._undelivered += failed.request_outputs
            self.engine_core.abort_requests(failed.reqs_to_abort)

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of live requests; the n outputs of a prompt count one by one."""
        return self.output_processor.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        """Returns True if there is anything to step for."""
        return self.output_processor.has_unfinished_requests() or bool(self._undelivered)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ValidationError if the engine was started without one."""
        return self.pipeline.get_tokenizer()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns the tasks of the model: ("generate",) or pooling tasks."""
        return self.engine_core.ready_response.supported_tasks

    # -- control ------------------------------------------------------------------------------------------------------

    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops generating; new requests wait for `resume_generation`.

        abort: end all requests; the next steps give their last outputs. keep: freeze them. wait: let them end first
        (ValueError for an engine core in this process: the caller runs its steps).
        """
        self.engine_core.call_utility("pause_scheduler", mode, clear_cache)
        self.pause_mode = mode

    def resume_generation(self) -> None:
        """Resumes generating."""
        self.engine_core.call_utility("resume_scheduler")
        self.pause_mode = None

    def is_paused(self) -> bool:
        """Returns True while new requests wait for `resume_generation`."""
        return bool(self.engine_core.call_utility("is_scheduler_paused"))

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses and gives memory back until `wake_up`; no request may be added meanwhile.

        0 gives nothing back; 1 the KV cache (on an accelerator the weights move to main memory, too); 2 the KV cache
        and the weights. abort: live requests end with what they have. keep: they wait.
        """
        with self.pipeline.stats.operations.timed("sleep") as operations:
            self.engine_core.call_utility("sleep", level, mode)
            operations.set_sleep_level(level)
        self.pause_mode = mode

    def release_kv_cache_memory(self, mode: PauseMode = "abort") -> None:
        """Pauses and gives back the memory of the KV cache alone."""
        with self.pipeline.stats.operations.timed("release_kv_cache_memory") as operations:
            self.engine_core.call_utility("release_kv_cache_memory", mode)
            operations.set_sleep_level(1)
        self.pause_mode = mode

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Takes the memory again: all of it, or "weights" and "kv_cache" one by one. Returns True once the model can
        run.

        Weights are read again from the checkpoint they came from last. Answers are the same as before the sleep.
        """
        with self.pipeline.stats.operations.timed("wake") as operations:
            is_awake: bool = self.engine_core.call_utility("wake_up", tags)
        if is_awake:
            self.pause_mode = None
            operations.set_sleep_level(0)
        return is_awake

    def is_sleeping(self) -> bool:
        """Returns True between `sleep` and the `wake_up` that ends it."""
        return bool(self.engine_core.call_utility("is_sleeping"))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets all cached prefixes. Returns False if running requests held blocks and nothing was done."""
        return bool(self.engine_core.call_utility("reset_prefix_cache", reset_running_requests, reset_connector))

    def reset_mm_cache(self) -> None:
        """Forgets processed images and sounds: there are none yet."""

    def reset_encoder_cache(self) -> None:
        """Forgets encoder outputs: there are none yet."""

    def update_weights(self, path: str | Path, version: str | None = None) -> str:
        """Replaces the weights in place by those of a checkpoint directory of the same architecture. Returns the new
        version.

        A checkpoint that does not fit raises ModelLoadError and changes nothing. `version` is a label; without one it
        is the old one plus 1. Requests in progress keep their tokens and go on with the new weights; tokenizer and
        sampling defaults stay those the model was loaded with.
        """
        with self.pipeline.stats.operations.timed("update"):
            return str(self.engine_core.call_utility("update_weights", os.path.abspath(path), version))

    def get_trace(self, seconds: float = 10.0) -> bytes:
        """Returns the events of the last `seconds`, as JSON for Perfetto. Raises ValidationError without
        --trace-events."""
        return self.pipeline.encode_trace(self.engine_core.call_utility("get_trace", seconds))

    def get_weight_version(self) -> str:
        """Returns the version of the weights that are loaded; "0" for those of start-up."""
        return str(self.engine_core.call_utility("get_weight_version"))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter; with `load_inplace` again, for requests that come from now on. Returns True.

        Not needed before a request names the adapter. Raises ClientError for one that cannot be served.
        """
        adapters = self.input_processor.adapters
        checked = adapters.check(lora_request)
        self.engine_core.call_utility("add_lora", checked)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Unloads an adapter; requests under way end with it. Returns False for an unknown id."""
        self.input_processor.adapters.require_enabled("an adapter was to be removed")
        return bool(self.engine_core.call_utility("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Returns the ids of the adapters in memory."""
        self.input_processor.adapters.require_enabled("adapters were to be listed")
        return set(self.engine_core.call_utility("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter from being evicted. Raises ClientError for one that is not in memory."""
        self.input_processor.adapters.require_enabled("an adapter was to be pinned")
        return bool(self.engine_core.call_utility("pin_lora", lora_id))

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Starts the workers' profiler. Counts of None are those of --profiler-config, and so is the directory of the
        trace (the working directory)."""
        self.engine_core.call_utility("profile", True, profile_prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> None:
        """Stops the workers' profiler and writes its trace."""
        self.engine_core.call_utility("profile", False)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the worker class on every worker. Returns one result per worker.

        With the engine in this process also a function, with the worker as its first argument; elsewhere
        ValidationError.
        """
        return list(self.engine_core.call_utility("collective_rpc", method, timeout, args, kwargs or {}))

    def do_log_stats(self) -> None:
        """Makes the statistics loggers write now."""
        self.pipeline.stat_loggers.log()

    def get_metrics(self) -> list[Metric]:
        """Returns all metrics at this moment: `Counter`, `Gauge`, `Histogram`, `Vector`
        (quire.frontend.metrics.publish.snapshot). Raises ConfigError unless made with `disable_log_stats=False`."""
        metrics = self.pipeline.stats.metrics
        if metrics is None:
            raise ConfigError(
                "there are no metrics: the engine was made with disable_log_stats=True, the default of LLM, or with "
                "stat_loggers of its own; make it with disable_log_stats=False"
            )
        return read_metrics(metrics.snapshot())

    def shutdown(self) -> None:
        """Aborts what is live and releases the core. Idempotent."""
        self.abort_request(list(self.output_processor.request_states), internal=True)
        self.engine_core.shutdown()
        self.pipeline.close()
