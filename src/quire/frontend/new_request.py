"""`NewRequest`: one request as its caller asked for it; and the forms that its prompt may have.

A prompt of an unknown form is refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from quire.errors import ValidationError
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


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is then only shown."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "type", "arrival_time"}


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt whatever its form: text, ids, or both."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    arrival_time: float | None = None


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | ParsedPrompt


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Returns one prompt as a `ParsedPrompt`. Raises ValidationError if it has none of the known forms."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if is_token_ids(prompt):
        return ParsedPrompt(token_ids=_as_ids(prompt))
    raise ValidationError(
        f"a prompt is text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'; got "
        f"{type(prompt).__name__}",
        param="prompt",
    )


def text_of(prompt: Any) -> str | None:
    """Returns the text of a prompt of any form that must be tokenized; None if there is none."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None
    elif isinstance(prompt, ParsedPrompt):
        prompt = prompt.text if prompt.token_ids is None else None
    return prompt if isinstance(prompt, str) else None


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key, value in prompt.items():
        if key not in _KEYS and value is not None:
            raise ValidationError(
                f"a prompt cannot have {key!r} here; known keys: {', '.join(sorted(_KEYS))}", param=key
            )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is None and ids is None:
        raise ValidationError("a prompt dict needs 'prompt' or 'prompt_token_ids'", param="prompt")
    if text is not None and not isinstance(text, str):
        raise ValidationError(f"'prompt' must be text, got {type(text).__name__}", param="prompt")
    if ids is not None and not is_token_ids(ids):
        raise ValidationError("'prompt_token_ids' must be a list of integers", param="prompt_token_ids")
    if salt is not None and (not isinstance(salt, str) or len(salt) > MAX_CACHE_SALT_CHARS):
        raise ValidationError(
            f"'cache_salt' must be text of at most {MAX_CACHE_SALT_CHARS} characters", param="cache_salt"
        )
    return ParsedPrompt(text, None if ids is None else _as_ids(ids), salt, prompt.get("arrival_time"))


def is_token_ids(value: Any) -> bool:
    """Returns True for a sequence of integers: a list, a tuple, or a 1-d array of any library."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(type(i) is int for i in value)


def _as_ids(value: Any) -> list[int]:
    return list(value.tolist() if hasattr(value, "tolist") else value)


def as_prompt_list(prompts: Any) -> list[Any]:
    """Returns `prompts` as a list of prompts: a text, a dict or a non-empty list of ids is one prompt."""
    if isinstance(prompts, str | Mapping | ParsedPrompt) or (is_token_ids(prompts) and len(prompts) > 0):
        return [prompts]
    if isinstance(prompts, Sequence):
        return list(prompts)
    raise ValidationError(
        f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}", param="prompts"
    )


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
