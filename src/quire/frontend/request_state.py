"""One live request as the frontend sees it, and the outputs it gives its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.logprobs import LogprobsProcessor
from quire.frontend.parallel_sampling import ParentRequest
from quire.frontend.tokenizer import Tokenizer
from quire.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PromptLogprobs,
    RequestOutput,
    RequestStateStats,
)
from quire.sampling_params import RequestOutputKind
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.wire.stats import PrefillStats


class OutputQueue(Protocol):
    """Where the outputs of one request go when somebody awaits them."""

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None: ...


@dataclass(slots=True)
class RequestState:
    """Everything the frontend remembers of a request between two outputs. Keyed by the internal id."""

    request: EngineCoreRequest
    prompt: str | None
    parent: ParentRequest | None
    index: int
    detokenizer: IncrementalDetokenizer
    logprobs: LogprobsProcessor | None
    stats: RequestStateStats | None
    queue: OutputQueue | None
    stream_interval: int
    is_prefilling: bool = True
    prefill_stats: PrefillStats | None = None
    num_sent_tokens: int = 0

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
        log_stats: bool,
        stream_interval: int,
    ) -> RequestState:
        """The state of a request the core has not heard of yet (checklist S2-OUT-002)."""
        params, prompt_ids = request.sampling_params, request.prompt_token_ids or []
        if params is not None and not params.detokenize:
            tokenizer = None
        return cls(
            request=request,
            prompt=prompt,
            parent=parent,
            index=index,
            detokenizer=(
                IncrementalDetokenizer()
                if params is None
                else IncrementalDetokenizer.from_params(tokenizer, params, prompt_ids)
            ),
            logprobs=None if params is None else LogprobsProcessor(tokenizer, params, prompt_ids),
            stats=RequestStateStats(arrival_time=request.arrival_time) if log_stats else None,
            queue=queue,
            stream_interval=(params.stream_interval if params is not None else None) or stream_interval,
        )

    @property
    def request_id(self) -> str:
        """The internal id."""
        return self.request.request_id

    @property
    def external_req_id(self) -> str:
        """The user's id."""
        return self.request.external_req_id or self.request.request_id

    @property
    def output_kind(self) -> RequestOutputKind:
        return self.request.params.output_kind

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; None before the first output."""
        return None if self.prefill_stats is None else self.prefill_stats.num_cached_tokens

    def note_prefill(self, output: EngineCoreOutput) -> None:
        """The first tokens have come."""
        if output.new_token_ids:
            self.is_prefilling = False
        if self.prefill_stats is None:
            self.prefill_stats = output.prefill_stats

    # -- outputs ------------------------------------------------------------------------------------------------------

    def make_request_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None = None
    ) -> RequestOutput | None:
        """What there is to show now; None when there is nothing (checklist S2-OUT-013…018)."""
        finished = finish_reason is not None
        if not finished and (self.output_kind is RequestOutputKind.FINAL_ONLY or not self._interval_is_over()):
            return None
        completion = self._make_completion_output(finish_reason, stop_reason)
        outputs = [completion]
        if self.parent is not None:
            outputs, finished = self.parent.get_outputs(self.request_id, completion)
            if not outputs:
                return None
        return RequestOutput(
            request_id=self.external_req_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=outputs,
            finished=finished,
            metrics=self.stats,
            lora_request=self.request.lora_request,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _interval_is_over(self) -> bool:
        """True for the first output and every `stream_interval` tokens."""
        unsent = len(self.detokenizer.token_ids) - self.num_sent_tokens
        return self.num_sent_tokens == 0 or unsent >= self.stream_interval

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """In every output; in a stream of deltas only in the first."""
        if self.logprobs is None:
            return None
        if self.output_kind is RequestOutputKind.DELTA:
            return self.logprobs.take_prompt_logprobs()
        return self.logprobs.prompt_logprobs

    def _make_completion_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        delta = self.output_kind is RequestOutputKind.DELTA
        start = self.num_sent_tokens if delta else 0
        token_ids = self.detokenizer.token_ids[start:]
        self.num_sent_tokens = len(self.detokenizer.token_ids)
        logprobs = self.logprobs.logprobs if self.logprobs is not None else None
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.get_next_output_text(finish_reason is not None, delta),
            token_ids=token_ids,
            cumulative_logprob=self.logprobs.cumulative_logprob if self.logprobs is not None else None,
            logprobs=None if logprobs is None else logprobs[start:],
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=stop_reason if finish_reason is not None else None,
            lora_request=self.request.lora_request,
        )

    def make_pooling_output(self, output: EngineCoreOutput) -> PoolingRequestOutput:
        """The result of a pooling request."""
        return PoolingRequestOutput(
            request_id=self.external_req_id,
            outputs=PoolingOutput(output.pooling_output),
            prompt_token_ids=list(self.request.prompt_token_ids or ()),
            finished=output.finished,
            num_cached_tokens=self.num_cached_tokens or 0,
        )
