"""The argument parser that programs written for vLLM use, and the engine's flags as arguments of it.

Such a program makes a parser, has `EngineArgs.add_cli_args` add the engine's flags, adds its own, and gives what was
parsed to `EngineArgs.from_cli_args` or, as keywords, to `LLM`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.cli.command_line import Option, join_dotted, normalise, read_config_file
from quire.cli.option_groups import engine_options, vllm_options
from quire.config.engine_args import FLAGS
from quire.errors import QuireError, nearest


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argparse parser that takes `_` for `-` in flags, `--flag.key value` for flags that hold JSON, and
    `--config FILE.yaml` for flags that the command line leaves out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.json_options: dict[str, Option] = {}
        """Flags that hold JSON objects, by name."""

    def error(self, message: str) -> Any:
        """Ends the program; an unknown flag is answered with the nearest one."""
        head, _, words = message.partition("unrecognized arguments: ")
        if words and not head:
            message += "; " + nearest(words.split("=")[0].split()[0], self._option_string_actions, "--help lists them")
        super().error(message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = normalise(sys.argv[1:] if args is None else args)
        try:
            words = join_dotted(self._with_config_file(words), self.json_options)
        except QuireError as e:
            self.error(str(e))
        return super().parse_known_args(words, namespace)

    def _with_config_file(self, words: list[str]) -> list[str]:
        """Returns the words without --config, the file's flags before those of the command line, which win."""
        for i, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if flag == "--config" and "--config" not in self._option_string_actions:
                path, rest = (value, words[i + 1 :]) if equals else ("".join(words[i + 1 : i + 2]), words[i + 2 :])
                return _words_of(read_config_file(Path(path))) + words[:i] + rest
        return words


class _Collect(argparse.Action):
    """Makes one list of the values of all uses of a flag."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(() if before is self.default else before), *values])


class _OneOrMany(argparse.Action):
    """Stores one value as itself, and several as a list."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def add_engine_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds every flag of the engine to `parser`, and those of vLLM's that Quire accepts or refuses in words.

    The latter are in the result only where they were given.
    """
    ours, groups = engine_options(), dict[str, Any]()
    for option in ours:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_option(groups[option.group], option, FLAGS[option.name].default)
    theirs = vllm_options({option.name for option in ours} | {"config"})
    group = parser.add_argument_group("Flags of vLLM without a counterpart")
    for option in theirs:
        _add_option(group, option, argparse.SUPPRESS)
    if isinstance(parser, FlexibleArgumentParser):
        parser.json_options |= {option.name: option for option in [*ours, *theirs] if option.is_json}
    return parser


def _add_option(group: Any, option: Option, default: Any) -> None:
    """Adds one flag to a group of arguments."""

    def read(text: str) -> Any:
        try:
            return option.read_one(text)
        except QuireError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    common: dict[str, Any] = {"dest": option.name, "default": default, "help": option.help.replace("%", "%%")}
    if option.is_switch:
        group.add_argument(*option.spellings, action=argparse.BooleanOptionalAction, **common)
        return
    if option.is_repeatable or option.takes_many:
        common |= {"nargs": "+", "action": _Collect if option.is_repeatable else _OneOrMany}
    group.add_argument(*option.spellings, type=read, metavar=option.metavar, **common)


def _words_of(flags: dict[Any, Any]) -> list[str]:
    """Returns the command line that says what a --config file says."""
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + str(name).replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words
