"""Turns a prompt and its parameters into an `EngineCoreRequest`: the one validation door of generation and pooling.

Everything a request may hold is checked here, before it is sent to the engine core. This module sends nothing.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from quire import envs
from quire.config.hf_config import token_ids
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.pooling import PoolingConfig
from quire.errors import PromptTooLongError, ValidationError
from quire.field_bounds import INT64_MAX, FieldBound
from quire.frontend.adapters import AdapterDoor
from quire.frontend.embeds import Embeds, EmbedsReader, RawEmbeds
from quire.frontend.new_request import MAX_CACHE_SALT_CHARS, NewRequest, ParsedPrompt
from quire.frontend.session import validate_session_params
from quire.frontend.text.tokenizer import Tokenizer
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest

PRIORITY = FieldBound("priority", "int", -INT64_MAX - 1, INT64_MAX)
TOKENIZATION_KWARGS = (
    FieldBound("add_special_tokens", "bool"),
    FieldBound("truncate_prompt_tokens", "int", 1, INT64_MAX, special=(-1,), optional=True),
    FieldBound("truncation_side", "str"),
)
MAX_SHOWN_ID_CHARS = 64
"""Number of characters of the user's id that show in the internal one."""
MAX_CHARS_PER_TOKEN = 256
"""More characters than any token of the vocabularies in use stands for."""
MAX_CONTEXTS_TO_CUT = 4
"""A text that will be cut may be this many times as long as one that fits."""
_SEED_BITS = 62
"""Seeds given here leave room below 2**63 for `seed + index` of the n outputs of a prompt."""


_PROMPT_KEYS = {
    "prompt", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "cache_salt", "type", "arrival_time",
    "prediction",
}  # fmt: skip


class InputProcessor:
    """Knows the model's limits, its tokenizer and its defaults. `max_model_len` is the fitted one."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        supported_tasks: Sequence[str] = ("generate",),
        adapters: AdapterDoor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.adapters = AdapterDoor(LoRAConfig()) if adapters is None else adapters
        """Checks the adapters of requests."""
        self.max_model_len = max_model_len
        self.get_ranks: Callable[[], Collection[int]] = lambda: (0,)
        """Returns the engines that a request may name."""
        self._supported_tasks = tuple(supported_tasks)
        self._pooling = model_config.pooling
        self._vocab_size = model_config.hf_config.vocab_size
        self._embeds: EmbedsReader | None = None
        """None: prompts are text or token ids."""
        if model_config.enable_prompt_embeds:
            self._embeds = EmbedsReader(model_config.hf_config.hidden_size, max_model_len)
        self._max_logprobs = model_config.max_logprobs
        self.sampling_defaults = model_config.sampling_defaults
        self._eos_token_id, self._more_eos_ids = _eos_ids(model_config, tokenizer)
        self._seeds = random.Random(model_config.seed)
        self._keeps_ids = envs.DISABLE_REQUEST_ID_RANDOMIZATION.flag()

    def process_inputs(self, new: NewRequest) -> tuple[EngineCoreRequest, str | None]:
        """Returns (the validated request, the text to show as its prompt).

        An `EngineCoreRequest` in place of the prompt is taken as it is. Raises ValidationError, PromptTooLongError, or
        TypeError for an id that is not a str.
        """
        if isinstance(new.prompt, EngineCoreRequest):
            if new.prompt.request_id != new.request_id:
                raise ValidationError(
                    f"request_id {new.request_id!r} is not that of the request, {new.prompt.request_id!r}",
                    param="request_id",
                )
            return new.prompt, new.prompt_text
        if not isinstance(new.request_id, str):
            raise TypeError(f"request_id must be a str, got {type(new.request_id).__name__}")
        PRIORITY.validate(new.priority)
        if new.data_parallel_rank is not None:
            self._validate_rank(new.data_parallel_rank)
        if new.resumable:
            validate_session_params(new.params)
        lora_request = None if new.lora_request is None else self.adapters.check(new.lora_request)
        prompt = self.read_prompt(new.prompt, new.tokenization_kwargs)
        token_ids = prompt.token_ids
        assert token_ids is not None
        embeds: Embeds | None = prompt.embeds
        if embeds is not None:
            _validate_embeds_request(new)
        self._validate_prompt(token_ids, pools=isinstance(new.params, PoolingParams))
        sampling_params = pooling_params = None
        if isinstance(new.params, SamplingParams):
            sampling_params = self._sampling_params(new.params, len(token_ids))
        elif isinstance(new.params, PoolingParams):
            pooling_params = self._pooling_params(new.params)
        else:
            raise ValidationError(
                f"params must be SamplingParams or PoolingParams, got {type(new.params).__name__}",
                param="sampling_params",
            )
        arrival_time = prompt.arrival_time if new.arrival_time is None else new.arrival_time
        request = EngineCoreRequest(
            request_id=new.request_id,
            prompt_token_ids=token_ids,
            sampling_params=sampling_params,
            pooling_params=pooling_params,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            lora_request=lora_request,
            cache_salt=prompt.cache_salt,
            data_parallel_rank=new.data_parallel_rank,
            priority=new.priority,
            trace_headers=new.trace_headers,
            resumable=new.resumable,
            prediction_token_ids=cast("list[int]", prompt.prediction) if prompt.prediction else [],
            prompt_embeds=embeds,
            prompt_is_token_ids=prompt.is_token_ids,
        )
        return request, prompt.text if new.prompt_text is None else new.prompt_text

    def _validate_rank(self, rank: int) -> None:
        ranks = self.get_ranks()
        if isinstance(rank, bool) or not isinstance(rank, int) or rank not in ranks:
            raise ValidationError(
                f"data_parallel_rank must name an engine of this server ({', '.join(map(str, ranks))}), got {rank!r}",
                param="data_parallel_rank",
                value=rank,
            )

    def read_prompt(self, prompt: Any, tokenization_kwargs: Mapping[str, Any]) -> ParsedPrompt:
        """Returns `prompt` with its token ids, cut if `tokenization_kwargs` say so.

        This part of `process_inputs` may take long, and may be done beforehand, on any thread: what it returned is
        read again at no cost. Raises as `process_inputs`.
        """
        parsed, kwargs = self._read_prediction(parse_prompt(prompt)), tokenization_kwargs
        if kwargs:
            _validate_tokenization_kwargs(kwargs)
        if parsed.embeds is not None:
            return self._read_embeds(parsed, kwargs)
        ids = parsed.token_ids
        if ids is None:
            assert parsed.text is not None
            if self._pooling is not None:
                return replace(parsed, token_ids=self._text_ids(self._pooling, parsed.text, None, kwargs)[0])
            tokenizer = self._check_text(parsed.text, kwargs)
            ids = tokenizer.encode(parsed.text, kwargs.get("add_special_tokens", True))
        keep = kwargs.get("truncate_prompt_tokens")
        if keep is not None:
            pools = self._pooling is not None
            keep = self.max_model_len - (not pools) if keep == -1 else keep
            side = kwargs.get("truncation_side", "right" if pools else "left")
            ids = ids[:keep] if side == "right" else ids[-keep:]
        return parsed if ids is parsed.token_ids else replace(parsed, token_ids=ids)

    def decode_embeds(self, payload: str) -> RawEmbeds:
        """Returns prompt embeddings from base64 of a file, to be given in a prompt. Raises ValidationError."""
        return self._require_embeds().decode(payload)

    def _require_embeds(self) -> EmbedsReader:
        if self._embeds is None:
            raise ValidationError(
                "prompt_embeds are given, and this engine takes text and token ids only; start it with "
                "--enable-prompt-embeds (LLM(enable_prompt_embeds=True))",
                param="prompt_embeds",
            )
        return self._embeds

    def _read_embeds(self, prompt: ParsedPrompt, kwargs: Mapping[str, Any]) -> ParsedPrompt:
        """Returns the prompt with its embeddings checked, and an id for each position: 0 where there is no token."""
        if kwargs.get("truncate_prompt_tokens") is not None:
            raise ValidationError(
                "truncate_prompt_tokens cuts tokens; cut prompt_embeds yourself", param="truncate_prompt_tokens"
            )
        embeds = self._require_embeds().read(prompt.embeds)
        ids, mask = prompt.token_ids, prompt.is_token_ids
        if mask is None:
            ids = [0] * len(embeds)
        elif ids is None or not len(ids) == len(mask) == len(embeds):
            raise ValidationError(
                f"a mixed prompt has prompt_token_ids ({0 if ids is None else len(ids)}), prompt_is_token_ids "
                f"({len(mask)}) and prompt_embeds ({len(embeds)} rows) for all its positions; their lengths must agree",
                param="prompt_is_token_ids",
            )
        else:
            ids = [token_id if is_token else 0 for token_id, is_token in zip(ids, mask, strict=True)]
        return replace(prompt, embeds=embeds, token_ids=ids)

    def _read_prediction(self, prompt: ParsedPrompt) -> ParsedPrompt:
        """Returns the prompt with the ids of its prediction, of which no more than a context is kept."""
        text = prompt.prediction
        if not isinstance(text, str):
            return prompt
        ids: list[int] = []
        if self.tokenizer is not None:
            ids = self.tokenizer.encode(text[: self.max_model_len * MAX_CHARS_PER_TOKEN], False)
        return replace(prompt, prediction=ids[: self.max_model_len])

    def assign_request_id(self, request: EngineCoreRequest) -> None:
        """Moves the user's id to `external_req_id` and makes an internal id of it.

        The internal id is unique by 128 random bits (promise P19), and short: it travels with every token.
        """
        if request.external_req_id is not None:
            raise ValueError(f"request {request.request_id} already has an internal id; it was added before")
        request.external_req_id = request.request_id
        if not self._keeps_ids:
            request.request_id = f"{request.external_req_id[:MAX_SHOWN_ID_CHARS]}-{uuid.uuid4().hex}"

    # -- the prompt ---------------------------------------------------------------------------------------------------

    def _text_ids(
        self, pooling: PoolingConfig, text: str, second: str | None, kwargs: Mapping[str, Any]
    ) -> tuple[list[int], int | None]:
        """Returns (ids of a text or a pair to be pooled, where the second text begins if the model has segments).

        A text that is cut keeps its special tokens.
        """
        texts = [text] if second is None else [text, second]
        for part in texts:
            tokenizer = self._check_text(part, kwargs)
        if pooling.lowers_case:
            texts = [part.lower() for part in texts]
        keep = kwargs.get("truncate_prompt_tokens")
        return tokenizer.encode_texts(
            *texts,
            add_special_tokens=kwargs.get("add_special_tokens", True),
            max_len=self.max_model_len if keep == -1 else keep,
            side=kwargs.get("truncation_side", "right"),
        )

    def tokenize_pair(
        self, text: str, second: str, params: PoolingParams, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> tuple[ParsedPrompt, PoolingParams]:
        """Returns (two texts as one prompt, `params` for it), as a model that compares two reads them. Raises as
        `read_prompt`."""
        kwargs = tokenization_kwargs or {}
        _validate_tokenization_kwargs(kwargs)
        assert self._pooling is not None
        ids, start = self._text_ids(self._pooling, text, second, kwargs)
        params = params.clone()
        params.segment_start = start if self._pooling.has_segments else None
        return ParsedPrompt(token_ids=ids), params

    def _check_text(self, text: str, kwargs: Mapping[str, Any]) -> Tokenizer:
        """Returns the tokenizer for `text`. Raises PromptTooLongError for a text that cannot fit: tokenizing it could
        take minutes. A text that will be cut may be longer."""
        limit = self.max_model_len * MAX_CHARS_PER_TOKEN
        if kwargs.get("truncate_prompt_tokens") is not None:
            limit *= MAX_CONTEXTS_TO_CUT
        if len(text) > limit:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, too many for a context of {self.max_model_len} tokens "
                f"(max_model_len; at most {limit} are looked at); shorten the prompt or raise --max-model-len",
                param="prompt",
                value=len(text),
            )
        return self._require_tokenizer("a text prompt")

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValidationError(
                f"{what} needs the tokenizer, and the engine was started with skip_tokenizer_init; use token ids",
                param="prompt",
            )
        return self.tokenizer

    def _validate_prompt(self, ids: list[int], *, pools: bool) -> None:
        if not ids:
            raise ValidationError("the prompt is empty: it has no tokens", param="prompt")
        # min and max are one pass each at C speed; a loop over a 100k-token prompt would show.
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise ValidationError(
                f"the prompt holds token id {bad}, outside the vocabulary [0, {self._vocab_size})",
                param="prompt",
                value=bad,
            )
        if pools and len(ids) > self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens and the model takes {self.max_model_len} (max_model_len); shorten "
                "it, or have it cut: truncate_prompt_tokens=-1",
                param="prompt",
                value=len(ids),
            )
        if not pools:
            self.validate_room(len(ids))

    def validate_room(self, num_prompt_tokens: int, max_tokens: int | None = None) -> None:
        """Raises PromptTooLongError for a prompt that leaves no room for an output token, ValidationError for one that
        leaves less than `max_tokens`."""
        limit = self.max_model_len
        if num_prompt_tokens >= limit:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and the context {limit} (max_model_len): there is no room "
                "for a single output token; shorten the prompt or raise --max-model-len",
                param="prompt",
                value=num_prompt_tokens,
            )
        if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
            raise ValidationError(
                f"max_tokens={max_tokens} and a prompt of {num_prompt_tokens} tokens are more than the context of "
                f"{limit} (max_model_len); ask for at most {limit - num_prompt_tokens}",
                param="max_tokens",
                value=max_tokens,
            )

    # -- the parameters -----------------------------------------------------------------------------------------------

    def _pooling_params(self, params: PoolingParams) -> PoolingParams:
        """Returns a copy of `params` with everything the model decides filled in."""
        params = params.clone()
        usual = "embed" if "generate" in self._supported_tasks else self._supported_tasks[0]
        task = params.task = params.task or usual
        params.validate_fields()
        if task not in self._supported_tasks:
            raise self._task_error(task, "PoolingParams")
        pooling = self._pooling
        if params.dimensions is not None:
            _validate_dimensions(params.dimensions, pooling)
        if pooling is None or not pooling.has_segments:
            params.segment_start = None
        if pooling is not None and pooling.needs_all_tokens(task):
            params.skip_reading_prefix_cache = True
        return params

    def _task_error(self, task: str, what: str) -> ValidationError:
        supported = ", ".join(self._supported_tasks)
        return ValidationError(
            f"{what} ask for the task {task!r}, and this model supports {supported} only; {self._advice(task)}",
            param="sampling_params",
        )

    def _advice(self, task: str) -> str:
        """Returns what to do for a task that the model does not support as it was loaded."""
        if "generate" in self._supported_tasks:
            return f"--runner pooling (LLM(runner='pooling')) loads it for {task!r} where the model can do that"
        return f"call LLM.{self._supported_tasks[0]}, or the server's routes for it"

    def _sampling_params(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """Returns a copy of `params` with everything the model decides filled in."""
        if "generate" not in self._supported_tasks:
            raise self._task_error("generate", "SamplingParams")
        params = params.clone()
        params.settle()  # the object may have been changed since it was made
        params.validate_for_model(self._vocab_size, self._max_logprobs)
        if params.flat_logprobs:
            raise ValidationError(
                "flat_logprobs=True is not supported; log-probabilities come as one dict per position",
                param="flat_logprobs",
                value=True,
            )
        if params.stop or params.bad_words:
            self._require_tokenizer("a stop string or a bad word")
        if params.max_tokens is None:
            params.max_tokens = self.max_model_len - prompt_len
        seed = self._seeds.getrandbits(_SEED_BITS)  # drawn for every request, so that one with a seed moves no other
        if params.seed is None:
            params.seed = seed
        params.eos_token_id = self._eos_token_id
        if params.structured_outputs is not None and self._eos_token_id is None:
            raise ValidationError(
                "structured_outputs needs a model with an end-of-sequence token, and this one has none",
                param="structured_outputs",
            )
        if self._more_eos_ids and not params.ignore_eos:
            params.stop_token_ids = list(dict.fromkeys([*(params.stop_token_ids or ()), *self._more_eos_ids]))
        if params.bad_words:
            params.bad_words_token_ids = self._bad_words_token_ids(params.bad_words)
        return params

    def _bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Returns each word as it is spelt at the start of a text and, where that differs, after a space.

        A spelling the model has no token for is left out: it cannot be written.
        """
        tokenizer = self._require_tokenizer("a bad word")
        spellings: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and max(ids) < self._vocab_size and ids not in spellings:
                    spellings.append(ids)
        return spellings

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a text of this model."""
        return frozenset(i for i in (self._eos_token_id, *self._more_eos_ids) if i is not None)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the model's own defaults from generation_config.json, over those of SamplingParams."""
        return SamplingParams(**self.sampling_defaults)


def _eos_ids(model_config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int | None, list[int]]:
    """Returns (the end-of-sequence token, further ones that end a text of this model).

    The first is the tokenizer's, where there is one; the further ones are those generation_config.json lists, or
    config.json if that file names none (transformers' rule). Ids the model has no row for are left out: it cannot say
    them.
    """
    vocab_size = model_config.hf_config.vocab_size
    value = model_config.generation_defaults.get("eos_token_id")
    if value is not None:
        listed = token_ids(value, model_config.model_dir / "generation_config.json")
    else:
        listed = [] if model_config.generation_config == "vllm" else model_config.hf_config.eos_token_ids
    primary = tokenizer.eos_token_id if tokenizer is not None else None
    if primary is None:
        candidates = listed or model_config.hf_config.eos_token_ids
        primary = candidates[0] if candidates else None
    more = [i for i in listed if i != primary and i < vocab_size]
    return primary if primary is not None and primary < vocab_size else None, more


def _validate_embeds_request(new: NewRequest) -> None:
    """Raises ValidationError for what cannot be combined with prompt embeddings."""
    params = new.params
    if not isinstance(params, SamplingParams):
        raise ValidationError("prompt_embeds are for generation; pool text or token ids", param="prompt_embeds")
    if new.resumable:
        raise ValidationError("a session of streaming inputs takes text and token ids only", param="prompt_embeds")
    if params.prompt_logprobs is not None:
        raise ValidationError(
            "prompt_logprobs score tokens, and prompt_embeds have none; leave one of them out", param="prompt_logprobs"
        )


def _validate_dimensions(dimensions: int, pooling: PoolingConfig | None) -> None:
    if pooling is None or pooling.head != "embed" or pooling.matryoshka_dims is None:
        raise ValidationError(
            "dimensions: this model's embeddings are not made to be cut (config.json says nothing of it); leave it out",
            param="dimensions",
            value=dimensions,
        )
    allowed = pooling.matryoshka_dims
    if dimensions > pooling.embedding_dim or (allowed and dimensions not in allowed):
        known = f"one of {', '.join(map(str, allowed))}" if allowed else f"at most {pooling.embedding_dim}"
        raise ValidationError(f"dimensions must be {known}, got {dimensions}", param="dimensions", value=dimensions)


def _validate_tokenization_kwargs(kwargs: Mapping[str, Any]) -> None:
    bounds = {bound.name: bound for bound in TOKENIZATION_KWARGS}
    for name, value in kwargs.items():
        if name not in bounds:
            raise ValidationError(
                f"tokenization_kwargs cannot hold {name!r}; known: {', '.join(bounds)}", param="tokenization_kwargs"
            )
        bounds[name].validate(value)
    if kwargs.get("truncation_side", "left") not in ("left", "right"):
        raise ValidationError("truncation_side must be 'left' or 'right'", param="truncation_side")


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


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key, value in prompt.items():
        if key not in _PROMPT_KEYS and value is not None:
            raise ValidationError(
                f"a prompt cannot have {key!r} here; known keys: {', '.join(sorted(_PROMPT_KEYS))}", param=key
            )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    embeds, mask = prompt.get("prompt_embeds"), prompt.get("prompt_is_token_ids")
    if text is None and ids is None and embeds is None:
        raise ValidationError("a prompt dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'", param="prompt")
    if mask is not None and (
        embeds is None or not isinstance(mask, Sequence) or any(type(is_token) is not bool for is_token in mask)
    ):
        raise ValidationError(
            "'prompt_is_token_ids' is a list of bools, for a prompt with 'prompt_embeds'", param="prompt_is_token_ids"
        )
    if embeds is not None and (text is not None or (ids is None) != (mask is None)):
        raise ValidationError(
            "'prompt_embeds' stand alone, or with 'prompt_token_ids' and 'prompt_is_token_ids'", param="prompt_embeds"
        )
    if text is not None and not isinstance(text, str):
        raise ValidationError(f"'prompt' must be text, got {type(text).__name__}", param="prompt")
    if ids is not None and not is_token_ids(ids):
        raise ValidationError("'prompt_token_ids' must be a list of integers", param="prompt_token_ids")
    if salt is not None and (not isinstance(salt, str) or len(salt) > MAX_CACHE_SALT_CHARS):
        raise ValidationError(
            f"'cache_salt' must be text of at most {MAX_CACHE_SALT_CHARS} characters", param="cache_salt"
        )
    prediction = prompt.get("prediction") or ()
    if prediction and not isinstance(prediction, str):
        raise ValidationError(f"'prediction' must be text, got {type(prediction).__name__}", param="prediction")
    token_ids = None if ids is None else _as_ids(ids)
    return ParsedPrompt(
        text, token_ids, salt, prompt.get("arrival_time"), prediction, embeds, None if mask is None else list(mask)
    )


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
