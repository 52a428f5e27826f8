"""Turns `EngineCoreOutputs` into `RequestOutput`s: the only loop over what the core sends.

Text, log-probabilities, the n outputs of a prompt and request statistics are made here; the core has none of them. A
stop string is found here, too: the core gets an abort. A request that failed in the engine (FinishReason.ERROR) raises
GenerationError in a reader that awaits it through a queue; in the list that a synchronous caller takes, it is an output
with finish reason "error", its message, and the tokens it had.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from quire.errors import ClientError, GenerationError, make_error
from quire.frontend.admission import Reservation
from quire.frontend.drafts import DraftCounts
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.collect.ledger import Receipt, RequestLedger
from quire.frontend.request_state import OutputQueue, ParentRequest, RequestState
from quire.frontend.session import SessionInput, SessionState
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.tracing import RequestTracer
from quire.logger import init_logger
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason

logger = init_logger(__name__)


@dataclass(slots=True)
class OutputProcessorOutput:
    """Results of one batch of core outputs."""

    request_outputs: list[RequestOutput | PoolingRequestOutput] = field(default_factory=list)
    """Outputs of requests without a queue."""
    reqs_to_abort: list[str] = field(default_factory=list)
    """Internal ids of requests that the core must abort: a stop string ended them here."""
    reqs_to_add: list[EngineCoreRequest] = field(default_factory=list)
    """Further requests of sessions, to be sent to the core."""


def _failures_apart(outputs: Iterable[EngineCoreOutput]) -> Iterator[EngineCoreOutput]:
    """Yields the outputs. Of one that fails at the last of several tokens (drafts, or tokens that a grammar forces) the
    others come first, as those of a step before it would: they are the user's, and may end with a stop string."""
    for output in outputs:
        if output.finish_reason is not FinishReason.ERROR or len(output.new_token_ids) < 2:
            yield output
            continue
        num_good, logprobs = len(output.new_token_ids) - 1, output.new_logprobs
        yield msgspec.structs.replace(
            output,
            new_token_ids=output.new_token_ids[:num_good],
            new_logprobs=None if logprobs is None else logprobs.slice_rows(0, num_good),
            finish_reason=None,
            error_message=None,
            error_type="",
        )
        yield EngineCoreOutput(
            output.request_id,
            output.new_token_ids[num_good:],
            None if logprobs is None else logprobs.slice_rows(num_good, num_good + 1),
            finish_reason=output.finish_reason,
            error_message=output.error_message,
            error_type=output.error_type,
        )


class OutputProcessor:
    """Owns the state of every live request, by internal id."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        log_stats: bool,
        stream_interval: int = 1,
        max_model_len: int = sys.maxsize,
        ledger: RequestLedger | None = None,
        tracer: RequestTracer | None = None,
        drafts: DraftCounts | None = None,
    ) -> None:
        """`drafts` is a pattern of what is counted for each request; None without speculation."""
        self._tokenizer = tokenizer
        self._drafts = drafts
        self._tracer = tracer
        self._ledger = RequestLedger() if ledger is None else ledger
        self.log_stats = log_stats
        """Applies to requests that come from now on."""
        self._stream_interval = stream_interval
        self._max_model_len = max_model_len
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: dict[str, dict[str, None]] = {}
        """Internal ids by the user's, in order."""
        self.resting_sessions: set[str] = set()
        """Live sessions that have no output to come before their users send more."""

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of live requests, the children of a parent counted one by one, without sessions that wait
        for input."""
        return len(self.request_states) - len(self.resting_sessions)

    def has_unfinished_requests(self) -> bool:
        """Returns True if any request has an output to come."""
        return len(self.request_states) > len(self.resting_sessions)

    def find_session(self, external_req_id: str) -> RequestState | None:
        """Returns the session with this user id, if it takes more input."""
        for request_id in self.external_req_ids.get(external_req_id, ()):
            state = self.request_states[request_id]
            if state.session is not None and state.session.is_open:
                return state
        return None

    def is_live(self, request_id: str) -> bool:
        """Returns True if a request, or any of a parent's children, is unfinished. By internal id."""
        return request_id in self.request_states or request_id in self.parent_requests

    def register(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        receipt: Receipt,
        queue: OutputQueue | None = None,
        reservation: Reservation | None = None,
    ) -> list[EngineCoreRequest]:
        """Registers a user's request. Returns the requests to send to the core: one, or n for n outputs."""
        parent, children = fan_out(request)
        for index, child in enumerate(children):
            self.add_request(child, prompt, parent, index, queue, reservation)
            receipt.accept_one()
        return children

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest | None = None,
        index: int = 0,
        queue: OutputQueue | None = None,
        reservation: Reservation | None = None,
    ) -> None:
        """Registers a request. Must happen before it is sent to the core, or its first output would belong to no
        request.

        `queue` takes its outputs, if a reader awaits them. Raises ValueError for an id in use.
        """
        if request.request_id in self.request_states:
            raise ValueError(f"request id {request.request_id} is in use; ids of live requests are unique")
        state = RequestState.from_new_request(
            self._tokenizer,
            request,
            prompt,
            parent,
            index,
            queue=queue,
            reservation=reservation,
            log_stats=self.log_stats,
            stream_interval=self._stream_interval,
            drafts=None if self._drafts is None else self._drafts.new(),
        )
        self.request_states[request.request_id] = state
        self.external_req_ids.setdefault(state.external_req_id, {})[request.request_id] = None
        if parent is not None:
            self.parent_requests[parent.request_id] = parent

    def add_input(
        self, session_id: str, new: SessionInput, iteration_stats: IterationStats | None = None
    ) -> OutputProcessorOutput:
        """Adds an input to a session, which begins with it at once if nothing else is being answered.

        Raises ValueError if no session that takes input has this internal id.
        """
        result = OutputProcessorOutput()
        state = self.request_states.get(session_id)
        if state is None or state.session is None or not state.session.is_open:
            raise ValueError(f"no session {session_id} takes input: it has ended or been closed")
        state.session.add_input(new)
        if state.session.end is not None:
            self._go_on(state, state.session, iteration_stats, result)
        return result

    def _go_on(
        self,
        state: RequestState,
        session: SessionState,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        """Begins the next segment of a session whose last one has ended, or lets it rest until there is an input."""
        assert session.end is not None
        if not session.queued:
            self.resting_sessions.add(state.request_id)
            return
        self.resting_sessions.discard(state.request_id)
        if session.closes_next:
            self._end_early(state, *session.end, iteration_stats, result)
            return
        state = state.next_segment(self._tokenizer, session, self._stream_interval)
        self.request_states[state.request_id] = state
        if state.num_prompt_tokens < self._max_model_len:
            result.reqs_to_add.append(state.request)
        else:
            self._end_early(state, FinishReason.LENGTH, None, iteration_stats, result)

    def _end_early(
        self,
        state: RequestState,
        finish_reason: FinishReason,
        stop_reason: int | str | None,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        """Ends a session of which the core has no request."""
        output = state.make_request_output(finish_reason, stop_reason)
        if state.queue is not None and output is not None:
            state.queue.put(output)
        elif output is not None:
            result.request_outputs.append(output)
        self._finish_request(state, finish_reason, iteration_stats)

    def abort_requests(
        self, request_ids: Iterable[str], *, internal: bool = False, iteration_stats: IterationStats | None = None
    ) -> list[str]:
        """Forgets requests. Returns the internal ids that the core must abort. Unknown and finished ids are ignored.

        `request_ids` are the users' (each may stand for several requests), or internal ones, of parents too. A reader
        that awaits such a request through a queue gets its last output, with finish reason "abort".
        """
        aborted = []
        for state in self._states(request_ids, internal):
            aborted.append(state.request_id)
            output = state.make_early_end(FinishReason.ABORT)
            if state.queue is not None and output is not None:
                state.queue.put(output)
            self._finish_request(state, FinishReason.ABORT, iteration_stats)
        return aborted

    def fail_requests(
        self,
        request_ids: Iterable[str],
        error: Exception,
        *,
        reason: FinishReason = FinishReason.ERROR,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Ends requests (internal ids) with `error`. A queue gets the error; without a queue there is an output with
        finish reason "error" and its message. `reason` is for the statistics."""
        result = OutputProcessorOutput()
        for state in self._states(request_ids, internal=True):
            result.reqs_to_abort.append(state.request_id)
            if state.queue is not None:
                state.queue.put(error)
            else:
                output = state.make_early_end(FinishReason.ERROR, str(error))
                if output is not None:
                    result.request_outputs.append(output)
            self._finish_request(state, reason, iteration_stats, error)
        return result

    def _states(self, request_ids: Iterable[str], internal: bool) -> Iterator[RequestState]:
        """Yields the live requests among those named: the caller may finish each."""
        for request_id in request_ids:
            for internal_id in self._internal_ids(request_id, internal):
                state = self.request_states.get(internal_id)
                if state is not None:
                    yield state

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
        """Takes in a step's outputs: statistics, text and stop strings, log-probabilities, then the user's output.

        An output of an unknown request is ignored: it was aborted here while the core was still computing it.
        """
        result = OutputProcessorOutput()
        counter = None if iteration_stats is None else _OutputCounter(iteration_stats, engine_timestamp)
        for output in _failures_apart(outputs):
            state = self.request_states.get(output.request_id)
            if state is None:
                self._ledger.num_late_tokens += len(output.new_token_ids)
                continue
            try:
                if counter is not None:
                    counter.add(state, output)
                self._process_output(state, output, iteration_stats, result)
            except Exception as e:  # a fault in one request's text must not cost the others theirs
                logger.exception("an output of request %s cannot be processed; it ends with an error", state.request_id)
                if state.request_id in self.request_states:
                    message = f"an output of the request cannot be processed: {type(e).__name__}: {e}"
                    self._fail(state, output, message, iteration_stats, result)
        if counter is not None:
            counter.close()
        return result

    def _process_output(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        if state.is_prefilling:
            state.note_prefill(output)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        session = state.session if finish_reason is not None else None
        goes_on = session is not None and finish_reason is not None and session.goes_on_after(finish_reason)
        if finish_reason is FinishReason.ERROR and state.queue is not None:
            self._discard(state, len(output.new_token_ids), "error")
            if output.spec_decode_metrics is not None and state.drafts is not None:
                state.drafts.add(output.spec_decode_metrics, 0)
            message = output.error_message or f"request {state.external_req_id} failed inside the engine"
            self._fail(state, output, message, iteration_stats, result)
            return
        user_output: RequestOutput | PoolingRequestOutput | None
        if state.is_pooling:
            user_output = state.make_pooling_output(
                output.pooling_output, finish_reason, output.error_message, output.error_type
            )
        else:
            stop_string = self._take_text(state, output, finish_reason is FinishReason.STOP)
            if stop_string is not None:
                finish_reason, stop_reason = FinishReason.STOP, stop_string
            user_output = state.make_request_output(finish_reason, stop_reason, output.error_message, output.error_type)
            if output.kv_transfer_params is not None and user_output is not None:
                user_output.kv_transfer_params = output.kv_transfer_params
        if user_output is not None:
            if goes_on:
                user_output.finished = False
            if state.queue is not None:
                state.queue.put(user_output)
            else:
                result.request_outputs.append(user_output)
        if goes_on and session is not None and finish_reason is not None:
            session.end = finish_reason, stop_reason
            _close_segment(state, session, finish_reason, iteration_stats)
            self._go_on(state, session, iteration_stats, result)
        elif finish_reason is not None:
            self._finish_request(state, finish_reason, iteration_stats)
            if not output.finished:
                result.reqs_to_abort.append(state.request_id)

    def _take_text(self, state: RequestState, output: EngineCoreOutput, stop_terminated: bool) -> str | None:
        """Detokenizes. Returns the stop string that was found. Counts every token as delivered or discarded."""
        token_ids = state.detokenizer.token_ids
        num_before = len(token_ids)
        stop_string = None
        try:
            if state.logprobs is None and not stop_terminated:  # nearly every output
                stop_string = state.detokenizer.update(output.new_token_ids)
            else:
                stop_string = state.update_text(output, stop_terminated)
        finally:
            num_taken = len(token_ids) - num_before
            self._ledger.num_delivered_tokens += num_taken
            if output.spec_decode_metrics is not None and state.drafts is not None:
                state.drafts.add(output.spec_decode_metrics, num_taken)
            if num_taken != len(output.new_token_ids):
                reason = "error" if stop_string is None else "stop_string"
                self._discard(state, len(output.new_token_ids) - num_taken, reason)
        return stop_string

    def _discard(self, state: RequestState, num_tokens: int, reason: str) -> None:
        state.num_discarded_tokens += num_tokens
        self._ledger.discarded_tokens[reason] += num_tokens

    def _fail(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        message: str,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        """Sends the error to the request's queue, or as an output; the other outputs of its prompt end with it."""
        if state.queue is not None:
            error = make_error(output.error_type, message, GenerationError)
            params = state.request.sampling_params
            if isinstance(error, ClientError) and params is not None and params.structured_outputs is not None:
                error.param = "structured_outputs"  # only its grammar is left to be found wrong by the core
            state.queue.put(error)
        else:
            failed = state.make_error_output(message)
            if failed is not None:
                result.request_outputs.append(failed)
        self._finish_request(state, FinishReason.ERROR, iteration_stats)
        if not output.finished:
            result.reqs_to_abort.append(state.request_id)
        if state.queue is not None and state.parent is not None:
            result.reqs_to_abort += self.abort_requests(
                [state.parent.request_id], internal=True, iteration_stats=iteration_stats
            )

    def _finish_request(
        self,
        state: RequestState,
        finish_reason: FinishReason,
        iteration_stats: IterationStats | None,
        error: Exception | None = None,
    ) -> None:
        """Forgets a request and records its statistics."""
        self._ledger.finish(finish_reason, error)
        if state.reservation is not None:
            state.reservation.end_one(waits=state.is_prefilling)
            state.reservation = None
        del self.request_states[state.request_id]
        self.resting_sessions.discard(state.request_id)
        siblings = self.external_req_ids[state.external_req_id]
        del siblings[state.request_id]
        if not siblings:
            del self.external_req_ids[state.external_req_id]
        parent = state.parent
        if parent is not None:
            parent.child_requests.discard(state.request_id)
            if not parent.child_requests:
                self.parent_requests.pop(parent.request_id, None)
        if iteration_stats is not None:
            _record_finished(state, finish_reason, iteration_stats)
        if self._tracer is not None:
            self._tracer.note_finished(state, finish_reason, None if error is None else type(error).__name__)


def fan_out(request: EngineCoreRequest) -> tuple[ParentRequest | None, list[EngineCoreRequest]]:
    """Returns (the parent, its n children), or (None, [request]) for a request of one output."""
    if request.sampling_params is None or request.sampling_params.n == 1:
        return None, [request]
    parent = ParentRequest(request)
    children = []
    for index in range(parent.n):
        child_id, params = parent.get_child_info(index)
        children.append(msgspec.structs.replace(request, request_id=child_id, sampling_params=params))
    return parent, children


class _OutputCounter:
    """Counts the outputs of one batch. Requests that waited equally long since their last output, mostly all of a step,
    are counted as one run."""

    __slots__ = ("_num_tokens", "_num_waits", "_since", "_stats", "_timestamp")

    def __init__(self, stats: IterationStats, timestamp: float) -> None:
        """`timestamp` is the time of the step, on the core's clock."""
        self._stats = stats
        self._timestamp = timestamp
        self._num_tokens = 0
        self._num_waits = 0
        self._since = 0.0
        """Time of the previous output of the requests of the present run."""

    def add(self, state: RequestState, output: EngineCoreOutput) -> None:
        """Counts one output, before anything else is done with it."""
        if state.is_prefilling or output.events or output.num_nans_in_logits:
            self._add_special(state, output)
        elif output.new_token_ids:  # nearly every output
            self._num_tokens += len(output.new_token_ids)
            if state.adapter:
                self._stats.add_adapter_tokens(state.adapter, 0, len(output.new_token_ids))
            if state.last_token_ts != self._since:
                self._end_run()
                self._since = state.last_token_ts
            self._num_waits += 1
            state.last_token_ts = self._timestamp

    def _end_run(self) -> None:
        if self._num_waits:
            self._stats.add_waits(self._timestamp - self._since, self._num_waits)
            self._num_waits = 0

    def _add_special(self, state: RequestState, output: EngineCoreOutput) -> None:
        stats = state.stats
        if stats is not None:
            owner = state.owner if state.is_prefilling else None
            counted = self._stats
            num_prompt, num_generated = counted.num_prompt_tokens, counted.num_generation_tokens
            self._stats.update_from_output(
                output, self._timestamp, state.is_prefilling, stats, state.num_context_tokens, owner
            )
            state.last_token_ts = stats.last_token_ts
            if state.adapter:
                num_prompt, num_generated = (
                    counted.num_prompt_tokens - num_prompt,
                    counted.num_generation_tokens - num_generated,
                )
                counted.add_adapter_tokens(state.adapter, num_prompt, num_generated)

    def close(self) -> None:
        """Adds the counts to the statistics."""
        self._stats.num_generation_tokens += self._num_tokens
        self._end_run()


def _close_segment(
    state: RequestState, session: SessionState, finish_reason: FinishReason, iteration_stats: IterationStats | None
) -> None:
    """Adds a segment that has ended to the books of its session."""
    if iteration_stats is not None and state.stats is not None:
        _close_books(state, finish_reason, iteration_stats)
        iteration_stats.take_segment(session.stats)


def _record_finished(state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats) -> None:
    """Adds a finished request: a session counts as one, and so do the n outputs of one prompt."""
    stats, session, parent = state.stats, state.session, state.parent
    if stats is None:
        return
    if session is None:
        _close_books(state, finish_reason, iteration_stats)
        longest = stats.num_generation_tokens
    else:
        if session.end is None:
            _close_segment(state, session, finish_reason, iteration_stats)
        iteration_stats.update_from_finished_session(session.stats, finish_reason)
        longest = session.stats.num_generation_tokens
    if parent is not None:
        longest = parent.observe_num_generation_tokens(longest)
        if parent.child_requests:
            return
    iteration_stats.max_num_generation_tokens.append(longest)
    iteration_stats.n_params.append(1 if parent is None else parent.n)


def _close_books(state: RequestState, finish_reason: FinishReason, iteration_stats: IterationStats) -> None:
    params, stats, drafts = state.request.sampling_params, state.stats, state.drafts
    assert stats is not None
    iteration_stats.update_from_finished_request(
        state.external_req_id,
        finish_reason,
        stats,
        num_prompt_tokens=state.num_prompt_tokens - state.num_context_tokens,
        max_tokens_param=None if params is None else params.max_tokens,
        num_cached_tokens=max(0, (state.num_cached_tokens or 0) - state.num_context_tokens),
        owner=state.owner,
        drafts=None if drafts is None else (drafts.num_draft_tokens, drafts.num_accepted_tokens),
    )
