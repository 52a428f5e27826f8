"""One live request as the frontend sees it: its state, the outputs it gives, and the n outputs of one prompt."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

from quire.frontend.admission import Reservation
from quire.frontend.drafts import DraftCounts
from quire.frontend.metrics.collect.events import RequestOwner
from quire.frontend.session import SessionState
from quire.frontend.text.detokenizer import IncrementalDetokenizer, LogprobsProcessor
from quire.frontend.text.tokenizer import Tokenizer
from quire.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PromptLogprobs,
    RequestOutput,
    RequestStateStats,
)
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import FINISH_REASON_STRINGS, EngineCoreOutput, EngineCoreRequest, FinishReason

_DELTA, _FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class OutputQueue(Protocol):
    """Queue that takes the outputs of one request, if a reader awaits them."""

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None: ...


@dataclass(slots=True)
class RequestState:
    """State of a request between two outputs. Keyed by the internal id.

    What is looked at for every token stands here itself, not in the request or its parameters: each object more is a
    line more to be fetched into caches that a step of the model has emptied.
    """

    request: EngineCoreRequest
    prompt: str | None
    parent: ParentRequest | None
    index: int
    detokenizer: IncrementalDetokenizer
    logprobs: LogprobsProcessor | None
    """None where no log-probabilities were asked for."""
    shown_stats: RequestStateStats | None
    """Read it as `stats`, which brings it up to date."""
    queue: OutputQueue | None
    reservation: Reservation | None
    stream_interval: int
    output_kind: RequestOutputKind
    request_id: str
    """The internal id."""
    external_req_id: str
    """The user's id."""
    is_pooling: bool = False
    is_prefilling: bool = True
    num_cached_tokens: int | None = None
    load_span: tuple[float, float] | None = None
    """Start and end of the load of its cached blocks, on the core's clock."""
    """Prompt tokens found in the prefix cache; None before the first output."""
    num_sent_tokens: int = 0
    num_discarded_tokens: int = 0
    """Tokens generated for it that are no part of its output."""
    last_token_ts: float = 0.0
    """On the core's clock, if there are statistics."""
    session: SessionState | None = None
    """Set for a streaming-input session; the other fields are the state of its present segment."""
    num_context_tokens: int = 0
    """Prompt tokens that earlier segments have brought."""
    drafts: DraftCounts | None = None
    """None without speculation."""
    adapter: str = ""
    """Name of its LoRA adapter; empty without one."""

    @classmethod
    def from_new_request(
        cls,
        tokenizer: Tokenizer | None,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None,
        index: int,
        *,
        queue: OutputQueue | None,
        reservation: Reservation | None = None,
        log_stats: bool,
        stream_interval: int,
        drafts: DraftCounts | None = None,
    ) -> RequestState:
        """Returns the state of a request that is about to be sent to the core."""
        params, prompt_ids = request.sampling_params, request.prompt_token_ids or []
        if params is not None and not params.detokenize:
            tokenizer = None
        logprobs = None
        if params is not None and (params.logprobs, params.logprob_token_ids, params.prompt_logprobs) != (None,) * 3:
            logprobs = LogprobsProcessor(tokenizer, params, prompt_ids)
        return cls(
            request=request,
            prompt=prompt,
            parent=parent,
            index=index,
            detokenizer=IncrementalDetokenizer.from_params(tokenizer, params, prompt_ids),
            logprobs=logprobs,
            shown_stats=RequestStateStats(arrival_time=request.arrival_time) if log_stats else None,
            queue=queue,
            reservation=reservation,
            stream_interval=(params.stream_interval if params is not None else None) or stream_interval,
            output_kind=(params or request.params).output_kind,
            request_id=request.request_id,
            external_req_id=request.external_req_id or request.request_id,
            is_pooling=request.pooling_params is not None,
            session=SessionState(request.arrival_time) if request.resumable else None,
            drafts=drafts,
            adapter="" if request.lora_request is None else request.lora_request.lora_name,
        )

    def next_segment(self, tokenizer: Tokenizer | None, session: SessionState, stream_interval: int) -> RequestState:
        """Returns the state of a session that goes on with its next input."""
        new = session.queued.popleft()
        state = RequestState.from_new_request(
            tokenizer,
            new.follow(self.request, self.detokenizer.token_ids),
            new.text,
            None,
            0,
            queue=self.queue,
            reservation=self.reservation,
            log_stats=self.shown_stats is not None,
            stream_interval=stream_interval,
            drafts=None if self.drafts is None else self.drafts.new(),
        )
        session.end = None
        state.session = session
        state.num_context_tokens = state.num_prompt_tokens - len(new.token_ids)
        if state.shown_stats is not None and self.shown_stats is not None:
            state.shown_stats.is_corrupted = self.shown_stats.is_corrupted  # counted once per request
        return state

    @property
    def stats(self) -> RequestStateStats | None:
        """Times and counts that the user sees: always the same object, brought up to date. None where statistics are
        off."""
        stats = self.shown_stats
        if stats is not None:
            stats.last_token_ts = self.last_token_ts
            stats.num_generation_tokens = len(self.detokenizer.token_ids) + self.num_discarded_tokens
        return stats

    @property
    def owner(self) -> RequestOwner:
        """The owner of observations of this request."""
        return RequestOwner(self.external_req_id, self.request.trace_headers)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens; in a session all tokens that the present segment's outputs follow."""
        return len(self.request.prompt_token_ids or ())

    @property
    def min_context_len(self) -> int:
        """Least number of tokens before the next input that is added to the session."""
        queued = self.session.queued if self.session is not None else ()
        num_queued = sum(len(new.token_ids) for new in queued)
        return self.num_prompt_tokens + max(0, len(self.detokenizer.token_ids) - 1) + num_queued

    def note_prefill(self, output: EngineCoreOutput) -> None:
        """Takes in one of the first outputs, with tokens or without."""
        if output.new_token_ids:
            self.is_prefilling = False
            if self.reservation is not None:
                self.reservation.stop_waiting()
        if output.prefill_stats is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
            self.load_span = output.prefill_stats.load_span

    def update_text(self, output: EngineCoreOutput, stop_terminated: bool) -> str | None:
        """Detokenizes and takes in log-probabilities. Returns the stop string that was found, if any.

        Tokens after a stop string, and their log-probabilities, are dropped.
        """
        detokenizer = self.detokenizer
        if stop_terminated:
            params = self.request.sampling_params
            if params is not None and params.structured_outputs is not None:
                # A form may have been completed by an ordinary token, which belongs to the text.
                stop_terminated = bool(params.all_stop_token_ids.intersection(output.new_token_ids[-1:]))
        if self.logprobs is None:
            return detokenizer.update(output.new_token_ids, stop_terminated)
        before = len(detokenizer.token_ids)
        stop_string = detokenizer.update(output.new_token_ids, stop_terminated)
        num_tokens = len(detokenizer.token_ids) - before
        self.logprobs.update_from_output(output.new_logprobs, output.new_prompt_logprobs_tensors, num_tokens)
        return stop_string

    # -- outputs ------------------------------------------------------------------------------------------------------

    def make_request_output(
        self,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None = None,
        error_message: str | None = None,
        error_type: str = "",
    ) -> RequestOutput | None:
        """Returns the output to show now; None if there is nothing to show."""
        finished = finish_reason is not None
        if not finished:
            if self.output_kind is _FINAL_ONLY:
                return None
            interval, num_sent = self.stream_interval, self.num_sent_tokens
            if interval > 1 and num_sent and len(self.detokenizer.token_ids) - num_sent < interval:
                return None  # the first output is always shown
        detokenizer, logprobs, delta = self.detokenizer, self.logprobs, self.output_kind is _DELTA
        start = self.num_sent_tokens if delta else 0
        token_ids = detokenizer.token_ids[start:]
        self.num_sent_tokens = start + len(token_ids)
        completion = CompletionOutput(
            self.index,
            detokenizer.get_next_output_text(finished, delta),
            token_ids,
            None if logprobs is None else logprobs.cumulative_logprob,
            None if logprobs is None or logprobs.logprobs is None else logprobs.logprobs[start:],
        )
        completion.lora_request = self.request.lora_request
        if finish_reason is not None:
            completion.finish_reason = FINISH_REASON_STRINGS[finish_reason]
            completion.stop_reason = stop_reason
            completion.error_message, completion.error_type = error_message, error_type
            if self.drafts is not None:
                self.drafts.show_in(completion)
        return self._show(completion)

    def make_early_end(
        self, finish_reason: FinishReason, error_message: str | None = None
    ) -> RequestOutput | PoolingRequestOutput | None:
        """Returns the end of a request that is aborted or failed here, with the tokens it has."""
        if self.is_pooling:
            return self.make_pooling_output(None, finish_reason, error_message)
        return self.make_request_output(finish_reason, None, error_message)

    def make_error_output(self, message: str) -> RequestOutput | PoolingRequestOutput | None:
        """Returns the end of a request whose text cannot be made: no text, no tokens, `message`."""
        if self.is_pooling:
            return self.make_pooling_output(None, FinishReason.ERROR, message)
        return self._show(CompletionOutput(self.index, "", [], None, None, "error", error_message=message))

    def _show(self, completion: CompletionOutput) -> RequestOutput | None:
        outputs, finished = [completion], completion.finish_reason is not None
        if self.parent is not None:
            outputs, finished = self.parent.get_outputs(self.request_id, completion)
            if not outputs:
                return None
        return RequestOutput(
            request_id=self.external_req_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=None if self.logprobs is None else self._prompt_logprobs(self.logprobs),
            outputs=outputs,
            finished=finished,
            metrics=self.stats,
            lora_request=self.request.lora_request,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _prompt_logprobs(self, logprobs: LogprobsProcessor) -> PromptLogprobs | None:
        """Returns the log-probabilities of the prompt: in every output; in a stream of deltas only in the first."""
        return logprobs.take_prompt_logprobs() if self.output_kind is _DELTA else logprobs.prompt_logprobs

    def make_pooling_output(
        self, data: Any, finish_reason: FinishReason | None, error_message: str | None = None, error_type: str = ""
    ) -> PoolingRequestOutput:
        """Returns the result of a pooling request, or its end without one (`data` of None)."""
        return PoolingRequestOutput(
            request_id=self.external_req_id,
            outputs=PoolingOutput(data),
            prompt_token_ids=list(self.request.prompt_token_ids or ()),
            finished=finish_reason is not None,
            num_cached_tokens=self.num_cached_tokens or 0,
            finish_reason=None if finish_reason is None else FINISH_REASON_STRINGS[finish_reason],
            error_message=error_message,
            error_type=error_type,
        )


_INT64_RANGE = 1 << 64


class ParentRequest:
    """The user's request, of which the core sees n children. Its id is internal, like theirs."""

    def __init__(self, request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.sampling_params = request.sampling_params
        self.child_requests: set[str] = set()
        self.max_num_generation_tokens = 0
        self._outputs: dict[int, CompletionOutput] = {}

    @property
    def n(self) -> int:
        """Number of outputs that were asked for."""
        return self.sampling_params.n

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """Returns id and parameters of child `index`: n=1, and a seed of its own, `seed + index` (within int64)."""
        child_id = f"{index}_{self.request_id}"
        self.child_requests.add(child_id)
        params = copy.copy(self.sampling_params)
        params.n = 1
        if params.seed is not None:
            params.seed = (params.seed + index + _INT64_RANGE // 2) % _INT64_RANGE - _INT64_RANGE // 2
        return child_id, params

    def get_outputs(self, child_id: str, output: CompletionOutput) -> tuple[list[CompletionOutput], bool]:
        """Returns (the outputs to show now, whether the whole request is finished) after an output of a child.

        FINAL_ONLY collects the children and shows all of them, in order, with the last one; otherwise each output is
        passed on as it comes.
        """
        if output.finished():
            self.child_requests.discard(child_id)
        finished = not self.child_requests
        if self.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return [output], finished
        self._outputs[output.index] = output
        return ([self._outputs[i] for i in sorted(self._outputs)] if finished else []), finished

    def observe_num_generation_tokens(self, num_tokens: int) -> int:
        """Counts a finished child. Returns the length of the longest so far."""
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, num_tokens)
        return self.max_num_generation_tokens
