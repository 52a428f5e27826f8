"""The sampling flags of `quire complete` and `quire chat`: names, types and bounds come from `SAMPLING_FIELDS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.cli.options import Option
from quire.config.flags import parse_json_object
from quire.errors import ConfigError
from quire.field_bounds import FieldBound
from quire.sampling_params import SAMPLING_FIELDS, SamplingParams

GROUP = "Sampling"

SAMPLING_HELP: dict[str, str] = {
    "n": "Outputs per prompt.",
    "temperature": "Randomness; 0 always takes the most likely token.",
    "top_p": "Sample from the smallest set of tokens whose probability reaches this.",
    "top_k": "Sample from the k most likely tokens; 0 for all.",
    "min_p": "Drop tokens less likely than this times the most likely one.",
    "seed": "Seed of the draws: the same seed gives the same text.",
    "max_tokens": "Longest output in tokens.",
    "min_tokens": "No end of the output before this many tokens.",
    "stop": "End the output before this text. May be repeated.",
    "stop_token_ids": "End the output at this token id. May be repeated.",
    "ignore_eos": "Go on after the model's end-of-text token.",
    "presence_penalty": "Make tokens that already occur in the output less likely.",
    "frequency_penalty": "The same, once per occurrence.",
    "repetition_penalty": "Above 1, make tokens of prompt and output less likely.",
    "logit_bias": 'JSON object from token id to what is added to its logit: {"42": -5}.',
    "bad_words": "A word the output must not hold. May be repeated.",
    "allowed_token_ids": "Allow only this token id. May be repeated.",
    "logprobs": "Log-probabilities of this many most likely tokens per position (seen with --json).",
    "include_stop_str_in_output": "Keep the stop text at the end of the output.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}
"""One line per field that the command line offers. The others have no meaning in a terminal."""

_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "list[int]": int,
    "list[str]": str,
    "bool": str,
}
_DEFAULTS = SamplingParams()


def sampling_options() -> list[Option]:
    """One option per row of `SAMPLING_HELP`. `seed` is shared with the engine's flag of that name."""
    bounds = {bound.name: bound for bound in SAMPLING_FIELDS}
    return [_option(bounds[name], help_text) for name, help_text in SAMPLING_HELP.items()]


def make_sampling_params(given: Mapping[str, Any], model_defaults: Mapping[str, Any], **fixed: Any) -> SamplingParams:
    """`given` over the model's own defaults over SamplingParams'. Raises ValidationError.

    `fixed` are fields the command sets itself, such as output_kind. An unset max_tokens means the rest of the context.
    """
    return SamplingParams.from_optional(**{"max_tokens": None, **model_defaults, **given, **fixed})


def read_assignment(text: str) -> tuple[str, Any]:
    """`key=value` as `/params` of the chat takes it: the field's name and its value. Raises ConfigError."""
    name, equals, value = text.partition("=")
    options = {option.name: option for option in sampling_options()}
    option = options.get(name.strip().replace("-", "_"))
    if option is None or not equals:
        raise ConfigError(f"{text!r} is not one of {', '.join(options)} followed by =value")
    if option.is_switch:
        return option.name, option.read(value.strip().lower() in ("true", "1", "yes", "on"))
    return option.name, option.read(value)


def _option(bound: FieldBound, help_text: str) -> Option:
    is_json = bound.kind.startswith("dict")
    is_list = bound.kind.startswith("list")
    return Option(
        name=bound.name,
        help=help_text,
        group=GROUP,
        parse=parse_json_object if is_json else _READERS[bound.kind],
        metavar="JSON" if is_json else None,
        default=getattr(_DEFAULTS, bound.name) if bound.kind == "bool" else None,
        is_switch=bound.kind == "bool",
        is_repeatable=is_list,
        validate=None if is_list or is_json else bound.validate,
    )
