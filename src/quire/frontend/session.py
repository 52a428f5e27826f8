"""Streaming-input sessions: requests whose prompt comes in several inputs.

A *segment* is one input and the outputs that answer it. The engine core is sent an ordinary request per segment, under
the id of the session: its prompt is all that came before (the last output of each segment left out) and the input. The
core's prefix cache keeps what was computed; everything else is kept here. Inputs may be added before the last one is
answered: they wait here, in order, and each is sent when the answer before it is complete.

To its user a session is one request: the outputs of a segment carry its whole prompt, text, log-probabilities and
counts start afresh, its last output has a finish reason, and `finished` stays False until the session is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from quire.errors import ValidationError
from quire.frontend.metrics.collect.events import SessionStats
from quire.frontend.new_request import PromptType
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import EngineCoreRequest, FinishReason


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


class SessionInput(NamedTuple):
    """A further input of a session, validated and tokenized."""

    token_ids: list[int]
    """Token ids; empty in the input that only ends the session."""
    sampling_params: SamplingParams | None
    arrival_time: float
    is_last: bool
    text: str | None = None

    def follow(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> EngineCoreRequest:
        """Returns the request of the next segment, after `request` was answered with `output_token_ids`.

        The last of these is not part of its prompt: it was sampled and never computed, and the input takes its place.
        """
        return msgspec.structs.replace(
            request,
            prompt_token_ids=[*(request.prompt_token_ids or ()), *output_token_ids[:-1], *self.token_ids],
            sampling_params=self.sampling_params,
            arrival_time=self.arrival_time,
            resumable=not self.is_last,
            output_token_ids=[],
        )


class SessionState:
    """State of a session besides its present segment."""

    __slots__ = ("end", "is_open", "queued", "stats")

    def __init__(self, arrival_time: float) -> None:
        self.is_open = True
        """True until the last input has been added."""
        self.end: tuple[FinishReason, int | str | None] | None = None
        """Finish reason and stop reason of the present segment; None while it is being answered."""
        self.queued: deque[SessionInput] = deque()
        """Inputs whose segments have not begun."""
        self.stats = SessionStats(arrival_time)

    def add_input(self, new: SessionInput) -> None:
        """Appends an input to those that wait."""
        self.queued.append(new)
        self.is_open = not new.is_last

    @property
    def closes_next(self) -> bool:
        """True if only the empty input at the end is left."""
        return bool(self.queued) and not self.queued[0].token_ids

    def goes_on_after(self, finish_reason: FinishReason) -> bool:
        """Returns whether the session has more to answer, now or later, when a segment ends like this."""
        if finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or self.closes_next:
            return False
        return self.is_open or bool(self.queued)
