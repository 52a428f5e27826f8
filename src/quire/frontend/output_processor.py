"""From `EngineCoreOutputs` to `RequestOutput`s: the only loop over what the core sends (checklist S2-OUT-001…022).

Text, log-probabilities, the n outputs of a prompt and request statistics are made here; the core knows none of them.
A stop string is found here, too: the core learns of it as an abort.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.frontend.metrics.stats import IterationStats
from quire.frontend.parallel_sampling import ParentRequest
from quire.frontend.request_state import OutputQueue, RequestState
from quire.frontend.tokenizer import Tokenizer
from quire.outputs import PoolingRequestOutput, RequestOutput, RequestStateStats
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason


@dataclass(slots=True)
class OutputProcessorOutput:
    """What one batch of core outputs gave."""

    request_outputs: list[RequestOutput | PoolingRequestOutput] = field(default_factory=list)
    """Of requests nobody awaits through a queue."""
    reqs_to_abort: list[str] = field(default_factory=list)
    """Internal ids the core must be told to abort: a stop string ended them here."""


class OutputProcessor:
    """Owns the state of every live request, by internal id."""

    def __init__(self, tokenizer: Tokenizer | None, *, log_stats: bool, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._log_stats = log_stats
        self._stream_interval = stream_interval
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: dict[str, list[str]] = {}

    def get_num_unfinished_requests(self) -> int:
        """Live requests, the children of a parent counted one by one."""
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        """Is any request live?"""
        return bool(self.request_states)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None = None,
        index: int = 0,
        queue: OutputQueue | None = None,
    ) -> None:
        """Remember a request. Must happen before the core hears of it, or its first output would find nobody."""
        if request.request_id in self.request_states:
            raise ValueError(f"request id {request.request_id} is in use; ids of live requests are unique")
        state = RequestState.from_new_request(
            self._tokenizer,
            request,
            prompt,
            parent,
            index,
            queue=queue,
            log_stats=self._log_stats,
            stream_interval=self._stream_interval,
        )
        self.request_states[request.request_id] = state
        self.external_req_ids.setdefault(state.external_req_id, []).append(request.request_id)
        if parent is not None:
            self.parent_requests[parent.request_id] = parent

    def abort_requests(
        self, request_ids: Iterable[str], *, internal: bool = False, iteration_stats: IterationStats | None = None
    ) -> list[str]:
        """Forget requests; the internal ids the core must abort. Unknown and finished ids are ignored.

        `request_ids` are the users' (each may stand for several requests), or internal ones, of parents too. Whoever
        awaits such a request through a queue gets its last output, with finish reason "abort".
        """
        aborted = []
        for request_id in request_ids:
            for internal_id in self._internal_ids(request_id, internal):
                state = self.request_states.get(internal_id)
                if state is None:
                    continue
                aborted.append(internal_id)
                output = state.make_request_output(FinishReason.ABORT)
                if state.queue is not None and output is not None:
                    state.queue.put(output)
                self._finish_request(state, FinishReason.ABORT, iteration_stats)
        return aborted

    def _internal_ids(self, request_id: str, internal: bool) -> list[str]:
        if not internal:
            return list(self.external_req_ids.get(request_id, ()))
        parent = self.parent_requests.get(request_id)
        return sorted(parent.child_requests) if parent is not None else [request_id]

    def process_outputs(
        self,
        outputs: Iterable[EngineCoreOutput],
        engine_timestamp: float = 0.0,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Take in a step's outputs: statistics, text and stop strings, log-probabilities, then the user's output.

        An output of an unknown request is ignored: it was aborted here while the core was still computing it.
        """
        result = OutputProcessorOutput()
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is not None:
                self._process_output(state, output, engine_timestamp, iteration_stats, result)
        return result

    def _process_output(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        engine_timestamp: float,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        if iteration_stats is not None and state.stats is not None:
            iteration_stats.update_from_output(output, engine_timestamp, state.is_prefilling, state.stats)
        state.note_prefill(output)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        stop_string = self._update_text(state, output)
        if stop_string is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop_string
        user_output: RequestOutput | PoolingRequestOutput | None
        if state.request.pooling_params is not None:
            user_output = state.make_pooling_output(output)
        else:
            user_output = state.make_request_output(finish_reason, stop_reason)
        if user_output is not None:
            if state.queue is not None:
                state.queue.put(user_output)
            else:
                result.request_outputs.append(user_output)
        if finish_reason is not None:
            self._finish_request(state, finish_reason, iteration_stats)
            if not output.finished:
                result.reqs_to_abort.append(state.request_id)

    @staticmethod
    def _update_text(state: RequestState, output: EngineCoreOutput) -> str | None:
        """Detokenize and take in log-probabilities; the stop string that was found, if any.

        Tokens after a stop string, and their log-probabilities, are dropped.
        """
        before = len(state.detokenizer.token_ids)
        stop_string = state.detokenizer.update(output.new_token_ids, output.finish_reason is FinishReason.STOP)
        if state.logprobs is not None:
            num_tokens = len(state.detokenizer.token_ids) - before
            state.logprobs.update_from_output(output.new_logprobs, output.new_prompt_logprobs_tensors, num_tokens)
        return stop_string

    def _finish_request(
        self, state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats | None
    ) -> None:
        """Forget a request and close its books."""
        del self.request_states[state.request_id]
        siblings = self.external_req_ids[state.external_req_id]
        siblings.remove(state.request_id)
        if not siblings:
            del self.external_req_ids[state.external_req_id]
        parent = state.parent
        if parent is not None and not parent.child_requests:
            self.parent_requests.pop(parent.request_id, None)
        if iteration_stats is not None and state.stats is not None:
            _record_finished(state, state.stats, finish_reason, iteration_stats)


def _record_finished(
    state: RequestState, stats: RequestStateStats, finish_reason: FinishReason, iteration_stats: IterationStats
) -> None:
    params = state.request.sampling_params
    iteration_stats.update_from_finished_request(
        state.external_req_id,
        finish_reason,
        stats,
        num_prompt_tokens=len(state.request.prompt_token_ids or ()),
        max_tokens_param=None if params is None else params.max_tokens,
        num_cached_tokens=state.num_cached_tokens or 0,
    )
    longest = stats.num_generation_tokens
    if state.parent is not None:
        longest = state.parent.observe_num_generation_tokens(longest)
        if state.parent.child_requests:
            return
    iteration_stats.max_num_generation_tokens.append(longest)
    iteration_stats.n_params.append(1 if state.parent is None else state.parent.n)
