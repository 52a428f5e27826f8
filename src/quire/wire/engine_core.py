"""Requests to the engine core and its outputs.

Structs are positional arrays on the wire (`array_like`), untracked by the garbage collector. Only request ids, token
ids and numbers cross: text, detokenization and the n outputs of a prompt stay in the frontend.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Literal

import msgspec
import numpy.typing as npt

from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.timeline import Stamp
from quire.wire.execution import LogprobsLists, LogprobsTensors
from quire.wire.kv_events import KVEventSource
from quire.wire.lora import AdapterInfo
from quire.wire.stats import PrefillStats, SchedulerStats, SpecDecodeMetrics

PauseMode = Literal["abort", "wait", "keep"]
"""abort: end all requests now. wait: let them finish, then pause. keep: freeze them until `resume`."""

FINISH_REASON_STRINGS = ("stop", "length", "abort", "error", "repetition")
"""Names in the public API, by FinishReason value."""


class FinishReason(IntEnum):
    """Reason of a request's end. An int for a compact wire."""

    STOP = 0
    """A stop string, a stop token or the end-of-sequence token."""
    LENGTH = 1
    """max_tokens used up, or the model's context full."""
    ABORT = 2
    """The client disconnected or aborted it."""
    ERROR = 3
    """An internal error; the request may be retried."""
    REPETITION = 4
    """A repetitive pattern was detected."""

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]


class EngineCoreRequestType(Enum):
    """First payload frame of a message to the core: one raw byte."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    """In-process sentinel, never sent by clients."""
    WAKEUP = b"\x05"
    """In-process sentinel, never sent by clients."""
    GREET = b"\x06"
    """The client has given the core up, and begins again: its requests end, and a ready frame follows."""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One sequence to generate (or pool). The frontend has already expanded `n`, tokenized and validated it.

    `request_id` is the internal id; `external_req_id` the user's. `arrival_time` is wall clock (`time.time()`).
    """

    request_id: str
    prompt_token_ids: list[int] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: float
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    """Isolates this request's prefix cache; None and "" differ."""
    data_parallel_rank: int | None = None
    prompt_embeds: npt.NDArray[Any] | None = None
    mm_features: list[Any] | None = None
    client_index: int = 0
    """The frontend that the outputs go to."""
    current_wave: int = 0
    priority: int = 0
    """Smaller is served first."""
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    """A request of a streaming-input session (`frontend/session.py`) that more requests will follow. The core treats it
    like any other."""
    external_req_id: str | None = None
    output_token_ids: list[int] = []
    """Generated before an engine restart; they count as outputs for stop rules, penalties and random numbers."""
    continues_session: bool = False
    """Not used; keeps the positions of the fields after it."""
    prompt_is_token_ids: list[bool] | None = None
    """Per position of a prompt of tokens and embeddings: True for a token. None for a prompt of one kind."""
    reasoning_ended: bool | None = None
    """True if the prompt contains the end of the reasoning."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    prediction_token_ids: list[int] = []
    """Tokens that the user expects in the output; drafts are made of them. They change no token."""
    adapter: AdapterInfo | None = None
    """The revision of `lora_request` that the first outputs of a resumed request come from."""

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """The one that is set of sampling and pooling parameters."""
        params = self.sampling_params if self.sampling_params is not None else self.pooling_params
        assert params is not None
        return params


class EngineCoreEventType(IntEnum):
    """Change of a request's state inside the core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A change and its time on the core's monotonic clock: comparable only within that process."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(cls, event_type: EngineCoreEventType, timestamp: float | None = None) -> EngineCoreEvent:
        """Returns an event now, or at `timestamp`."""
        return cls(event_type, time.monotonic() if timestamp is None else timestamp)


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Output of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    pooling_output: npt.NDArray[Any] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id, when one of stop_token_ids ended it."""
    events: list[EngineCoreEvent] | None = None
    """Events since its last output."""
    prefill_stats: PrefillStats | None = None
    """Set in the first output only."""
    trace_headers: Mapping[str, str] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    routed_experts: npt.NDArray[Any] | None = None
    num_nans_in_logits: int = 0
    error_message: str | None = None
    """Reason, when `finish_reason` is ERROR."""
    segment_finish_reason: FinishReason | None = None
    """Not used; keeps the position of the field after it."""
    error_type: str = ""
    """When `finish_reason` is ERROR: name of its class in `quire.errors`; empty for a GenerationError."""
    spec_decode_metrics: SpecDecodeMetrics | None = None
    """None where no drafts of the request were verified."""
    adapter: AdapterInfo | None = None
    """Set in the first output only: the revision of the adapter that the request is bound to."""

    @property
    def finished(self) -> bool:
        """True for the last output of the request."""
        return self.finish_reason is not None


class UtilityOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Answer to a control call; `failure_message` is set exactly when it failed."""

    call_id: int
    failure_message: str | None = None
    result: Any = None
    error_type: str = ""
    """Name of the error's class in `quire.errors`; empty for another error."""


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """All outputs of one step for one client. `timestamp` is the core's monotonic clock, one stamp per step."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    incarnation: int = 0
    """Number of restarts of the core before these outputs; a client ignores those of a core it has given up."""
    sequence: int = 0
    """Counts the messages of this incarnation to this client, from 1, so that a client notices a lost or a repeated
    one. 0 where nothing can be lost: in one process."""

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


@dataclass(frozen=True)
class EngineCoreReadyResponse:
    """Results of start-up: returned, never written into a config."""

    max_model_len: int
    """Context length, fitted to the cache."""
    num_gpu_blocks: int
    """Blocks in the pool, including the null block (the name is the metric label of the documents)."""
    block_size: int
    kv_cache_size_tokens: int
    kv_cache_max_concurrency: float
    """Requests of max_model_len tokens that fit at once."""
    supported_tasks: tuple[str, ...]
    dp_stats_address: str | None = None
    engine_index: int = 0
    incarnation: int = 0
    """Number of restarts of this core."""
    peak_memory_bytes: int = 0
    """Most main memory that its process has held so far."""
    stamps: list[Stamp] = field(default_factory=list)
    """Timeline of its start; empty for a core in its user's process, which has that process's."""
    next_sequence: int = 1
    """The `EngineCoreOutputs.sequence` of the next message to this client: more than 1 where another process was that
    client before, or where its connection was lost."""
    kv_events: KVEventSource | None = None
    """Where it publishes KV cache events; None: nowhere."""
    numerics_id: str = ""
    """Digest of what decides the bits of its logits: engines with the same one compute the same; empty: unknown."""
    experts_generation: int = 0
    """Number of the group, of engines that share experts, that it was started in."""
