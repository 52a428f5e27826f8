"""The engine's flags on a command line: derived from the config dataclasses, one group per dataclass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from quire.cli.options import Arguments, Option
from quire.config.engine_args import FLAGS, EngineArgs
from quire.config.flags import FlagSpec


def engine_options(without: Collection[str] = ()) -> list[Option]:
    """Every flag of `FLAGS` but those named in `without`."""
    return [flag_option(spec) for spec in FLAGS.values() if spec.name not in without]


def engine_args(args: Arguments, **defaults: Any) -> EngineArgs:
    """The `EngineArgs` that `args` gives; `defaults` are the command's own, which a given flag replaces."""
    return EngineArgs(**{**defaults, **args.given_among(FLAGS)})


def flag_option(spec: FlagSpec) -> Option:
    """The command line's form of a declared flag."""
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
