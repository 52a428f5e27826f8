"""Outputs of requests, with vLLM's field names.

An object that is made for every token is a msgspec Struct: it is made in a tenth of a dataclass's time, and is no work
for the garbage collector. `msgspec.structs.replace` makes a changed copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.lora_request import LoRARequest


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of one token at one position. `rank` is 1 for the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, Logprob] | None]
"""One entry per prompt token; the first is None, because nothing precedes it."""
SampleLogprobs = list[dict[int, Logprob]]
"""One entry per output token: the sampled token first, then the most likely ones."""


@dataclass(slots=True)
class RequestStateStats:
    """The times and counts of one request.

    `arrival_time` is wall clock; the `*_ts` are stamps of the engine core's monotonic clock and may only be compared
    with one another. 0.0 means not yet.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """First time only: a preemption does not reset it."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    is_corrupted: bool = False
    """A NaN was seen in its logits."""


class RequestSpecDecodeMetrics(msgspec.Struct, gc=False, omit_defaults=True):
    """Speculation of one sequence, with the fields of vLLM's `metrics.speculative_decoding`. A step counts if it
    verified drafts of the sequence."""

    mean_acceptance_length: float
    """Tokens per step: 1 and the accepted drafts."""
    draft_acceptance_rate: float
    """Accepted by verified draft tokens, 0..1; 0 without any."""
    acceptance_histogram: list[int]
    """Number of steps that accepted 0, 1, … num_spec_tokens drafts."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    """Accepted means kept: equal to the token drawn, and not behind a stop that the engine core found."""
    num_draft_tokens: int
    num_spec_tokens: int
    """Most drafts in a step."""
    per_step_accepted: list[int] | None = None
    """Accepted drafts of each step; None unless --per-request-spec-decode-metrics is detailed."""
    per_step_drafted: list[int] | None = None


class CompletionOutput(msgspec.Struct, gc=False):
    """One generated sequence of a request. `finish_reason` is None while it is still growing."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    error_message: str | None = None
    """Cause and remedy when `finish_reason` is "error"."""
    error_type: str = ""
    """Name of a class in `quire.errors`, where it is not GenerationError."""
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    """Set in the last output, with --per-request-spec-decode-metrics."""
    num_accepted_prediction_tokens: int = 0
    """Tokens that were drafted from the prediction; in the last output, like the next one."""
    num_rejected_prediction_tokens: int = 0
    """Tokens drafted from the prediction that are not in the output."""

    def finished(self) -> bool:
        """True once no more tokens will come."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, gc=False):
    """The state of a request as its user sees it. `request_id` is the user's (external) id."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class PoolingOutput:
    """Result of pooling: a float32 array of one dimension, or of two with a row per token; None without a result."""

    data: Any


@dataclass(slots=True)
class PoolingRequestOutput:
    """The result of a pooling request. `finish_reason` is "stop", or "abort" or "error" without a result."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error_message: str | None = None
    """Cause and remedy when `finish_reason` is "error"."""
    error_type: str = ""
    """Name of a class in `quire.errors`, where it is not GenerationError."""


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each class: config.json's `id2label` names them in this order."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Returns the number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


@dataclass(slots=True)
class _TextResult:
    """Fields that every kind of result has."""

    request_id: str
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int


@dataclass(slots=True)
class EmbeddingRequestOutput(_TextResult):
    """The result of `LLM.embed`."""

    outputs: EmbeddingOutput

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """Makes it from a pooled array of one dimension."""
        return cls(*_facts(base), EmbeddingOutput(base.outputs.data.tolist()))


@dataclass(slots=True)
class ClassificationRequestOutput(_TextResult):
    """The result of `LLM.classify`."""

    outputs: ClassificationOutput

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> ClassificationRequestOutput:
        """Makes it from a pooled array of one dimension."""
        return cls(*_facts(base), ClassificationOutput(base.outputs.data.tolist()))


@dataclass(slots=True)
class ScoringRequestOutput(_TextResult):
    """The result of `LLM.score`. Its tokens are those of both texts."""

    outputs: ScoringOutput

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> ScoringRequestOutput:
        """Makes it from a pooled array of one number."""
        return cls(*_facts(base), ScoringOutput(base.outputs.data.item()))


def _facts(base: PoolingRequestOutput) -> tuple[str, list[int], bool, int]:
    return base.request_id, base.prompt_token_ids, base.finished, base.num_cached_tokens


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: prompt and output tokens together, the output's text, and its cumulative log-probability."""

    tokens: list[int]
    logprobs: SampleLogprobs
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
