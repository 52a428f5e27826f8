"""From the words of a command line to the values of its options.

argparse splits the words; values are read by `Option.read`, so that one message serves the command line and the
config file. Only what was given is stored, so that a `--config` file can fill in the rest and the command line wins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.cli.config_file import read_config_file
from quire.cli.options import Arguments, Option, Positional, nearest
from quire.errors import ConfigError

CONFIG_OPTION = Option(
    name="config", help="YAML file whose keys are flags; the command line wins.", metavar="FILE.yaml"
)


class CommandLine:
    """The arguments one command takes. Raises ConfigError on any misuse, naming the nearest thing that exists."""

    def __init__(
        self, prog: str, summary: str, options: Sequence[Option], positional: Positional | None = None, epilog: str = ""
    ) -> None:
        self.prog = prog
        self.summary = summary
        self.epilog = epilog
        self.positional = positional
        self.options = [*options, CONFIG_OPTION]
        self._by_name = {option.name: option for option in self.options}
        self._by_name |= {option.alias: option for option in self.options if option.alias}

    def parse(self, argv: Sequence[str]) -> Arguments:
        """Read `argv` (without program and command name), then the --config file under it."""
        end = list(argv).index("--") if "--" in argv else len(argv)
        given = self._read_flags(_join_dotted(_normalise(argv[:end]), self._by_name))
        self._add_positionals(given, argv[end + 1 :])
        if "config" in given:
            given = {**self._read_config_file(Path(given["config"])), **given}
        defaults = {option.name: option.default for option in self.options}
        if self.positional is not None:
            defaults.setdefault(self.positional.name, [] if self.positional.nargs == "*" else None)
        return Arguments(given, defaults)

    def _read_flags(self, argv: Sequence[str]) -> dict[str, Any]:
        words, unknown = self._argparser().parse_known_intermixed_args(argv)
        if unknown:
            raise self._unknown(unknown)
        given = {k: v for k, v in vars(words).items() if v not in (None, [])}
        return {k: self._by_name[k].read(v) if k in self._by_name else v for k, v in given.items()}

    def _add_positionals(self, given: dict[str, Any], words: Sequence[str]) -> None:
        """Take what stands after a bare `--`, whatever it looks like."""
        place = self.positional
        if place is not None and place.nargs == "*" and words:
            given[place.name] = [*given.get(place.name, []), *words]
        elif place is not None and place.name not in given and len(words) == 1:
            given[place.name] = words[0]
        elif words:
            raise ConfigError(f"unexpected argument {words[-1]!r}; see {self.prog} --help")

    def _argparser(self) -> argparse.ArgumentParser:
        parser = _Parser(prog=self.prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        for option in self.options:
            if option.is_switch:
                parser.add_argument(*option.spellings, dest=option.name, action=argparse.BooleanOptionalAction)
            elif option.takes_several:
                parser.add_argument(*option.spellings, dest=option.name, action="extend", nargs="+")
            else:
                action = "append" if option.is_repeatable else "store"
                parser.add_argument(*option.spellings, dest=option.name, action=action)
        if self.positional is not None:
            parser.add_argument(self.positional.name, nargs=self.positional.nargs)
        return parser

    def _unknown(self, words: Sequence[str]) -> ConfigError:
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not flags:
            return ConfigError(f"unexpected argument {words[0]!r}; see {self.prog} --help")
        known = [s for option in self.options for s in option.spellings]
        return ConfigError(
            f"unknown flag {flags[0]}; {nearest(flags[0], [*known, '--help'], f'{self.prog} --help=all lists them')}"
        )

    def _read_config_file(self, path: Path) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for key, raw in read_config_file(path).items():
            name = str(key).replace("-", "_")
            option = self._by_name.get(name)
            if option is None or option is CONFIG_OPTION:
                flags = [o.name.replace("_", "-") for o in self.options]
                raise ConfigError(f"{path}: unknown key {key!r}; {nearest(str(key), flags, 'its keys are flags')}")
            if raw is None:
                continue
            try:
                given[option.name] = option.read(raw)
            except ConfigError as e:
                raise ConfigError(f"{path}: {e}") from None
        return given


class _Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError where it would print its usage and exit."""

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument ") + f"; see {self.prog} --help")


def _normalise(argv: Sequence[str]) -> list[str]:
    """Flags with `-` for `_`; keys behind a dot and values are left alone."""
    words = list(argv)
    for i, word in enumerate(words):
        if word.startswith("--"):
            head, equals, value = word.partition("=")
            flag, dot, key = head.partition(".")
            words[i] = flag.replace("_", "-") + dot + key + equals + value
    return words


def _join_dotted(argv: list[str], by_name: Mapping[str, Option]) -> list[str]:
    """--x.a.b 1 and --x.c=2 become --x={"a":{"b":1},"c":2} for flags that take JSON; a JSON value is decoded."""
    objects: dict[str, dict[str, Any]] = {}
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        head, equals, value = word.partition("=")
        flag, dot, key = head.partition(".")
        option = by_name.get(flag[2:].replace("-", "_")) if flag.startswith("--") else None
        if option is None or not option.is_json:
            words.append(word)
            continue
        text = value if equals else next(rest, None)
        if text is None:
            raise ConfigError(f"{head} needs a value")
        target = objects.setdefault(flag, {})
        if dot:
            _set_key(target, key, text)
        else:
            target.update(option.read(text))
    return [f"{flag}={json.dumps(value)}" for flag, value in objects.items()] + words


def _set_key(target: dict[str, Any], key: str, text: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        inner = target.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key!r} goes into {parent!r}, which holds {inner!r}")
        target = inner
    try:
        target[last] = json.loads(text)
    except json.JSONDecodeError:
        target[last] = text
