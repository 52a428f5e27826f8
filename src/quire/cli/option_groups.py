"""Groups of options that several commands share: the engine's, sampling, output form, server, vLLM's flags.

Each group is derived from a declaration elsewhere: engine flags from the config dataclasses, sampling flags from
`SAMPLING_FIELDS`, vLLM's flags from `config/vllm_flags.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from quire.cli.command_line import Arguments, Option
from quire.config.engine_args import FLAGS, EngineArgs
from quire.config.flags import FlagSpec, parse_json_object
from quire.config.vllm_flags import VllmFlag, vllm_flags
from quire.errors import ConfigError
from quire.field_bounds import FieldBound
from quire.lora_request import LoRARequest
from quire.sampling_params import SAMPLING_FIELDS, SamplingParams
from quire.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputsParams

# -- the engine -------------------------------------------------------------------------------------------------------


def engine_options(without: Collection[str] = ()) -> list[Option]:
    """Returns an option for every flag of `FLAGS` except those named in `without`."""
    return [flag_option(spec) for spec in FLAGS.values() if spec.name not in without]


def engine_args(args: Arguments, **defaults: Any) -> EngineArgs:
    """Returns the `EngineArgs` that `args` gives; `defaults` are the command's own, which a given flag replaces."""
    return EngineArgs(**{**defaults, **args.given_among(FLAGS)})


def flag_option(spec: FlagSpec) -> Option:
    """Returns the command line's form of a declared flag."""
    return Option(
        name=spec.name,
        help=spec.help,
        group=spec.owner.__name__,
        parse=spec.parse,
        default=list(spec.default) if spec.is_list else spec.default,
        choices=spec.choices,
        metavar=spec.metavar,
        is_switch=spec.is_switch,
        is_repeatable=spec.is_list,
        takes_many=spec.takes_many,
        validate=spec.validate,
        alias=spec.alias,
        short=spec.short,
    )


def lora_option(help_text: str, *, is_repeatable: bool = False) -> Option:
    """Returns --lora."""
    return Option(name="lora", help=help_text, group="LoRAConfig", metavar="NAME=PATH", is_repeatable=is_repeatable)


def read_lora(args: Arguments) -> LoRARequest | None:
    """Returns the adapter of --lora: a path, or a name and a path. Raises ConfigError beside --url."""
    text = args["lora"]
    if text is None:
        return None
    if args["url"] is not None:
        raise ConfigError("--lora is an adapter of a model that runs here; with --url name it by --model")
    name, equals, path = text.partition("=")
    return LoRARequest(name, 1, path) if equals else LoRARequest(Path(text).name or text, 1, text)


# -- vLLM's flags, so that a start script needs only another program name ----------------------------------------------


def vllm_options(known: Collection[str]) -> list[Option]:
    """Returns an option for every flag of vLLM that is not among the names `known`."""
    return [_vllm_option(flag) for flag in vllm_flags().values() if flag.name not in known]


def _vllm_option(flag: VllmFlag) -> Option:
    is_json = flag.name.endswith("_config") and flag.name != "logging_config"
    return Option(
        name=flag.name,
        help=f"Refused: {flag.refused}." if flag.refused else f"No effect: {flag.ignored}.",
        group="Flags of vLLM without a counterpart",
        parse=parse_json_object if is_json else str,
        default=flag.default,
        metavar="JSON" if is_json else None,
        is_switch=flag.is_switch,
        takes_many=flag.takes_many,
        short=flag.short,
    )


# -- a server elsewhere -----------------------------------------------------------------------------------------------

SERVER_GROUP = "Server"
_SHARED_WITH_REQUESTS = ("model", "seed")
"""Engine flags that a request can carry, too."""


def remote_options(help_text: str) -> list[Option]:
    """Returns --url and --api-key. `help_text` says what the command does with --url."""
    return [
        Option(
            name="url",
            alias="base_url",
            help=f"{help_text} http://HOST:PORT or https://..., with or without /v1.",
            metavar="URL",
            group=SERVER_GROUP,
        ),
        Option(
            name="api_key",
            help="Sent to that server. QUIRE_API_KEY or OPENAI_API_KEY keep it off the command line.",
            group=SERVER_GROUP,
            metavar="KEY",
        ),
    ]


def validate_remote(args: Arguments) -> None:
    """Refuses engine flags beside --url. Raises ConfigError."""
    for name in args.given_among(FLAGS):
        if name not in _SHARED_WITH_REQUESTS:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for a model that runs here; with --url the server has its own flags")


# -- the form of the output (docs/structured_output.md) ---------------------------------------------------------------

_FORM_FIELDS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Maps flags to fields of StructuredOutputsParams."""


def form_options() -> list[Option]:
    """Returns the flags for the form of the output, of which one at most may be given."""
    group = "Form of the output"
    return [
        Option(name="json_schema", help="The output is JSON of this schema: JSON text, or a file.", group=group),
        Option(name="regex", help="The output matches this regular expression.", group=group),
        Option(name="choice", help="The output is this text, or another --choice.", group=group, is_repeatable=True),
        Option(name="grammar", help="The output is of this grammar (Lark or GBNF): text, or a file.", group=group),
    ]


def make_form(args: Arguments) -> StructuredOutputsParams | None:
    """Returns the form asked for. Raises ConfigError for an unreadable file, ValidationError for a bad form."""
    given = {field: args[flag] for flag, field in _FORM_FIELDS.items() if args[flag]}
    for field, flag, kind in (("json", "--json-schema", "JSON schema"), ("grammar", "--grammar", "grammar")):
        if field in given:
            given[field] = _text_or_file(given[field], flag, kind)
    return StructuredOutputsParams(**given) if given else None


def _text_or_file(value: str, flag: str, kind: str) -> str:
    if value.lstrip().startswith("{") or "::=" in value or "start:" in value:
        return value
    try:
        with Path(value).open(encoding="utf-8") as file:
            return file.read(MAX_GRAMMAR_CHARS + 1)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(f"{flag} {value[:200]}: it is neither a {kind} nor a file that can be read: {why}") from None


def name_form_flags(message: str) -> str:
    """Returns an engine's `message` with command line flags in place of the fields of StructuredOutputsParams."""
    for flag, field in _FORM_FIELDS.items():
        message = message.replace(f"structured_outputs.{field}", "--" + flag.replace("_", "-"))
    return message


# -- sampling ---------------------------------------------------------------------------------------------------------

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

_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "list[int]": int}
"""Readers of the kinds of fields that are not text."""
_DEFAULTS = SamplingParams()


def sampling_options() -> list[Option]:
    """Returns one option per row of `SAMPLING_HELP`. `seed` is shared with the engine's flag of that name."""
    bounds = {bound.name: bound for bound in SAMPLING_FIELDS}
    return [_sampling_option(bounds[name], help_text) for name, help_text in SAMPLING_HELP.items()]


def make_sampling_params(given: Mapping[str, Any], model_defaults: Mapping[str, Any], **fixed: Any) -> SamplingParams:
    """Returns `given` over the model's own defaults over those of SamplingParams. Raises ValidationError.

    `fixed` are fields the command sets itself, such as output_kind. An unset max_tokens means the rest of the context.
    """
    return SamplingParams.from_optional(**{"max_tokens": None, **model_defaults, **given, **fixed})


def read_assignment(text: str) -> tuple[str, Any]:
    """Returns name and value of a field from `key=value`, as `/params` of the chat takes it. Raises ConfigError."""
    name, equals, value = text.partition("=")
    options = {option.name: option for option in sampling_options()}
    option = options.get(name.strip().replace("-", "_"))
    if option is None or not equals:
        raise ConfigError(f"{text!r} is not one of {', '.join(options)} followed by =value")
    if option.is_switch:
        return option.name, option.read(value.strip().lower() in ("true", "1", "yes", "on"))
    return option.name, option.read(value)


def _sampling_option(bound: FieldBound, help_text: str) -> Option:
    is_json = bound.kind.startswith("dict")
    is_list = bound.kind.startswith("list")
    return Option(
        name=bound.name,
        help=help_text,
        group="Sampling",
        parse=parse_json_object if is_json else _READERS.get(bound.kind, str),
        metavar="JSON" if is_json else None,
        default=getattr(_DEFAULTS, bound.name) if bound.kind == "bool" else None,
        is_switch=bound.kind == "bool",
        is_repeatable=is_list,
        validate=None if is_list or is_json else bound.validate,
    )
