"""The common part of `LLMEngine` and `AsyncLLM`: a request on its way down, its outputs on their way up.

It has everything but the engine core and the loop around it: validation, the state of live requests, statistics.
`Deadlines` holds which of many items is due next; it reads no clock.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.errors import DeadlineExceededError, PromptTooLongError, ValidationError
from quire.field_bounds import FieldBound
from quire.frontend.adapters import make_door
from quire.frontend.drafts import DraftCounts
from quire.frontend.input_processor import InputProcessor, parse_prompt
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.frontend_stats import FrontendStats
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.frontend.new_request import NewRequest, Params
from quire.frontend.output_processor import OutputProcessor, OutputProcessorOutput
from quire.frontend.request_state import RequestState
from quire.frontend.session import SessionInput
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.tracing import RequestTracer, StartupReport, make_span_sender, make_start_phases
from quire.timeline import get_stamps, stamp
from quire.version import __version__
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest, FinishReason
from quire.wire.trace import BatchTimes, TraceWindow, encode_window


class RequestPipeline:
    """Owns the processors and the statistics of one frontend. Knows no engine core: it returns what must be sent."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        ready: EngineCoreReadyResponse,
        *,
        log_stats: bool,
        stat_loggers: Sequence[StatLogger] | None = None,
        engines: Mapping[int, EngineCoreReadyResponse] | None = None,
    ) -> None:
        """`engines` are the responses that `ready` joins; None: there is one engine."""
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(
            config.model_config, tokenizer, ready.max_model_len, ready.supported_tasks, make_door(config)
        )
        self.ledger = RequestLedger()
        self._span_sender = make_span_sender(config.observability_config)
        speculation = config.speculative_config
        self.output_processor = OutputProcessor(
            tokenizer,
            log_stats=log_stats,
            stream_interval=config.scheduler_config.stream_interval,
            max_model_len=ready.max_model_len,
            ledger=self.ledger,
            tracer=(
                None if self._span_sender is None else RequestTracer(config.model_config.name, self._span_sender.send)
            ),
            drafts=(
                DraftCounts(speculation.drafting.num_speculative_tokens, speculation.per_request_spec_decode_metrics)
                if speculation.drafting is not None
                else None
            ),
        )
        self._model_name = config.model_config.name
        self._batch_times: deque[BatchTimes] | None = (
            deque(maxlen=config.observability_config.trace_events) if config.observability_config.trace_events else None
        )
        """For traces: times at which outputs of the core were processed; None if traces are off."""
        self.stats = FrontendStats(
            config,
            ready,
            self.output_processor,
            ledger=self.ledger,
            log_stats=log_stats,
            stat_loggers=stat_loggers,
            engines=engines,
        )
        self.stat_loggers = self.stats.loggers
        self._startup: StartupReport | None = StartupReport(ready)
        """The report of the start; None once there was an output."""
        if self._span_sender is not None:
            self._span_sender.send_start(make_start_phases(get_stamps(), ready.stamps))

    # -- down ---------------------------------------------------------------------------------------------------------

    def choose_params(self, prompt: object, params: Params | None) -> Params:
        """Returns the parameters of a request: those of an `EngineCoreRequest`, `params`, or the model's defaults."""
        if isinstance(prompt, EngineCoreRequest):
            return prompt.params
        return self.input_processor.get_default_sampling_params() if params is None else params

    def prepare_input(self, session: RequestState, new: NewRequest) -> SessionInput:
        """Returns the next input of a live session; the last one if `new` is not resumable.

        The last one may be empty: "" or []. Text gets no special tokens unless `tokenization_kwargs` ask for them.
        Raises as `process_inputs`, and ValidationError for another cache salt than the session's, PromptTooLongError if
        the context has no room for what is certain to come before it; the session goes on all the same.
        """
        parsed = parse_prompt(new.prompt)
        if not new.resumable and not parsed.text and not parsed.token_ids:
            now = time.time() if new.arrival_time is None else new.arrival_time
            return SessionInput([], None, now, is_last=True)
        request, text = self.input_processor.process_inputs(
            NewRequest(
                request_id=session.external_req_id,
                prompt=parsed,
                params=new.params,
                arrival_time=new.arrival_time,
                tokenization_kwargs={"add_special_tokens": False, **new.tokenization_kwargs},
                resumable=True,
            )
        )
        if parsed.cache_salt not in (None, session.request.cache_salt):
            raise ValidationError(
                "the cache_salt of a session is that of its first input; leave it out of the others", param="cache_salt"
            )
        token_ids = request.prompt_token_ids or []
        num_tokens, room = session.min_context_len + len(token_ids), self.input_processor.max_model_len - 1
        if num_tokens > room:
            raise PromptTooLongError(
                f"with this input of {len(token_ids)} tokens the session has at least {num_tokens}; the context takes "
                f"{room} and one output (max_model_len); end the session, or raise --max-model-len",
                param="prompt",
                value=len(token_ids),
            )
        return SessionInput(token_ids, request.sampling_params, request.arrival_time, not new.resumable, text)

    def add_input(self, session_id: str, new: SessionInput) -> OutputProcessorOutput:
        """Adds an input to a session: what to send to the core, and outputs that no queue takes."""
        stats = self.stats.open_iteration()
        result = self.output_processor.add_input(session_id, new, stats)
        if session_id not in self.output_processor.request_states:
            self.stats.close_iteration(stats)
        return result

    def forget(self, request_ids: Iterable[str], *, internal: bool) -> list[str]:
        """Forgets requests that are aborted. Returns the internal ids to abort in the core. Unknown ids are ignored."""
        stats = self.stats.open_iteration()
        aborted = self.output_processor.abort_requests(request_ids, internal=internal, iteration_stats=stats)
        if aborted:
            self.stats.close_iteration(stats)
        return aborted

    def fail(
        self, request_ids: Iterable[str], error: Exception, reason: FinishReason = FinishReason.ERROR
    ) -> OutputProcessorOutput:
        """Ends requests (internal ids) with `error`. Returns what to abort in the core, and outputs that no queue
        takes."""
        stats = self.stats.open_iteration()
        failed = self.output_processor.fail_requests(request_ids, error, reason=reason, iteration_stats=stats)
        if failed.reqs_to_abort:
            self.stats.close_iteration(stats)
        return failed

    # -- up -----------------------------------------------------------------------------------------------------------

    def process(self, outputs: EngineCoreOutputs, batch_size: int = sys.maxsize) -> Iterator[OutputProcessorOutput]:
        """Yields the results of a step's outputs, batch by batch.

        Each batch is in the statistics before it is yielded: they agree with the state of the requests whenever another
        coroutine runs.
        """
        start, batch = time.monotonic(), outputs.outputs
        if self._startup is not None and batch:
            self._startup.finish()
            self._startup = None
        for first in range(0, max(len(batch), 1), batch_size):
            end = first + batch_size
            stats = self.stats.open_iteration() if batch else None
            result = self.output_processor.process_outputs(batch[first:end], outputs.timestamp, stats)
            self.stats.close_batch(outputs, stats, is_last=end >= len(batch))
            yield result
        if self._batch_times is not None and batch:
            self._batch_times.append((outputs.timestamp, start, time.monotonic()))

    def encode_trace(self, window: TraceWindow) -> bytes:
        """Returns the steps of the core, and the processing of their outputs, as JSON for Perfetto."""
        batches = [times for times in self._batch_times or () if times[2] >= window.start]
        facts = {"model": self._model_name, "quire": __version__, "seconds": round(window.end - window.start, 3)}
        return encode_window(window, batches, **facts, kv_cache_blocks=window.num_blocks)

    def close(self) -> None:
        """Sends the spans of finished requests that are left. Bounded in time."""
        if self._span_sender is not None:
            self._span_sender.close()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ValidationError if the engine was started without one."""
        if self.tokenizer is None:
            raise ValidationError("the engine was started with skip_tokenizer_init: it has no tokenizer")
        return self.tokenizer


def load_tokenizer(model_config: ModelConfig) -> Tokenizer | None:
    """Returns the tokenizer of a model. Called while the core starts: a broken tokenizer ends that start at once."""
    if model_config.skip_tokenizer_init:
        return None
    tokenizer = Tokenizer.from_dir(model_config.tokenizer_dir, model_config.tokenizer_mode)
    if model_config.chat_template is not None:
        tokenizer.use_chat_template(model_config.chat_template)
    stamp("tokenizer")
    return tokenizer


T = TypeVar("T")
TIMEOUT_S = FieldBound("timeout_s", "float", 0, 1e9, exclusive_minimum=True, optional=True)
MIN_COMPACTION = 64


class Deadlines(Generic[T]):
    """Items and their deadlines. An item that `is_over` need not be taken out: it is forgotten in time.

    Memory stays within twice the live items: when as many are over, they are swept out.
    """

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._heap: list[tuple[float, int, T]] = []
        self._count = itertools.count()
        self._compact_at = MIN_COMPACTION

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: T, due: float) -> None:
        """Adds an item that is due at `due`, on the caller's clock."""
        heapq.heappush(self._heap, (due, next(self._count), item))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if not self._is_over(entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = max(MIN_COMPACTION, 2 * len(self._heap))

    @property
    def next_due(self) -> float | None:
        """Time of the earliest deadline; None: there is none."""
        while self._heap and self._is_over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[T]:
        """Takes out and returns the items that are due and not over, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            item = heapq.heappop(self._heap)[2]
            if not self._is_over(item):
                due.append(item)
        return due


def deadline_error(timeout_s: float) -> DeadlineExceededError:
    """Returns the error that the reader of an overdue request gets."""
    return DeadlineExceededError(
        f"deadline_exceeded: the request was not finished within {timeout_s:g} s; it was ended there "
        "(timeout_s, --request-timeout-s)"
    )
