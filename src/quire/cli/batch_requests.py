"""A line of an OpenAI batch file as prompts and sampling parameters, and its outputs as a line of results.

The fields are those of vLLM's /v1/completions and /v1/chat/completions. A field that this engine cannot honour is
refused by name; a field without an effect on the output is ignored.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cli.batch_files import InputRow, make_row
from quire.cli.option_groups import make_sampling_params
from quire.errors import NotFoundError, ValidationError, nearest
from quire.frontend.openai.protocol.answer_parts import TokenCount, TokenNames, chat_logprobs, text_logprobs
from quire.frontend.openai.protocol.sampling import FormBody
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from quire.structured_outputs import StructuredOutputsParams

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"
GENERATION_URLS = (CHAT_URL, TEXT_URL)
PAIR_URLS = ("/score", "/v1/score")
RANK_URLS = ("/rerank", "/v1/rerank", "/v2/rerank")
POOLING_URLS = ("/v1/embeddings", *PAIR_URLS, *RANK_URLS)

_SAMPLING_FIELDS = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logit_bias", "allowed_token_ids",
    "bad_words", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "repetition_detection",
)  # fmt: skip
_REQUEST_FIELDS = ("model", "priority", "cache_salt")
_CHAT_FIELDS = (
    "messages", "logprobs", "top_logprobs", "max_completion_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "documents",
)  # fmt: skip
_FORM_FIELDS = FormBody.__struct_fields__
_TEXT_FIELDS = ("prompt", "logprobs", "echo")
_IGNORED_FIELDS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls", "stream_options", "request_id",
)  # fmt: skip
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "use_beam_search": (False, None),
}
"""Fields accepted only with a value that asks for nothing."""


@dataclass(frozen=True)
class BatchRequest:
    """A row that can run. One engine request per prompt; `prompts` are the engine's dicts."""

    custom_id: str
    is_chat: bool
    prompts: list[dict[str, Any]]
    params: SamplingParams
    priority: int
    echo: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `LLMEngine.add_request`."""

    @property
    def work(self) -> list[tuple[dict[str, Any], SamplingParams]]:
        """Each prompt with its parameters."""
        return [(prompt, self.params) for prompt in self.prompts]


_RESERVED_VARIABLES = {
    "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "content_format",
    "tokenize", "documents",
}  # fmt: skip
"""Template variables that a row sets through fields, or not at all."""
RenderChat = Callable[..., list[int]]
"""messages and template options -> prompt token ids; the tokenizer's `apply_chat_template`."""


class RequestReader:
    """Turns rows into `BatchRequest`s for one model."""

    def __init__(
        self, model_names: Sequence[str], model_defaults: Mapping[str, Any], seed: int, render_chat: RenderChat
    ) -> None:
        self._model_names = model_names
        self._model_defaults = model_defaults
        self._seed = seed
        self._render_chat = render_chat

    def read(self, row: InputRow) -> BatchRequest:
        """Returns the request of a row. Raises ValidationError or NotFoundError; the message names the field."""
        if row.error is not None:
            raise row.error
        custom_id, url, body = read_envelope(
            row, GENERATION_URLS, "this model generates; for embeddings and scores add --runner pooling"
        )
        is_chat = url == CHAT_URL
        _check_fields(body, _CHAT_FIELDS if is_chat else _TEXT_FIELDS)
        check_model(body.get("model"), self._model_names)
        params = self._params(body, is_chat, row_seed=_row_seed(self._seed, custom_id))
        prompts = [self._chat_prompt(body)] if is_chat else _text_prompts(body.get("prompt"))
        echo = not is_chat and _boolean(body, "echo")
        if echo and params.logprobs is not None:
            raise ValidationError("echo together with logprobs is not supported in a batch", param="echo")
        priority, salt = body.get("priority") or 0, body.get("cache_salt")
        if salt is not None:
            prompts = [{**prompt, "cache_salt": salt} for prompt in prompts]
        return BatchRequest(custom_id, is_chat, prompts, params, priority, echo)

    def result_row(self, custom_id: str, request: BatchRequest, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the row of a request that ran, in OpenAI's form; `outputs` are in the order of its prompts."""
        count = TokenCount(shows_cached=True)
        choices = []
        for position, output in enumerate(outputs):
            count.add(position, output)
            choices += [
                _choice(request, output, each, position * request.params.n + each.index) for each in output.outputs
            ]
        kind, prefix = ("chat.completion", "chatcmpl") if request.is_chat else ("text_completion", "cmpl")
        body = {
            "id": f"{prefix}-{uuid.uuid4().hex[:16]}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model_names[0],
            "choices": choices,
            "usage": count.in_chunk(),
        }
        return make_row(f"batch_req_{uuid.uuid4().hex[:16]}", custom_id, 200, body, None)

    def _params(self, body: Mapping[str, Any], is_chat: bool, row_seed: int) -> SamplingParams:
        given = {name: body[name] for name in _SAMPLING_FIELDS if body.get(name) is not None}
        if is_chat and body.get("max_completion_tokens") is not None:
            given["max_tokens"] = body["max_completion_tokens"]
        detection = given.get("repetition_detection")
        if detection is not None:
            given["repetition_detection"] = _repetition_detection(detection)
        return make_sampling_params(
            {
                "seed": row_seed,
                **given,
                "structured_outputs": _form(body),
                "logprobs": _chat_logprobs(body) if is_chat else body.get("logprobs"),
            },
            self._model_defaults if is_chat else {"max_tokens": 16, **self._model_defaults},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _chat_prompt(self, body: Mapping[str, Any]) -> dict[str, Any]:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise ValidationError("messages must be a list of objects with role and content", param="messages")
        template = body.get("chat_template")
        if template is not None and not isinstance(template, str):
            raise ValidationError("chat_template must be text", param="chat_template")
        options = {
            "add_generation_prompt": _boolean(body, "add_generation_prompt", default=True),
            "continue_final_message": _boolean(body, "continue_final_message"),
            "chat_template": template,
            "documents": body.get("documents"),
        }
        variables = body.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict) or not _RESERVED_VARIABLES.isdisjoint(variables):
            raise ValidationError(
                f"chat_template_kwargs must be an object without {', '.join(sorted(_RESERVED_VARIABLES))}",
                param="chat_template_kwargs",
            )
        return {"prompt_token_ids": self._render_chat(messages, **options, **variables)}


def read_envelope(row: InputRow, urls: Sequence[str], otherwise: str) -> tuple[str, str, Mapping[str, Any]]:
    """Returns custom_id, url and body of a row. Raises ValidationError; `otherwise` is the remedy for a url that
    another kind of model serves."""
    content = row.content
    custom_id, url, body = content.get("custom_id"), content.get("url"), content.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValidationError(f"line {row.line_number} has no custom_id, or it is not text", param="custom_id")
    if content.get("method", "POST") != "POST":
        raise ValidationError(f"method {content['method']!r} is not POST", param="method")
    if url not in urls:
        other = f"; {otherwise}" if url in (*GENERATION_URLS, *POOLING_URLS) else ""
        raise ValidationError(f"url {url!r} is not one of {', '.join(urls)}{other}", param="url")
    if not isinstance(body, dict):
        raise ValidationError(f"body must be an object, got {type(body).__name__}", param="body")
    return custom_id, str(url), body


def check_model(model: Any, names: Sequence[str]) -> None:
    """Raises NotFoundError for a model that is none of `names`."""
    if model is not None and model not in names:
        raise NotFoundError(
            f"the model {model!r} is not the one this batch runs ({names[0]}); pass --served-model-name to run it "
            "under that name",
            param="model",
        )


def _row_seed(seed: int, custom_id: str) -> int:
    """Returns the seed of a row without one.

    It depends on the row alone, so that a resumed batch draws the same tokens.
    """
    digest = hashlib.sha256(f"{seed}/{custom_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) >> 1


def _check_fields(body: Mapping[str, Any], own: Sequence[str]) -> None:
    known = {*_SAMPLING_FIELDS, *_REQUEST_FIELDS, *_FORM_FIELDS, *own, *_IGNORED_FIELDS}
    for name, value in body.items():
        if name in known or (name in _NEUTRAL_VALUES and value in _NEUTRAL_VALUES[name]):
            continue
        if name in _NEUTRAL_VALUES:
            raise ValidationError(f"{name} is not supported in a batch", param=name, value=value)
        hint = nearest(name, known, "remove it")
        raise ValidationError(f"{name} is not a field of batch requests; {hint}", param=name, value=value)


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    top = body.get("top_logprobs") or 0
    if not _boolean(body, "logprobs"):
        if top:
            raise ValidationError("top_logprobs needs logprobs: true", param="top_logprobs", value=top)
        return None
    if type(top) is not int:
        raise ValidationError(f"top_logprobs must be an integer, got {top!r}", param="top_logprobs", value=top)
    return top


def _boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValidationError(f"{name} must be true or false, got {value!r}", param=name, value=value)
    return value


def _form(body: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Returns the required form of the output, from any of the server's fields for it."""
    given = {name: body[name] for name in _FORM_FIELDS if body.get(name) is not None}
    try:
        return msgspec.convert(given, FormBody).form()
    except msgspec.ValidationError as e:
        raise ValidationError(f"{' and '.join(given)}: {e}", param=min(given)) from None


def _repetition_detection(value: Any) -> RepetitionDetectionParams:
    names = RepetitionDetectionParams.__struct_fields__
    if not isinstance(value, dict) or not all(k in names and type(v) is int for k, v in value.items()):
        raise ValidationError(
            f"repetition_detection must be an object of integers {', '.join(names)}", param="repetition_detection"
        )
    return RepetitionDetectionParams(**value)


def _text_prompts(prompt: Any) -> list[dict[str, Any]]:
    """Returns prompts from text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [{"prompt_token_ids": prompt}]
        if all(isinstance(p, str) for p in prompt):
            return [{"prompt": p} for p in prompt]
        if all(_is_ids(p) for p in prompt):
            return [{"prompt_token_ids": p} for p in prompt]
    raise ValidationError("prompt must be text, token ids, or a list of either", param="prompt")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _choice(request: BatchRequest, output: RequestOutput, sequence: CompletionOutput, index: int) -> dict[str, Any]:
    ending = {"finish_reason": sequence.finish_reason, "stop_reason": sequence.stop_reason}
    ids, positions, logprobs = sequence.token_ids, sequence.logprobs, None
    if request.is_chat:
        if positions is not None:
            logprobs = chat_logprobs(ids, positions, TokenNames(None), request.params.logprobs or 0)
        message = {"role": "assistant", "content": sequence.text}
        return {"index": index, "message": message, "logprobs": logprobs, **ending}
    if positions is not None:
        logprobs, _ = text_logprobs(ids, positions, TokenNames(None))
    text = (output.prompt or "") + sequence.text if request.echo else sequence.text
    return {"index": index, "text": text, "logprobs": logprobs, **ending}
