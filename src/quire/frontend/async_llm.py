"""`AsyncLLM`: the engine for an asyncio program, one async iterator per request.

::

    async with AsyncLLM.from_engine_args(EngineArgs("path/to/checkpoint")) as llm:
        async for output in llm.generate("Hello", SamplingParams(max_tokens=8), "my-id"):
            print(output.outputs[0].text)

The same composition as `LLMEngine`; instead of a caller's step loop, one task takes what the core sends and gives every
request's outputs to its reader.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.errors import EngineDeadError
from quire.frontend.admission import Reservation
from quire.frontend.client.base import AsyncEngineCoreClient, make_async_client
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.frontend.new_request import NewRequest, Params, PromptType
from quire.frontend.output_handler import OutputHandler, RequestOutputCollector
from quire.frontend.request_intake import Inputs, RequestIntake
from quire.frontend.request_pipeline import RequestPipeline, load_tokenizer
from quire.frontend.text.tokenizer import Tokenizer
from quire.lora_request import LoRARequest
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.timeline import stamp
from quire.wire.engine_core import EngineCoreRequest, PauseMode
from quire.wire.handshake import ClientAddresses
from quire.wire.stats import EngineSnapshot


class AsyncLLM:
    """A model and the engine that runs it, for one event loop: that of its first call.

    `client` is the engine core to use; without one a new core is started as `config` says, or with `client_addresses`
    that of another process is attached to. Both block, and raise ConfigError or ModelLoadError when that cannot work.
    Use it as an async context manager, or call `shutdown()`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_stats: bool | None = None,
        client: AsyncEngineCoreClient | None = None,
        client_addresses: ClientAddresses | None = None,
        stat_loggers: Sequence[StatLogger] | None = None,
    ) -> None:
        self.model_config = config.model_config
        self.log_stats = not config.observability_config.disable_log_stats if log_stats is None else log_stats
        stamp("configuration")
        get_tokenizer = functools.cache(partial(load_tokenizer, config.model_config))
        if client is None:
            client = make_async_client(
                config, log_stats=self.log_stats, client_addresses=client_addresses, meanwhile=get_tokenizer
            )
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
        self._intake = RequestIntake(config, self.engine_core, self.pipeline)
        self.pipeline.stats.attach(self.engine_core, self._intake.admission.rejections)
        self.admission = self._intake.admission
        """The queue of waiting requests and its limits. A server reserves room here before it renders a prompt."""
        self.text_thread = self._intake.text_thread
        """The thread for work on long texts."""
        self.tokenizer = tokenizer
        """The tokenizer; None if the engine was started without one."""
        self._output_handler = OutputHandler(self.engine_core, self.pipeline)
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_engine_config(cls, config: EngineConfig, *, stat_loggers: Sequence[StatLogger] | None = None) -> AsyncLLM:
        """Returns an engine of a complete configuration."""
        return cls(config, stat_loggers=stat_loggers)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        usage_context: str = "serving",
        stat_loggers: Sequence[StatLogger] | None = None,
    ) -> AsyncLLM:
        """Returns an engine for the arguments. `usage_context` picks the default budgets: "offline" or "serving"."""
        return cls(engine_args.create_engine_config(usage_context), stat_loggers=stat_loggers)

    def __repr__(self) -> str:
        return f"AsyncLLM(model={self.model_config.model!r})"

    async def __aenter__(self) -> AsyncLLM:
        self._require_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._end_requests()
        await asyncio.to_thread(self.engine_core.shutdown)
        await asyncio.to_thread(self.pipeline.close)

    # -- requests -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: PromptType | EngineCoreRequest | Inputs,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        timeout_s: float | None = None,
        reservation: Reservation | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a request as they come: whole so far, what is new, or the end only (`output_kind`).

        A reader that is slower than the model gets fewer, longer outputs. Ending the iteration in any way (break, an
        exception, cancellation, dropping the iterator) aborts the request. The first step of the iterator raises what
        `add_request` does. Later steps raise GenerationError if the engine fails on this request, EngineDeadError if it
        dies for good, DeadlineExceededError after `timeout_s` (default: --request-timeout-s), and SlowClientError if
        output was not taken for --slow-client-timeout-s.

        `prompt` may be an async generator of `StreamingInput`: a session, whose inputs are answered one after the other
        (`frontend/session.py`). It lasts until the generator ends and the last answer is given.
        """
        return self._stream(
            NewRequest(
                request_id=request_id,
                prompt=prompt,
                params=self.pipeline.choose_params(prompt, sampling_params),
                prompt_text=prompt_text,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs or {},
                trace_headers=trace_headers,
                lora_request=lora_request,
                data_parallel_rank=data_parallel_rank,
                timeout_s=timeout_s,
                reservation=reservation,
            )
        )

    def encode(
        self,
        prompt: PromptType | EngineCoreRequest,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        reservation: Reservation | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yields the one output of a pooling request. Raises ValidationError where the model does not pool."""
        return self._stream(
            NewRequest(
                request_id=request_id,
                prompt=prompt,
                params=pooling_params,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs or {},
                trace_headers=trace_headers,
                lora_request=lora_request,
                timeout_s=timeout_s,
                reservation=reservation,
            )
        )

    async def _stream(self, new: NewRequest) -> AsyncGenerator[Any, None]:
        """Yields the outputs of a request, all of the kind its parameters ask for."""
        collector = await self.add_new(new)
        try:
            async for output in collector:
                yield output
        finally:
            if not collector.is_final:
                await self.abort(collector.request_id, internal=True)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType | EngineCoreRequest | Inputs,
        params: Params | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        prompt_text: str | None = None,
        timeout_s: float | None = None,
        reservation: Reservation | None = None,
    ) -> RequestOutputCollector:
        """Queues a request and returns the collector of its outputs. `generate` also aborts it when its reader ends.

        `params` of None are the model's defaults. `reservation` is one that the caller got from `admission`; this call
        uses it up, even if it raises. Raises OverloadedError, ValidationError, TypeError for an id that is not a str,
        DeadlineExceededError, EngineDeadError.
        """
        return await self.add_new(
            NewRequest(
                request_id=request_id,
                prompt=prompt,
                params=self.pipeline.choose_params(prompt, params),
                prompt_text=prompt_text,
                arrival_time=arrival_time,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs or {},
                trace_headers=trace_headers,
                lora_request=lora_request,
                data_parallel_rank=data_parallel_rank,
                timeout_s=timeout_s,
                reservation=reservation,
            )
        )

    async def add_new(self, new: NewRequest) -> RequestOutputCollector:
        """Queues a request. Returns the collector of its outputs. Raises as `add_request`."""
        try:
            self._require_loop()
            if self.dead_error is not None:
                raise self.dead_error
        except BaseException as e:
            if new.reservation is not None:
                new.reservation.release(e)
            raise
        return await self._intake.add(new)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Aborts requests by the user's id, or several, or internal ones. Unknown and finished ids are ignored.

        A reader of such a request gets its last output, with finish reason "abort".
        """
        await self._intake.abort([request_id] if isinstance(request_id, str) else request_id, internal)

    def check_admission(self, num_reqs: int = 1, num_tokens: int = 1, num_output_tokens: int = 0) -> None:
        """Raises OverloadedError if so much more would be refused now. Nothing is reserved."""
        self.admission.check_admission(num_reqs, num_tokens, num_output_tokens)

    def _require_loop(self) -> None:
        """Takes outputs from the first call on. Raises RuntimeError on any loop but that of the first call."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._output_handler.start()
        elif self._loop is not loop:
            raise RuntimeError(
                "this AsyncLLM belongs to another event loop, that of its first call; make one per loop, or hand "
                "coroutines over with asyncio.run_coroutine_threadsafe"
            )

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error of an engine that serves no requests any more; None while it does."""
        return self._output_handler.dead_error

    @property
    def errored(self) -> bool:
        """True once the engine is gone for good."""
        return self.dead_error is not None or self.engine_core.engine_dead

    @property
    def is_running(self) -> bool:
        """True while requests are taken."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """The opposite of `is_running`."""
        return self.errored

    @property
    def is_ready(self) -> bool:
        """True if the engine would work on a request now; False while a core that died is being started again."""
        return not self.errored and self.engine_core.is_ready

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine is gone for good. Generates nothing: it answers at once, however busy
        the engine is."""
        if self.errored:
            raise self.dead_error or EngineDeadError("the engine core is gone")

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of live requests; the n outputs of a prompt count one by one."""
        return self.pipeline.output_processor.get_num_unfinished_requests()

    async def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ValidationError if the engine was started without one."""
        return self.pipeline.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters `generate` uses without any."""
        return self.pipeline.input_processor.get_default_sampling_params()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns the tasks of the model: ("generate",) or pooling tasks."""
        return self.engine_core.ready_response.supported_tasks

    async def do_log_stats(self) -> None:
        """Makes the statistics loggers write now."""
        self.pipeline.stat_loggers.log()

    async def get_snapshot(self) -> EngineSnapshot:
        """Returns the blocks and requests of the core at this moment, for dashboards. Waits for the step in
        progress."""
        snapshot: EngineSnapshot = await self.engine_core.call_utility_async("get_snapshot")
        return snapshot

    # -- control ------------------------------------------------------------------------------------------------------

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Stops generating; returns when nothing runs any more. New requests wait for `resume_generation`.

        abort: end all requests. wait: let them end (so does `wait_for_inflight_requests`, the older name). keep: freeze
        them.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        await self.engine_core.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_generation(self) -> None:
        """Resumes generating."""
        await self.engine_core.call_utility_async("resume_scheduler")

    async def is_paused(self) -> bool:
        """Returns True while new requests wait for `resume_generation`."""
        return bool(await self.engine_core.call_utility_async("is_scheduler_paused"))

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses and gives memory back: 0 none, 1 the KV cache, 2 the weights, too."""
        with self.pipeline.stats.operations.timed("sleep") as operations:
            await self.engine_core.call_utility_async("sleep", level, mode)
            operations.set_sleep_level(level)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Takes memory again, all of it or by tag. Returns True once the engine serves."""
        with self.pipeline.stats.operations.timed("wake") as operations:
            is_awake: bool = await self.engine_core.call_utility_async("wake_up", tags)
            if is_awake:
                operations.set_sleep_level(0)
            return is_awake

    async def is_sleeping(self) -> bool:
        """Returns True between `sleep` and the `wake_up` that ends it."""
        return bool(await self.engine_core.call_utility_async("is_sleeping"))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets all cached prefixes. Returns False if running requests held blocks and nothing was done."""
        args = reset_running_requests, reset_connector
        return bool(await self.engine_core.call_utility_async("reset_prefix_cache", *args))

    async def reset_mm_cache(self) -> None:
        """Forgets processed images and sounds: there are none yet."""

    async def reset_encoder_cache(self) -> None:
        """Forgets encoder outputs: there are none yet."""

    async def update_weights(self, path: str, version: str | None = None) -> str:
        """Replaces the weights by those of another checkpoint directory. Returns the new weight version."""
        with self.pipeline.stats.operations.timed("update"):
            return str(await self.engine_core.call_utility_async("update_weights", os.path.abspath(path), version))

    async def get_weight_version(self) -> str:
        """Returns the version of the weights that are loaded; "0" for those of start-up."""
        return str(await self.engine_core.call_utility_async("get_weight_version"))

    async def get_trace(self, seconds: float = 10.0) -> bytes:
        """Returns the events of the last `seconds`, as JSON for Perfetto. Raises ValidationError without
        --trace-events."""
        return self.pipeline.encode_trace(await self.engine_core.call_utility_async("get_trace", seconds))

    async def release_kv_cache_memory(self, mode: PauseMode = "abort") -> None:
        """Pauses and gives back the KV cache only; `wake_up` takes it again."""
        with self.pipeline.stats.operations.timed("release_kv_cache_memory") as operations:
            await self.engine_core.call_utility_async("release_kv_cache_memory", mode)
            operations.set_sleep_level(1)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter; with `load_inplace` again, for requests that come from now on. Returns True.

        Not needed before a request names the adapter. Raises ClientError for one that cannot be served.
        """
        adapters = self.pipeline.input_processor.adapters
        checked = await asyncio.to_thread(adapters.check, lora_request)
        await self.engine_core.call_utility_async("add_lora", checked)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Unloads an adapter; requests under way end with it. Returns False for an unknown id."""
        self.pipeline.input_processor.adapters.require_enabled("an adapter was to be removed")
        return bool(await self.engine_core.call_utility_async("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """Returns the ids of the adapters in memory."""
        self.pipeline.input_processor.adapters.require_enabled("adapters were to be listed")
        return set(await self.engine_core.call_utility_async("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter from being evicted. Raises ClientError for one that is not in memory."""
        self.pipeline.input_processor.adapters.require_enabled("an adapter was to be pinned")
        return bool(await self.engine_core.call_utility_async("pin_lora", lora_id))

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the worker class on every worker. Returns one result per worker."""
        return list(await self.engine_core.call_utility_async("collective_rpc", method, timeout, args, kwargs or {}))

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Starts the workers' profiler. Counts of None are those of --profiler-config."""
        await self.engine_core.call_utility_async("profile", True, profile_prefix, delay_iterations, max_iterations)

    async def stop_profile(self) -> None:
        """Stops the workers' profiler."""
        await self.engine_core.call_utility_async("profile", False)

    # -- the end ------------------------------------------------------------------------------------------------------

    def expect_shutdown(self) -> None:
        """Announces that `shutdown` follows once the live requests have ended: a core that dies meanwhile is started
        again for them only. From any thread."""
        self.engine_core.expect_shutdown()

    def shutdown(self) -> None:
        """Aborts what is live and releases the core, which may take as long as a step. From any thread;
        idempotent."""
        loop = self._loop
        self._output_handler.note_shutdown()
        if loop is None or _is_running_here(loop):
            self._end_requests()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(self._end_requests)
        self.engine_core.shutdown()
        self.pipeline.close()

    def _end_requests(self) -> None:
        """Ends all requests with finish reason "abort"; no request is taken from now on."""
        self._intake.close()
        self._output_handler.stop()


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
