"""Fields of every generating route, and their conversion to `SamplingParams`.

A form of the output can be asked for in three ways: OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's
older `guided_*` fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.field_bounds import INT64_MAX
from quire.frontend.http.bodies import MAX_FLOAT, Count, Finite, Int64, Name, Object, RequestBody, Text, TokenId, Word
from quire.frontend.new_request import MAX_CACHE_SALT_CHARS
from quire.kv_transfer_params import FIELD as TRANSFER_PARAMS
from quire.kv_transfer_params import parse_transfer_params
from quire.sampling_params import (
    EXTRA_FIELDS,
    MAX_BAD_WORDS,
    MAX_LOGPROB_TOKEN_IDS,
    SAMPLING_FIELDS,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from quire.structured_outputs import StructuredOutputsParams, make_structured_outputs


class FormBody(RequestBody, kw_only=True):
    """Fields for the form of the output. At most one of them may be set."""

    response_format: Object | None = None
    """{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}, or
    {"type": "structural_tag", "structures": […], "triggers": […]}."""
    structured_outputs: Object | None = None
    """One of json, regex, choice, grammar, json_object, structural_tag; see docs/structured_output.md."""
    guided_json: Object | Text | None = None
    """Older name of structured_outputs.json."""
    guided_regex: Annotated[str, Meta(max_length=1 << 16)] | None = None
    """Older name of structured_outputs.regex."""
    guided_choice: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=4096)] | None = None
    """Older name of structured_outputs.choice."""
    guided_grammar: Text | None = None
    """Older name of structured_outputs.grammar."""

    @property
    def own_names(self) -> Mapping[str, str]:
        given = [name for name in _FORMS if getattr(self, name)]
        return {"structured_outputs": given[0]} if given else {}

    def form(self) -> StructuredOutputsParams | None:
        """Returns the form; None for any text. Raises ValidationError."""
        forms: dict[str, Any] = {
            "response_format": None if self.response_format is None else _of_response_format(self.response_format),
            "structured_outputs": self.structured_outputs or None,
        }
        for kind in _GUIDED_KINDS:
            value = getattr(self, f"guided_{kind}")
            forms[f"guided_{kind}"] = None if value is None else {kind: value}
        given = {name: fields for name, fields in forms.items() if fields is not None}
        if len(given) > 1:
            raise ValidationError(
                f"{' and '.join(given)} are set; the form of an output is asked for in one field", param=min(given)
            )
        for name, fields in given.items():
            try:
                return make_structured_outputs(fields)
            except ValidationError as e:
                raise ValidationError(str(e), param=e.param if name == "structured_outputs" else name) from None
        return None


_GUIDED_KINDS = ("json", "regex", "choice", "grammar")
_FORMS = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _GUIDED_KINDS))


def _of_response_format(value: dict[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if schema is None:
            raise ValidationError(
                "response_format of type json_schema needs json_schema.schema", param="response_format"
            )
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": msgspec.json.encode(value).decode()}
    raise ValidationError(
        f"response_format.type={str(kind)[:60]!r} is not one of text, json_object, json_schema, structural_tag",
        param="response_format",
    )


_BOUNDS = {bound.name: bound for bound in (*SAMPLING_FIELDS, *EXTRA_FIELDS)}


def bound_of(name: str) -> Meta:
    """Returns the range of a field of `SamplingParams` as an annotation."""
    bound = _BOUNDS[name]
    low = min((bound.minimum, *bound.special), key=lambda v: -1e39 if v is None else v)
    high = MAX_FLOAT if bound.maximum is None else bound.maximum
    if bound.exclusive_minimum:
        return Meta(gt=low, le=high)
    return Meta(ge=low, le=high)


class ExtraArguments(msgspec.Struct):
    """vLLM's arguments for extensions. Others than these have no effect."""

    num_speculative_tokens: Annotated[int, bound_of("num_speculative_tokens")] | None = None
    """Most drafts of the request in a step, where the server speculates; 0: none."""
    kv_store: bool | None = None
    """false: the request's KV blocks are kept out of the server's --kv-store."""


class StreamOptions(msgspec.Struct):
    """Further content of a stream."""

    include_usage: bool | None = False
    """true: the stream ends with a chunk without choices that counts the tokens."""
    continuous_usage_stats: bool | None = False
    """true: every chunk counts the tokens, too; only with include_usage."""


class RepetitionDetection(msgspec.Struct):
    """Limits of a repeated pattern of tokens that ends the answer."""

    max_pattern_size: Count = 0
    min_pattern_size: Count = 0
    min_count: Count = 0


class GenerationBody(FormBody, kw_only=True):
    """OpenAI's sampling fields and vLLM's further ones."""

    model: Name | None = None
    """One of /v1/models; may be left out."""
    stream: bool | None = False
    """true: the answer is a stream of server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with stream."""
    frequency_penalty: Annotated[float, bound_of("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, bound_of("presence_penalty")] | None = None
    repetition_penalty: Annotated[float, bound_of("repetition_penalty")] | None = None
    logit_bias: Annotated[dict[Name, Finite], Meta(max_length=65536)] | None = None
    """Token id (as text) to the number added to its logit, limited to [-100, 100]."""
    n: Annotated[int, bound_of("n")] | None = 1
    """Number of outputs per prompt."""
    seed: Int64 | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=1024)] | None = None
    temperature: Annotated[float, bound_of("temperature")] | None = None
    top_p: Annotated[float, bound_of("top_p")] | None = None
    top_k: Annotated[int, bound_of("top_k")] | None = None
    min_p: Annotated[float, bound_of("min_p")] | None = None
    user: Name | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=4096)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    """Number of prompt tokens that are kept; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Annotated[int, bound_of("prompt_logprobs")] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=1_048_576)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=MAX_BAD_WORDS)] | None = None
    priority: Int64 = 0
    """Smaller is served first, where the server schedules by priority."""
    request_id: Name | None = None
    """Part of the answer's id, like the header X-Request-Id."""
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """Only requests with the same salt share cached prefixes."""
    return_tokens_as_token_ids: bool | None = None
    """true: log-probabilities show tokens as token_id:N."""
    return_token_ids: bool | None = None
    """true: the answer shows the token ids of prompt and answer."""
    repetition_detection: RepetitionDetection | None = None
    """Ends an answer that repeats itself."""
    stream_interval: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    """Minimum number of tokens per chunk."""

    vllm_xargs: ExtraArguments | None = None
    """num_speculative_tokens, 0 to 128: most drafts of the request in a step; kv_store false: its blocks are kept out
    of --kv-store. Other keys have no effect."""
    session_id: Name | None = None
    mm_payload: Literal["tensors", "none"] | None = None
    return_mm_kwargs: bool | None = None
    routed_experts_prompt_start: Count = 0
    use_beam_search: bool = False
    length_penalty: Finite | None = 1.0
    watermarking: bool | None = None
    kv_transfer_params: Object | None = None
    """Blocks that another engine holds for this request, or is to be sent (docs/disaggregation.md)."""
    ec_transfer_params: Object | None = None
    thinking_token_budget: Annotated[int, bound_of("thinking_token_budget")] | None = None
    """Maximum number of reasoning tokens in conversations; -1: unlimited."""
    return_token_offsets: bool | None = False

    NEUTRAL = {  # noqa: RUF012 - a ClassVar of the base class
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "watermarking": (False,),
        "ec_transfer_params": ({},),
        "return_token_offsets": (False,),
    }
    WITHOUT_EFFECT = {  # noqa: RUF012
        "session_id": "requests of a session are served like others; equal prefixes are found by their content",
        "mm_payload": "no answer has processed media",
        "return_mm_kwargs": "no answer has processed media",
        "routed_experts_prompt_start": "no answer shows routed experts",
    }

    def wants_usage(self, *, is_forced: bool) -> tuple[bool, bool]:
        """Returns (whether a stream ends with a chunk of counts, whether every chunk has them). `is_forced`:
        --enable-force-include-usage, which asks for both."""
        options = self.stream_options or StreamOptions()
        at_end = is_forced or bool(options.include_usage)
        return at_end, is_forced or (at_end and bool(options.continuous_usage_stats))


_TAKEN_OVER = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "logprob_token_ids",
    "allowed_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "stream_interval", "logit_bias", "thinking_token_budget",
)  # fmt: skip


def make_sampling_params(
    body: GenerationBody, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Returns the parameters for the engine. `defaults` are the model's, for fields that the request leaves out.

    Streams get deltas, other answers one final output. Raises ValidationError.
    """
    if body.stream_options is not None and not body.stream:
        raise ValidationError("stream_options needs stream: true", param="stream_options")
    given = {name: value for name in _TAKEN_OVER if (value := getattr(body, name)) is not None}
    detection = body.repetition_detection
    if detection is not None:
        given["repetition_detection"] = RepetitionDetectionParams(
            detection.max_pattern_size, detection.min_pattern_size, detection.min_count
        )
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    if body.vllm_xargs is not None:
        names = ("num_speculative_tokens", "kv_store")
        extra = {name: value for name in names if (value := getattr(body.vllm_xargs, name)) is not None}
        given["extra_args"] = extra or None
    if body.kv_transfer_params:
        transfer = parse_transfer_params(body.kv_transfer_params)
        given["extra_args"] = {**(given.get("extra_args") or {}), TRANSFER_PARAMS: body.kv_transfer_params}
        if transfer.do_remote_prefill and transfer.seed is not None:
            given.setdefault("seed", transfer.seed)  # the answer of the engine that prefilled goes on
    given["structured_outputs"] = body.form()
    return SamplingParams.from_optional(
        **{"max_tokens": None, **defaults, **given},
        logprobs=logprobs,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )
