"""Parameters of generation, with vLLM's names, defaults and bounds.

The bounds of single fields stand in `SAMPLING_FIELDS`, one row each: the validator below, the documentation and the
fuzzer are all derived from that table. The two `validate_*` methods check what a bound cannot express (two fields
against each other, the model's vocabulary).
"""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

import msgspec

from quire import envs
from quire.errors import ValidationError
from quire.field_bounds import INT64_MAX, FieldBound, NamedFields
from quire.kv_transfer_params import FIELD as TRANSFER_PARAMS
from quire.kv_transfer_params import parse_transfer_params
from quire.structured_outputs import ReasoningTokens, are_reasoning_tokens
from quire.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

GuidedDecodingParams = StructuredOutputsParams
"""The name that StructuredOutputsParams had in earlier versions of vLLM."""

GREEDY_TEMPERATURE = 1e-5
"""A lower temperature means greedy decoding."""
MIN_TEMPERATURE = 0.01
"""A sampling temperature below this is raised to it: smaller ones overflow in half precision."""
MAX_BAD_WORDS = 128
MAX_BIAS = 100.0
MAX_LOGPROB_TOKEN_IDS = 128


class RequestOutputKind(Enum):
    """Content of each RequestOutput of a stream."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only what is new."""
    FINAL_ONLY = 2
    """Nothing until the request is finished."""


class RepetitionDetectionParams(msgspec.Struct, metaclass=NamedFields, frozen=True, omit_defaults=True):
    """Stop when the output ends in one pattern repeated: `min_pattern_size <= len(pattern) <= max_pattern_size` tokens,
    at least `min_count` times in a row. All zero means off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if self.max_pattern_size == 0 and self.min_pattern_size == 0 and self.min_count == 0:
            return
        if self.max_pattern_size < 1 or self.max_pattern_size > 4096:
            raise ValidationError(
                f"repetition_detection.max_pattern_size={self.max_pattern_size} is outside [1, 4096]",
                param="repetition_detection",
                value=self.max_pattern_size,
            )
        if self.min_pattern_size < 0 or self.min_pattern_size > self.max_pattern_size:
            raise ValidationError(
                f"repetition_detection.min_pattern_size={self.min_pattern_size} must be in "
                f"[0, max_pattern_size={self.max_pattern_size}]",
                param="repetition_detection",
                value=self.min_pattern_size,
            )
        if self.min_count < 2:
            raise ValidationError(
                f"repetition_detection.min_count={self.min_count} must be at least 2",
                param="repetition_detection",
                value=self.min_count,
            )

    @property
    def enabled(self) -> bool:
        """False when every field is zero."""
        return self.max_pattern_size > 0


SAMPLING_FIELDS: tuple[FieldBound, ...] = (
    FieldBound("n", "int", 1, 16384),
    FieldBound("presence_penalty", "float", -2, 2),
    FieldBound("frequency_penalty", "float", -2, 2),
    FieldBound("repetition_penalty", "float", 0, exclusive_minimum=True),
    FieldBound("temperature", "float", 0, 2),
    FieldBound("top_p", "float", 0, 1, exclusive_minimum=True),
    FieldBound("top_k", "int", -1, INT64_MAX),
    FieldBound("min_p", "float", 0, 1),
    FieldBound("seed", "int", -INT64_MAX - 1, INT64_MAX, optional=True),
    FieldBound("stop", "list[str]", max_len=1024, max_item_len=4096),
    FieldBound("stop_token_ids", "list[int]", max_len=4096),
    FieldBound("ignore_eos", "bool"),
    FieldBound("max_tokens", "int", 1, INT64_MAX, optional=True),
    FieldBound("min_tokens", "int", 0, INT64_MAX),
    FieldBound("logprobs", "int", 0, INT64_MAX, optional=True, special=(-1,)),
    FieldBound("prompt_logprobs", "int", 0, INT64_MAX, optional=True, special=(-1,)),
    FieldBound("logprob_token_ids", "list[int]", max_len=MAX_LOGPROB_TOKEN_IDS, optional=True),
    FieldBound("detokenize", "bool"),
    FieldBound("skip_special_tokens", "bool"),
    FieldBound("spaces_between_special_tokens", "bool"),
    FieldBound("include_stop_str_in_output", "bool"),
    FieldBound("stream_interval", "int", 1, INT64_MAX, optional=True),
    FieldBound("logit_bias", "dict[int,float]", max_len=65536, optional=True),
    FieldBound("allowed_token_ids", "list[int]", max_len=1_048_576, optional=True),
    FieldBound("bad_words", "list[str]", max_len=MAX_BAD_WORDS, max_item_len=1024),
    FieldBound("skip_reading_prefix_cache", "bool", optional=True),
    FieldBound("thinking_token_budget", "int", 0, INT64_MAX, optional=True, special=(-1,)),
)
EXTRA_FIELDS: tuple[FieldBound, ...] = (
    FieldBound("num_speculative_tokens", "int", 0, 128),  # the bound is that of --spec-tokens
    FieldBound("kv_store", "bool"),
)
"""Keys of `extra_args` that mean something."""


class SamplingParams(msgspec.Struct, metaclass=NamedFields, omit_defaults=True, kw_only=True, dict=True):
    """Parameters of one generation request.

    The object a user passes is never changed: the frontend works on `clone()`. The frontend fills in the fields after
    the blank line at the end from the model and the tokenizer; users leave them alone.

    Raises ValidationError (a ValueError) naming the field when a value is outside its bound.
    """

    OLDER_NAMES: ClassVar[Mapping[str, str]] = {"guided_decoding": "structured_outputs"}

    n: int = 1
    """Number of outputs to generate for the prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that already occurs in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; > 1 discourages repeats."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one."""
    seed: int | None = None
    """None: one is given at admission. -1 means None."""
    stop: list[str] | str | None = None
    """Strings that end the output; they are not part of the text unless include_stop_str_in_output."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output; kept in token_ids, left out of the text unless include_stop_str_in_output."""
    ignore_eos: bool = False
    """Go on after the token that ends an answer."""
    max_tokens: int | None = 16
    """None: as many as the context holds."""
    min_tokens: int = 0
    """No end-of-sequence and no stop token before this many output tokens."""
    logprobs: int | None = None
    """Top-k log-probabilities per output token beside the sampled one's; -1 for the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens. Such a request does not read the prefix cache."""
    logprob_token_ids: list[int] | None = None
    """Return log-probabilities of exactly these tokens at every output position."""
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    """Emit an update at most every so many tokens; None takes the engine's."""
    skip_clone: bool = False
    """The caller promises not to reuse this object, which saves a copy."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits; [-100, 100] at the HTTP door."""
    allowed_token_ids: list[int] | None = None
    """Only these may be sampled."""
    bad_words: list[str] | None = None
    """Words that must not appear in the output."""
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool | None = None
    """None: only when prompt_logprobs are asked for."""
    thinking_token_budget: int | None = None
    """The model's reasoning is closed after so many tokens. Needs `reasoning_tokens`; -1 means None."""
    reasoning_tokens: ReasoningTokens | None = None
    """Tokens that the model puts around its reasoning. A server sets them from --reasoning-parser."""
    extra_args: dict[str, Any] | None = None
    """`num_speculative_tokens`: most drafts of the request in a step, 0 to 128; `kv_store` False: its blocks are kept
    out of --kv-store. Other keys are for extensions."""
    """For extensions; the engine does not read it."""

    eos_token_id: int | None = None
    """Set by the frontend: the token that ends the output unless ignore_eos."""
    bad_words_token_ids: list[list[int]] | None = None
    """Set by the frontend: bad_words as token id sequences."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form the output must have."""

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Brings every field into its usual form and checks it. May be repeated. Raises ValidationError."""
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.validate_fields()
        if self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.bad_words is None:
            self.bad_words = []
        if 0 < self.temperature < MIN_TEMPERATURE and self.temperature >= GREEDY_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.top_k == -1:
            self.top_k = 0
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    # -- what it means ------------------------------------------------------------------------------------------

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Returns stop_token_ids plus the end-of-sequence token: the tokens that `min_tokens` holds back."""
        ids = set(self.stop_token_ids or ())
        if self.eos_token_id is not None and not self.ignore_eos:
            ids.add(self.eos_token_id)
        return ids

    @property
    def num_logprobs(self) -> int | None:
        """Returns the number of log-probabilities per output token that the worker must return; None for none."""
        return self.logprobs

    def clone(self) -> SamplingParams:
        """Returns a copy without validation. Containers are copied one level deep; their items are immutable."""
        if self.skip_clone:
            return self
        clone = copy.copy(self)
        for name in self.__struct_fields__:
            value = getattr(clone, name)
            if isinstance(value, list | dict):
                setattr(clone, name, value.copy())
        return clone

    @staticmethod
    def from_optional(**fields: Any) -> SamplingParams:
        """Makes parameters from fields, with None for the default, and clamps logit_bias to ±`MAX_BIAS`."""
        bias = fields.pop("logit_bias", None)
        if bias is not None:
            bias = _read_bias(bias)
            if bias and (max(bias.values()) > MAX_BIAS or min(bias.values()) < -MAX_BIAS):
                bias = {k: min(MAX_BIAS, max(-MAX_BIAS, v)) for k, v in bias.items()}
        nullable = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
        given = {k: v for k, v in fields.items() if v is not None or k in nullable}
        return SamplingParams(**given, logit_bias=bias)

    # -- the door -----------------------------------------------------------------------------------------------

    def validate_fields(self) -> None:
        """Checks every field against its declared bound, then fields against each other. Raises ValidationError."""
        for bound, default in _BOUNDS_AND_DEFAULTS:
            value = getattr(self, bound.name)
            if value is not default:
                bound.validate(value)
        if self.n > 1 and self.n > (max_n := int(envs.MAX_N_SEQUENCES.number())):
            raise ValidationError(
                f"n={self.n} is over the limit of {max_n} (QUIRE_MAX_N_SEQUENCES)", param="n", value=self.n
            )
        if self.is_greedy and self.n > 1:
            raise ValidationError(
                f"n={self.n} with temperature 0 would return {self.n} equal outputs; use n=1 or a temperature > 0",
                param="n",
                value=self.n,
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}",
                param="min_tokens",
                value=self.min_tokens,
            )
        self._validate_words()
        tokens: object = self.reasoning_tokens
        if tokens is not None and not are_reasoning_tokens(tokens):
            raise ValidationError(
                f"reasoning_tokens must be ReasoningTokens with token ids, got {reprlib.repr(tokens)}",
                param="reasoning_tokens",
            )
        extra: object = self.extra_args
        if extra is not None and not isinstance(extra, dict):
            raise ValidationError(f"extra_args must be a dict, got {type(extra).__name__}", param="extra_args")
        for bound in EXTRA_FIELDS:
            if extra and bound.name in extra:
                bound.validate(extra[bound.name])
        if extra and extra.get(TRANSFER_PARAMS) is not None:
            parse_transfer_params(extra[TRANSFER_PARAMS])
        detection: object = self.repetition_detection
        if detection is not None and not isinstance(detection, RepetitionDetectionParams):
            raise ValidationError(
                f"repetition_detection must be RepetitionDetectionParams, got {type(detection).__name__}",
                param="repetition_detection",
            )
        form: object = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            raise ValidationError(
                f"structured_outputs must be StructuredOutputsParams, got {type(form).__name__}",
                param="structured_outputs",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValidationError(
                "allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids", value=[]
            )

    def _validate_words(self) -> None:
        if any(not s for s in self.stop or ()):
            raise ValidationError("stop holds an empty string, which would stop at once", param="stop", value="")
        if self.stop and not self.detokenize:
            raise ValidationError(
                "stop strings need the text: set detokenize=True or use stop_token_ids",
                param="stop",
                value=self.stop,
            )
        if any(not w.strip() for w in self.bad_words or ()):
            raise ValidationError("bad_words holds an empty word", param="bad_words", value="")

    def validate_for_model(self, vocab_size: int, max_logprobs: int) -> None:
        """Checks token ids against the vocabulary and logprob counts against the model's limit.

        `max_logprobs` of -1 means no limit. Raises ValidationError.
        """
        ids: dict[str, Sequence[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": tuple(self.logit_bias or ()),
            "logprob_token_ids": self.logprob_token_ids or (),
            "reasoning_tokens": self.reasoning_tokens.ids if self.reasoning_tokens is not None else (),
        }
        if self.thinking_token_budget is not None and self.reasoning_tokens is None:
            raise ValidationError(
                "thinking_token_budget needs reasoning_tokens: between which tokens the model reasons",
                param="thinking_token_budget",
                value=self.thinking_token_budget,
            )
        for name, values in ids.items():
            if values and not (min(values) >= 0 and max(values) < vocab_size):
                token_id = next(value for value in values if not 0 <= value < vocab_size)
                raise ValidationError(
                    f"{name} holds token id {token_id}, outside the vocabulary [0, {vocab_size})",
                    param=name,
                    value=token_id,
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is None or max_logprobs == -1:
                continue
            wanted = vocab_size if count == -1 else count
            if wanted > max_logprobs:
                raise ValidationError(
                    f"{name}={count} asks for {wanted} log-probabilities per token; the limit is {max_logprobs} "
                    "(raise it with --max-logprobs)",
                    param=name,
                    value=count,
                )


_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))
_BOUNDS_AND_DEFAULTS = [(bound, _DEFAULTS[bound.name]) for bound in SAMPLING_FIELDS]
"""Bounds with the defaults of their fields: a field at its default, as most are, is not checked."""


class BeamSearchParams(msgspec.Struct, metaclass=NamedFields, omit_defaults=True):
    """Parameters of `LLM.beam_search`. Scores are sums of log-probabilities over length ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for bound in BEAM_FIELDS:
            bound.validate(getattr(self, bound.name))


BEAM_FIELDS: tuple[FieldBound, ...] = (
    FieldBound("beam_width", "int", 1, 1024),
    FieldBound("max_tokens", "int", 1, INT64_MAX),
    FieldBound("ignore_eos", "bool"),
    FieldBound("temperature", "float", 0, 2),
    FieldBound("length_penalty", "float", -100, 100),
    FieldBound("include_stop_str_in_output", "bool"),
)


def _read_bias(given: Any) -> dict[int, float]:
    """Returns a `logit_bias` with ids and numbers. Raises ValidationError that names the first bad entry."""
    try:
        bias = dict(zip(map(int, given), map(float, given.values()), strict=True))
        if not any(map(math.isnan, bias.values())):
            return bias
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    entries = given.items() if isinstance(given, Mapping) else [given]
    bad = next(filter(_is_bad_bias, entries), given)
    raise ValidationError(
        f"logit_bias must be a map from token id to a finite number, got {reprlib.repr(bad)}", param="logit_bias"
    )


def _is_bad_bias(entry: Any) -> bool:
    try:
        token_id, value = entry
        int(token_id)
        return math.isnan(float(value))
    except (TypeError, ValueError, OverflowError):
        return True
