"""`NewRequest`: one request as its caller asked for it; and the forms that its prompt may have.

A prompt of an unknown form is refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from quire.frontend.admission import Reservation
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest

MAX_CACHE_SALT_CHARS = 1024


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str
    prediction: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is then only shown."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str
    prediction: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings: an array or tensor [num_positions, hidden_size].

    With `prompt_token_ids` it is mixed: both have all positions, and `prompt_is_token_ids` is True where the token
    counts.
    """

    prompt_embeds: Any
    prompt_token_ids: list[int]
    prompt_is_token_ids: list[bool]
    cache_salt: str


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt whatever its form: text, ids, or both; embeddings with or without ids."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    arrival_time: float | None = None
    prediction: str | Sequence[int] = ()
    """Text or ids that the user expects in the output: drafts are made of them."""
    embeds: Any = None
    """An array or tensor with a row for each position; None: no position is an embedding."""
    is_token_ids: list[bool] | None = None
    """True for each position that is a token; None: all are of one kind."""


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt | ParsedPrompt


Params = SamplingParams | PoolingParams


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Made once, in `LLM`, `LLMEngine`, `AsyncLLM` or a route, and passed down until it is an `EngineCoreRequest`.

    A step on the way that learns something (the token ids of a long text) passes a copy on:
    `msgspec.structs.replace`.
    """

    request_id: str
    """The user's id."""
    prompt: PromptType | EngineCoreRequest | AsyncGenerator[Any, None]
    """An `EngineCoreRequest` was made by the input processor; a generator gives the inputs of a streaming-input
    session."""
    params: Params
    prompt_text: str | None = None
    """Text shown as the prompt; None: the text of `prompt`, if it has one."""
    arrival_time: float | None = None
    """Wall clock; None: the time the prompt carries, or now."""
    priority: int = 0
    tokenization_kwargs: Mapping[str, Any] = {}
    trace_headers: Mapping[str, str] | None = None
    lora_request: LoRARequest | None = None
    data_parallel_rank: int | None = None
    resumable: bool = False
    """The first input of a streaming-input session."""
    timeout_s: float | None = None
    """Seconds until the request ends with an error; None: --request-timeout-s."""
    reservation: Reservation | None = None
    """Reserved part of the admission quotas; `RequestIntake.add` takes it over, even if it fails. None: it makes
    one."""
