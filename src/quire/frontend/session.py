"""Streaming-input sessions in the frontend: a request whose prompt comes in several inputs.

A *segment* is one input and the outputs that answer it. To its user it looks like a request of its own: its outputs
carry the whole prompt it was answered from (all that came before, the last output of each segment left out, and the
input), text, log-probabilities and counts start afresh, and its last output has a finish reason. Only `finished` stays
False until the session is over. Inputs may be sent before the last one is answered; they wait in order.

How a core is told: the first input is an ordinary ADD with `resumable=True`; each further one is an ADD with the same
id and `continues_session=True`. One without `resumable` is the last, and may be empty. The core answers each with
outputs of which the last has `segment_finish_reason`, and the last one of all with `finish_reason`, as any request.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

import msgspec

from quire.errors import ValidationError
from quire.frontend.metrics.collect.events import SessionStats
from quire.frontend.new_request import PromptType
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason


@dataclass(frozen=True, slots=True)
class StreamingInput:
    """One input of a session, for `AsyncLLM.generate`. `sampling_params` of None are those `generate` was given."""

    prompt: PromptType
    sampling_params: SamplingParams | None = None


def validate_session_params(params: SamplingParams | PoolingParams) -> None:
    """Raises ValidationError, naming the field, for what a session cannot have."""
    if not isinstance(params, SamplingParams):
        raise ValidationError(
            f"a streaming-input session generates text; it cannot take {type(params).__name__}", param="sampling_params"
        )
    if params.n != 1:
        raise _not_in_a_session("n", params.n, "1: its outputs are what the next input follows")
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        raise _not_in_a_session("output_kind", "FINAL_ONLY", "CUMULATIVE or DELTA: it has an end per input")
    if params.structured_outputs is not None:
        raise _not_in_a_session("structured_outputs", "…", "none: its outputs have no form of their own")
    if params.thinking_token_budget is not None:
        raise _not_in_a_session("thinking_token_budget", params.thinking_token_budget, "none")
    if params.stop:
        raise _not_in_a_session("stop", params.stop, "no stop strings; use stop_token_ids")


def _not_in_a_session(param: str, value: object, allowed: str) -> ValidationError:
    return ValidationError(
        f"{param}={value!r} is not possible in a streaming-input session; it must have {allowed}",
        param=param,
        value=value,
    )


def make_input(
    session: EngineCoreRequest,
    token_ids: list[int],
    params: SamplingParams | None,
    arrival_time: float,
    *,
    resumable: bool,
) -> EngineCoreRequest:
    """The request that continues `session`; the last one without `resumable`."""
    return EngineCoreRequest(
        request_id=session.request_id,
        prompt_token_ids=token_ids,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_time,
        client_index=session.client_index,
        resumable=resumable,
        external_req_id=session.external_req_id,
        continues_session=True,
    )


class SessionState:
    """What the frontend remembers of a session beside its present segment."""

    __slots__ = ("is_answered", "is_open", "queued", "stats")

    def __init__(self, arrival_time: float) -> None:
        self.is_open = True
        """The last input has not been sent."""
        self.is_answered = False
        """The present segment has ended."""
        self.queued: deque[tuple[EngineCoreRequest, str | None]] = deque()
        """Inputs that were sent and not begun, with their texts."""
        self.stats = SessionStats(arrival_time)

    def add_input(self, segment: EngineCoreRequest, text: str | None) -> None:
        """One more input is about to be sent."""
        self.queued.append((segment, text))
        self.is_open = segment.resumable

    @property
    def rests(self) -> bool:
        """Whether nothing will come before its user sends more."""
        return self.is_answered and not self.queued

    @property
    def begins(self) -> bool:
        """Whether the next segment can begin; the empty input at the end begins none."""
        return self.is_answered and bool(self.queued) and bool(self.queued[0][0].prompt_token_ids)


class SessionRecord:
    """What a journal keeps of one session: enough to bring it back on a new engine core, wherever the last one died.

    Make it of the session's first request, and tell it of every further one (`add_input`) and of every output of the
    session (`take_in`). Forget it with the first output that is `finished`. After a restart send what `make_requests`
    gives, in that order: the present segment as a session of its own, with the outputs it has, then the inputs that are
    not answered. A segment whose end has been heard comes back with all its outputs; the core sees that it is complete,
    says nothing, and waits for input. So the core repeats no token and no end, and later inputs are sent as ever.
    """

    __slots__ = ("_end", "_inputs", "output_token_ids", "request")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        """The session as one request, up to the present segment."""
        self.output_token_ids = array("i", request.output_token_ids)
        """Those of the present segment."""
        self._end: FinishReason | None = None
        self._inputs: deque[EngineCoreRequest] = deque()

    @property
    def is_being_answered(self) -> bool:
        """Whether the present segment has outputs, and no end."""
        return self._end is None and bool(self.output_token_ids)

    @property
    def rests(self) -> bool:
        """Whether a core that has all of it has nothing to do."""
        return self._end is not None and not self._inputs

    def add_input(self, segment: EngineCoreRequest) -> None:
        """A request with `continues_session` is sent, or will be."""
        self._inputs.append(segment)

    def take_in(self, output: EngineCoreOutput) -> None:
        """The core has sent an output that does not end the session."""
        if output.new_token_ids:
            if self._end is not None:  # the next segment has begun
                self.request = self.request.continued(self.output_token_ids, self._inputs.popleft())
                self.output_token_ids, self._end = array("i"), None
            self.output_token_ids.extend(output.new_token_ids)
        if output.segment_finish_reason is not None:
            self._end = output.segment_finish_reason

    def make_requests(self) -> list[EngineCoreRequest]:
        """What a core that knows nothing of the session is to be sent."""
        params = self.request.sampling_params
        if self._end is FinishReason.LENGTH and params is not None:  # whatever room the new core has
            params = params.clone()
            params.max_tokens = len(self.output_token_ids)
        present = msgspec.structs.replace(
            self.request, sampling_params=params, output_token_ids=self.output_token_ids.tolist()
        )
        return [present, *self._inputs]
