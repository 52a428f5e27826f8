"""`NewRequest`: one request as its caller asked for it, before anything of it is validated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from quire.frontend.admission import Reservation
from quire.frontend.prompts import ParsedPrompt, PromptType
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest

Params = SamplingParams | PoolingParams


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Made once, in `LLM`, `LLMEngine`, `AsyncLLM` or a route, and passed down until it is an `EngineCoreRequest`.

    A step on the way that learns something (the token ids of a long text) passes a copy on:
    `msgspec.structs.replace`.
    """

    request_id: str
    """The user's id."""
    prompt: PromptType | ParsedPrompt | EngineCoreRequest | AsyncGenerator[Any, None]
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
    """Room in the queue that the caller has reserved; `RequestIntake.add` uses it up, whatever happens."""
