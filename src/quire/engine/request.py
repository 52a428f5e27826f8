"""A request as the engine core sees it: its tokens, how many of them are computed, and its state.

There is no prefill and no decode here. A request has `num_tokens` tokens of which `num_computed_tokens` are in the KV
cache; the scheduler lets the second number catch up with the first, and every catch-up yields the next token.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy.typing as npt

from quire.engine.structured_output.request import StructuredOutputRequest
from quire.errors import QuireError, ValidationError
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest, FinishReason
from quire.wire.lora import AdapterInfo, AdapterKey


class RequestStatus(IntEnum):
    """The state of a request. Everything after PREEMPTED is an end. Recordings contain these numbers."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    """Blocks of it are being loaded."""
    RUNNING = 3
    PREEMPTED = 4
    """Back in the waiting queue without blocks; what it had computed is computed again."""
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8
    FINISHED_REPETITION = 9

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason reported to the client; None while the request lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class RequestReport:
    """Counts of a request's admissions and preemptions; its adapter; events, stop reason and error for its client."""

    __slots__ = (
        *("adapter", "adapter_digest", "error", "events", "external_by_source", "load_span", "lora_start"),
        *("num_cached_tokens", "num_external_tokens", "num_lost_tokens", "num_preemptions", "stop_reason"),
        *("stored_hashes", "transfer_params"),
    )

    def __init__(self) -> None:
        self.adapter: AdapterInfo | None = None
        """The loaded revision that it uses; None before its first admission."""
        self.adapter_digest = ""
        """Digest of the adapter's files; empty: it was not loaded yet, or there is none."""
        self.stored_hashes: list[bytes] = []
        """`engine/kv_cache/hashing.py: stored_hashes`, as far as they are known, of a request with an adapter."""
        self.lora_start = 0
        """Position of the first token that the adapter applies to; negative: not known yet."""
        self.num_cached_tokens = -1
        """Tokens that the first admission found in a cache; -1 before it."""
        self.num_external_tokens = 0
        """Number of those that were loaded for it."""
        self.external_by_source: dict[str, int] = {}
        """Tokens that loads have brought, by the label of their source."""
        self.load_span: tuple[float, float] | None = None
        """Start and end of the last load."""
        self.num_lost_tokens = 0
        """Computed tokens that the last preemption lost; 0 after the next admission."""
        self.num_preemptions = 0
        self.events: list[EngineCoreEvent] = []
        """To be sent with the next output."""
        self.stop_reason: int | str | None = None
        self.error: QuireError | None = None
        """Reason of an end with FINISHED_ERROR."""
        self.transfer_params: dict[str, Any] | None = None
        """Where another engine finds the blocks of its prompt, for its last output."""

    def record_event(self, event_type: EngineCoreEventType, timestamp: float) -> None:
        """Adds an event, to be sent with the next output."""
        self.events.append(EngineCoreEvent(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """Returns the events since the last call, or None."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events


BlockHasher = Callable[["Request"], list[bytes]]
"""Returns the hashes of a request's full blocks that are not yet in its `block_hashes`."""


class Request:
    """One sequence in the core. Owned and changed by the scheduler only, on one thread.

    `origin` is what the frontend sent and never changes; everything else is state. Tokens are append-only, and
    `append_output_token_ids` is the only way to add one: it keeps `num_tokens` and `block_hashes` in step.
    """

    __slots__ = (
        "_block_hasher",
        "adapter",
        "all_token_ids",
        "arrival_index",
        "block_hashes",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "origin",
        "report",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "structured_output",
        "unsent_token_ids",
    )

    def __init__(
        self,
        origin: EngineCoreRequest,
        block_hasher: BlockHasher | None = None,
        adapter: AdapterKey | None = None,
        lora_start: int = 0,
    ) -> None:
        """`origin.output_token_ids` (a resumption) are its first outputs; `adapter` and `lora_start`: `bind_adapter`.

        Raises ValidationError if `origin` has no prompt tokens, or not exactly one kind of parameters.
        """
        prompt = origin.prompt_token_ids
        if not prompt:
            raise ValidationError(
                f"request {origin.request_id} has no prompt tokens; at least 1 is needed (0 for an embedding)",
                param="prompt",
            )
        params = origin.sampling_params
        if (params is None) == (origin.pooling_params is None):
            raise ValidationError(
                f"request {origin.request_id} must have either sampling or pooling parameters", param="params"
            )
        self.request_id = origin.request_id
        self.origin = origin
        self.sampling_params: SamplingParams | None = params
        self.all_token_ids = prompt + origin.output_token_ids
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(self.all_token_ids)
        """Prompt and output tokens, without drafts."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache, including those of steps in flight."""
        self.spec_token_ids: list[int] = []
        """Draft tokens to be verified by the next step. A `DraftFitter` sets them."""
        self.unsent_token_ids: list[int] = []
        """Last outputs that the worker did not sample and has not been sent."""

        self.status = RequestStatus.WAITING
        self.arrival_index = 0
        """Number of requests that the scheduler was given before this one."""
        self.report = RequestReport()
        self.structured_output: StructuredOutputRequest | None = None
        """Its grammar, if its output must have a form."""
        if params is not None and params.structured_outputs is not None:
            self.structured_output = StructuredOutputRequest(params.structured_outputs)

        self._block_hasher = block_hasher
        self.block_hashes: list[bytes] = []
        """One per full block of `all_token_ids`; empty where prefix caching is off."""
        self.bind_adapter(adapter, lora_start)

    # -- tokens -------------------------------------------------------------------------------------------------

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens, including those from before an engine restart."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.all_token_ids[self.num_prompt_tokens :]

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Adds generated tokens and hashes the blocks they fill."""
        if isinstance(token_ids, int):
            self.all_token_ids.append(token_ids)
            self.num_tokens += 1
        else:
            self.all_token_ids.extend(token_ids)
            self.num_tokens += len(token_ids)
        if self._block_hasher is not None:
            hashes = self._block_hasher(self)
            if hashes:
                self.block_hashes += hashes

    # -- lifecycle ----------------------------------------------------------------------------------------------

    def bind_adapter(self, adapter: AdapterKey | None, lora_start: int = 0) -> None:
        """Uses this revision of its adapter, on the tokens from position `lora_start` on. Nothing is computed yet."""
        self.adapter, self.report.lora_start = adapter, lora_start
        self.report.adapter_digest, self.report.stored_hashes = "", []
        self.block_hashes = []
        if self._block_hasher is not None:
            self.block_hashes = self._block_hasher(self)

    def start(self, num_cached: int, num_external: int = 0) -> int:
        """Runs from now on, with `num_cached` tokens computed, of which `num_external` were loaded. Returns how many
        more it had before its preemption."""
        report = self.report
        if report.num_cached_tokens < 0:
            report.num_cached_tokens, report.num_external_tokens = num_cached, num_external
        num_lost, report.num_lost_tokens = report.num_lost_tokens, 0
        self.num_computed_tokens = num_cached
        self.status = RequestStatus.RUNNING
        return max(0, num_lost - num_cached)

    def await_load(self) -> None:
        """Waits for blocks that are being loaded."""
        self.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def end_load(self) -> None:
        """Waits for its admission, as before the load."""
        if self.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.status = RequestStatus.PREEMPTED if self.num_preemptions else RequestStatus.WAITING

    def preempt(self) -> None:
        """Has nothing computed any more. The caller has freed its blocks."""
        self.report.num_lost_tokens = min(self.num_computed_tokens, self.num_tokens)
        self.report.num_preemptions += 1
        self.num_computed_tokens = 0
        self.status = RequestStatus.PREEMPTED

    @property
    def is_finished(self) -> bool:
        """True if the request has ended, for whatever reason."""
        return self.status > RequestStatus.PREEMPTED

    @property
    def num_preemptions(self) -> int:
        """Number of times the request lost its blocks."""
        return self.report.num_preemptions

    # -- what the frontend sent ---------------------------------------------------------------------------------

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt. Must not be changed."""
        assert self.origin.prompt_token_ids is not None  # checked at the door
        return self.origin.prompt_token_ids

    @property
    def priority(self) -> int:
        """Under the priority policy a smaller number is served first."""
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
    def lora_revision(self) -> int:
        """Revision of the adapter; 0 without one."""
        return 0 if self.adapter is None else self.adapter[1]

    @property
    def lora_start(self) -> int:
        """Position of the first token that the adapter applies to."""
        return self.report.lora_start

    @property
    def cache_salt(self) -> str | None:
        """Isolates the request's prefix cache."""
        return self.origin.cache_salt

    @property
    def prompt_embeds(self) -> npt.NDArray[Any] | None:
        """[num_prompt_tokens, hidden_size] the embeddings of the prompt; None: it is tokens only."""
        return self.origin.prompt_embeds

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True when every prompt token must be computed (prompt log-probabilities need all logits)."""
        return bool(self.origin.params.skip_reading_prefix_cache)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"outputs={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
