"""A request as the engine core sees it: tokens, how many of them are computed, and where it stands.

There is no prefill and no decode here. A request has `num_tokens` tokens of which `num_computed_tokens` are in the KV
cache; the scheduler lets the second number catch up with the first, and every catch-up yields the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import islice
from typing import overload

from quire.engine.structured_output.request import StructuredOutputRequest
from quire.errors import QuireError, ValidationError
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest, FinishReason


class RequestStatus(IntEnum):
    """Where a request stands. Everything after PREEMPTED is an end."""

    WAITING = 1
    RUNNING = 3
    PREEMPTED = 4
    """Back in the waiting queue, its blocks given up; what it had computed is computed again."""
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8
    FINISHED_REPETITION = 9

    @property
    def finish_reason(self) -> FinishReason | None:
        """What the client is told; None while the request lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class TokenView(Sequence[int]):
    """A read-only view of a growing list of token ids from position `start` on. Never copies it."""

    __slots__ = ("_start", "_tokens")

    def __init__(self, tokens: list[int], start: int = 0) -> None:
        self._tokens = tokens
        self._start = start

    def __len__(self) -> int:
        return len(self._tokens) - self._start

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if self._start == 0:
            return self._tokens[index]
        positions = range(self._start, len(self._tokens))[index]
        if isinstance(positions, int):
            return self._tokens[positions]
        if positions.step == 1:
            return self._tokens[positions.start : positions.stop]
        return [self._tokens[i] for i in positions]

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._start, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"TokenView(<{len(self)} tokens>)"  # contents stay out of logs


BlockHasher = Callable[["Request"], list[bytes]]
"""Given a request, the hashes of the blocks that are full and not yet in its `block_hashes`."""


class Request:
    """One sequence in the core. Owned and changed by the scheduler only, on one thread.

    `origin` is what the frontend sent and stays as it is; everything else here is state. Tokens are append-only, and
    `append_output_token_ids` is the only way to add one: it keeps `num_tokens` and `block_hashes` in step.

    """

    __slots__ = (
        "_block_hasher",
        "_tokens",
        "all_token_ids",
        "arrival_index",
        "block_hashes",
        "error",
        "events",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "origin",
        "output_token_ids",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "stop_reason",
        "structured_output",
        "untold_token_ids",
    )

    def __init__(self, origin: EngineCoreRequest, block_hasher: BlockHasher | None = None) -> None:
        """As `from_engine_core_request`, which says what is checked."""
        if not origin.prompt_token_ids:
            raise ValidationError(
                f"request {origin.request_id} has no prompt tokens; at least 1 is needed (prompt embeddings are not "
                "supported)",
                param="prompt",
            )
        if (origin.sampling_params is None) == (origin.pooling_params is None):
            raise ValidationError(
                f"request {origin.request_id} must have either sampling or pooling parameters", param="params"
            )
        self.request_id = origin.request_id
        prompt = origin.prompt_token_ids
        self.origin = origin
        self.sampling_params: SamplingParams | None = origin.sampling_params
        self._tokens = prompt + origin.output_token_ids
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(self._tokens)
        """Prompt and outputs; draft tokens are not among them."""
        self.all_token_ids = TokenView(self._tokens)
        self.output_token_ids = TokenView(self._tokens, self.num_prompt_tokens)
        self.spec_token_ids: list[int] = []
        """Draft tokens to be verified by the next step."""
        self.untold_token_ids: list[int] = []
        """The last outputs, where the worker did not sample them and has not been told of them."""

        self.status = RequestStatus.WAITING
        self.arrival_index = 0
        """How many requests the scheduler was given before this one."""
        self.stop_reason: int | str | None = None
        self.error: QuireError | None = None
        """What the client is told when it ends with FINISHED_ERROR."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache, those of steps in flight included."""
        self.num_cached_tokens = -1
        """Prompt tokens found in the prefix cache when the request was first admitted; -1 before that."""
        self.num_lost_tokens = 0
        """Computed once, and lost with its blocks; 0 when it has been admitted again."""
        self.num_preemptions = 0
        self.events: list[EngineCoreEvent] = []
        params = origin.sampling_params
        self.structured_output: StructuredOutputRequest | None = None
        """Its grammar, if it asks for a form of its output."""
        if params is not None and params.structured_outputs is not None:
            self.structured_output = StructuredOutputRequest(params.structured_outputs)

        self._block_hasher = block_hasher
        self.block_hashes: list[bytes] = []
        """One per full block of `all_token_ids`; empty where prefix caching is off."""
        if block_hasher is not None:
            self.block_hashes = block_hasher(self)

    @classmethod
    def from_engine_core_request(cls, req: EngineCoreRequest, block_hasher: BlockHasher | None = None) -> Request:
        """The request the frontend describes. `req.output_token_ids` (a resumption) become its first outputs.

        Raises ValidationError if it has no prompt tokens, or not exactly one kind of parameters.
        """
        return cls(req, block_hasher)

    # -- tokens -------------------------------------------------------------------------------------------------

    @property
    def num_output_tokens(self) -> int:
        """Generated so far, before an engine restart included."""
        return self.num_tokens - self.num_prompt_tokens

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Add one or several generated tokens and hash the blocks they fill."""
        if isinstance(token_ids, int):
            self._tokens.append(token_ids)
            self.num_tokens += 1
        else:
            self._tokens.extend(token_ids)
            self.num_tokens += len(token_ids)
        if self._block_hasher is not None:
            hashes = self._block_hasher(self)
            if hashes:
                self.block_hashes += hashes

    def set_drafts(self, token_ids: list[int], max_model_len: int) -> None:
        """Propose tokens to be verified by the next step; ignored if that will not compute the last token anyway."""
        if self.status is RequestStatus.RUNNING and self.num_computed_tokens >= self.num_tokens - 1:
            room = max_model_len - self.num_tokens - 1  # one token comes without a draft
            self.spec_token_ids = token_ids[: max(room, 0)]

    # -- lifecycle ----------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """True once it has ended, however."""
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """What the client is told; None while the request lives."""
        return self.status.finish_reason

    def record_event(self, event_type: EngineCoreEventType, timestamp: float) -> None:
        """Note a turn, to be sent with the next output."""
        self.events.append(EngineCoreEvent(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """The events since the last call, or None."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    # -- what the frontend said ---------------------------------------------------------------------------------

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt. Not to be changed."""
        assert self.origin.prompt_token_ids is not None  # checked at the door
        return self.origin.prompt_token_ids

    @property
    def pooling_params(self) -> PoolingParams | None:
        """Set exactly when `sampling_params` is not."""
        return self.origin.pooling_params

    @property
    def priority(self) -> int:
        """A smaller one is served first, under the priority policy."""
        return self.origin.priority

    @property
    def arrival_time(self) -> float:
        """Wall clock."""
        return self.origin.arrival_time

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter to apply."""
        return self.origin.lora_request

    @property
    def cache_salt(self) -> str | None:
        """Isolates the request's prefix cache."""
        return self.origin.cache_salt

    @property
    def client_index(self) -> int:
        """The frontend its outputs go to."""
        return self.origin.client_index

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """Echoed on its outputs."""
        return self.origin.trace_headers

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True when every prompt token must be computed (prompt log-probabilities need all logits)."""
        return bool(self.origin.params.skip_reading_prefix_cache)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"outputs={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
