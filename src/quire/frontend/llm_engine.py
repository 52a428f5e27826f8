"""The engine as a synchronous object: add requests, step, collect outputs.

Composition root of the offline frontend: tokenizer, input and output processor, statistics, and a client of an engine
core wherever that lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.errors import ValidationError
from quire.frontend.client.base import EngineCoreClient, make_client
from quire.frontend.input_processor import InputProcessor
from quire.frontend.metrics.manager import StatLogger, StatLoggerManager
from quire.frontend.metrics.stats import IterationStats
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.parallel_sampling import fan_out
from quire.frontend.prompts import PromptType
from quire.frontend.tokenizer import Tokenizer
from quire.interrupts import InterruptShield
from quire.lora_request import LoRARequest
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest


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
        self.tokenizer = _load_tokenizer(config)
        self.engine_core = make_client(config, log_stats=self.log_stats) if client is None else client
        ready = self.engine_core.ready_response
        self.input_processor = InputProcessor(
            config.model_config, self.tokenizer, ready.max_model_len, ready.supported_tasks
        )
        self.output_processor = OutputProcessor(
            self.tokenizer, log_stats=self.log_stats, stream_interval=config.scheduler_config.stream_interval
        )
        self.stat_loggers = StatLoggerManager(stat_loggers if self.log_stats else ())
        self._undelivered: list[RequestOutput | PoolingRequestOutput] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage: str = "offline") -> LLMEngine:
        """An engine as the arguments say. `usage` picks the default budgets: "offline" or "serving"."""
        return cls(engine_args.create_engine_config(usage))

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
    ) -> str:
        """Validate a request and queue it; its internal id. `params` of None are the model's defaults.

        An `EngineCoreRequest` made by the input processor is taken as it is, with `prompt_text` to show. Raises
        ValidationError for what the request holds, TypeError for an id that is not a str.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
        if isinstance(prompt, EngineCoreRequest):
            if prompt.request_id != request_id:
                raise ValidationError(
                    f"request_id {request_id!r} is not that of the request, {prompt.request_id!r}", param="request_id"
                )
            return self._submit(prompt, prompt_text)
        request, text = self.input_processor.process_inputs(
            request_id,
            prompt,
            self.input_processor.get_default_sampling_params() if params is None else params,
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        return self._submit(request, text if prompt_text is None else prompt_text)

    def _submit(self, request: EngineCoreRequest, text: str | None) -> str:
        """Register a request here, then tell the core (checklist S2-LE-002); on failure neither knows it."""
        self.input_processor.assign_request_id(request)
        parent, children = fan_out(request)
        try:
            for index, child in enumerate(children):
                with InterruptShield():
                    self.output_processor.add_request(child, text, parent, index)
                self.engine_core.add_request(child)
        except BaseException:
            self.abort_request([child.request_id for child in children], internal=True)
            raise
        return request.request_id

    def abort_request(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """Abort by the users' ids (or internal ones). Unknown and finished ids are ignored."""
        with InterruptShield():
            stats = IterationStats() if self.log_stats else None
            aborted = self.output_processor.abort_requests(request_ids, internal=internal, iteration_stats=stats)
            if aborted:
                self.engine_core.abort_requests(aborted)
                self.stat_loggers.record(None, stats)

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Run one step; the outputs it gave (checklist S2-LE-006).

        Ctrl-C takes effect between the core's work and ours, or after it; then the next step gives the outputs.
        """
        outputs = self.engine_core.get_output()
        with InterruptShield():
            stats = IterationStats() if self.log_stats and outputs.outputs else None
            processed = self.output_processor.process_outputs(outputs.outputs, outputs.timestamp, stats)
            self._undelivered += processed.request_outputs
            self.engine_core.abort_requests(processed.reqs_to_abort)
            if outputs.scheduler_stats is not None or stats is not None:
                self.stat_loggers.record(outputs.scheduler_stats, stats, outputs.engine_index)
        delivered, self._undelivered = self._undelivered, []
        return delivered

    def get_num_unfinished_requests(self) -> int:
        """Live requests; the n outputs of a prompt count one by one."""
        return self.output_processor.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        """Is there anything to step for?"""
        return self.output_processor.has_unfinished_requests() or bool(self._undelivered)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValidationError if the engine was started without one."""
        if self.tokenizer is None:
            raise ValidationError("the engine was started with skip_tokenizer_init: it has no tokenizer")
        return self.tokenizer

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model is for: ("generate",) or pooling tasks."""
        return self.engine_core.ready_response.supported_tasks

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False if running requests held blocks and nothing was done."""
        return self.engine_core.reset_prefix_cache(reset_running_requests)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker; one result per worker."""
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def do_log_stats(self) -> None:
        """Let the statistics loggers write now."""
        self.stat_loggers.log()

    def shutdown(self) -> None:
        """Abort what is live and release the core. Idempotent."""
        self.abort_request(list(self.output_processor.request_states), internal=True)
        self.engine_core.shutdown()


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Before the core starts: a broken tokenizer should not cost the loading of a model."""
    model_config = config.model_config
    if model_config.skip_tokenizer_init:
        return None
    tokenizer = Tokenizer.from_dir(model_config.tokenizer_dir, model_config.tokenizer_mode)
    if model_config.chat_template is not None:
        tokenizer.use_chat_template(model_config.chat_template)
    return tokenizer
