"""Options as rows of a table, and the way from the words of a command line to their values.

The parser, its help and its config file are derived from the rows. argparse splits the words; `Option.read` reads
values, so that the command line and the config file have the same messages. Only what was given is stored, so that a
`--config` file can fill in the rest and the command line wins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, nearest

_KIND_WORDS: dict[Callable[[str], Any], str] = {int: "an integer", float: "a number"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One flag. `name` uses underscores and is the key in `Arguments`; `default` is used when it is not given."""

    name: str
    help: str
    group: str = "Options"
    parse: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    is_switch: bool = False
    """The flag has the forms --x and --no-x."""
    is_repeatable: bool = False
    """Each use adds one value to a list."""
    takes_many: bool = False
    """A use may be followed by several values, which then make a list."""
    short: str | None = None
    alias: str | None = None
    """A second name, spelled like `name`."""
    validate: Callable[[Any], None] | None = None
    """Raises a QuireError for a value out of bounds."""

    @property
    def flag(self) -> str:
        """The flag's spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> list[str]:
        """Every spelling that argparse accepts, short one first."""
        alias = ["--" + self.alias.replace("_", "-")] if self.alias else []
        return [*([self.short] if self.short else []), self.flag, *alias]

    @property
    def is_json(self) -> bool:
        """True where the value is a JSON object, so that --x.key value may set one key of it."""
        return self.metavar == "JSON"

    def read(self, raw: Any) -> Any:
        """Returns the value of `raw`: text of the command line, or a YAML value. Raises ConfigError."""
        if self.is_repeatable or (self.takes_many and isinstance(raw, list)):
            values = [self.read_one(item) for item in (raw if isinstance(raw, list) else [raw])]
            return values if self.is_repeatable or len(values) > 1 else values[0]
        return self.read_one(raw)

    def read_one(self, raw: Any) -> Any:
        """Returns one value of a flag that may have several, like `read`."""
        value = self._read_switch(raw) if self.is_switch else self._read_text(raw)
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.flag} {value!r} is not one of {', '.join(self.choices)}")
        if self.validate is not None:
            self.validate(value)
        return value

    def _read_switch(self, raw: Any) -> bool:
        if not isinstance(raw, bool):
            raise ConfigError(f"{self.flag} {raw!r} is not true or false")
        return raw

    def _read_text(self, raw: Any) -> Any:
        text = raw if isinstance(raw, str) else json.dumps(raw)
        try:
            return self.parse(text)
        except ConfigError as e:
            raise ConfigError(f"{self.flag}: {e}") from None
        except ValueError:
            raise ConfigError(f"{self.flag} {text!r} is not {_KIND_WORDS.get(self.parse, 'a valid value')}") from None


@dataclass(frozen=True)
class Positional:
    """A positional argument. `nargs` is argparse's: "?" for at most one (default None), "*" for a list."""

    name: str
    help: str
    nargs: str = "?"


class Arguments:
    """The values of a command line: `args["max_tokens"]` is the value given, or the option's default."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self._values = {**defaults, **given}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def given_among(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the given values among `names`."""
        return {name: self.given[name] for name in names if name in self.given}


def read_config_file(path: Path) -> dict[Any, Any]:
    """Returns the map of flags to values in YAML file `path`. Raises ConfigError naming the file."""
    import yaml  # a third-party import of 0.04 s that few command lines need

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"--config {path}: {e.strerror or e}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(e).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} holds a {type(content).__name__}, not a map of flags to values")
    return content


@dataclass(frozen=True)
class ForeignFlags:
    """Flags of another program, consulted only where a command line has a flag that is not ours."""

    make_options: Callable[[], Sequence[Option]]
    settle: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Maps the given values to values of our own flags. Raises ConfigError."""


CONFIG_OPTION = Option(
    name="config", help="YAML file whose keys are flags; the command line wins.", metavar="FILE.yaml"
)


class CommandLine:
    """The arguments of one command. Raises ConfigError on any misuse, naming the nearest thing that exists."""

    def __init__(
        self,
        prog: str,
        summary: str,
        options: Sequence[Option],
        positional: Positional | None = None,
        epilog: str = "",
        foreign: ForeignFlags | None = None,
    ) -> None:
        self.prog = prog
        self.summary = summary
        self.epilog = epilog
        self.positional = positional
        self.options = [*options, CONFIG_OPTION]
        self._by_name = {option.name: option for option in self.options}
        self._by_name |= {option.alias: option for option in self.options if option.alias}
        self._foreign = foreign
        self._foreign_options: list[Option] = []

    def parse(self, argv: Sequence[str]) -> Arguments:
        """Reads `argv` (without program and command name), then the --config file for what is missing."""
        end = list(argv).index("--") if "--" in argv else len(argv)
        words = normalise(argv[:end])
        if not self._knows(words):
            self._adopt_foreign()
        given = self._read_flags(self._spread(join_dotted(words, self._by_name)))
        self._add_positionals(given, argv[end + 1 :])
        if "config" in given:
            given = {**self._read_config_file(Path(given["config"])), **given}
        foreign = {option.name: given.pop(option.name) for option in self._foreign_options if option.name in given}
        if self._foreign is not None and foreign:
            given = {**self._foreign.settle(foreign), **given}
        defaults = {option.name: option.default for option in self.options}
        if self.positional is not None:
            defaults.setdefault(self.positional.name, [] if self.positional.nargs == "*" else None)
        return Arguments(given, defaults)

    def _knows(self, words: Sequence[str]) -> bool:
        """Returns True if every flag is ours."""
        ours = {spelling for option in self.options for spelling in option.spellings}
        ours |= {f"--no-{option.flag[2:]}" for option in self.options if option.is_switch}
        return all(word.partition("=")[0].partition(".")[0] in ours for word in words if word.startswith("-"))

    def foreign_options(self) -> list[Option]:
        """Returns the options of another program that are not ours."""
        return [] if self._foreign is None else list(self._foreign.make_options())

    def _adopt_foreign(self) -> None:
        if not self._foreign_options:
            self._foreign_options = self.foreign_options()
            self._by_name |= {option.name: option for option in self._foreign_options}

    def _spread(self, words: Sequence[str]) -> list[str]:
        """Rewrites `--x a b` as `--x a --x b` for flags that take many.

        Without the positional argument before it, or --model, a second value is read as that argument.
        """
        by_spelling = {s: option for option in self._by_name.values() for s in option.spellings}
        found: list[str] = []
        rest = list(words)
        has_place = self.positional is None
        while rest:
            word = rest.pop(0)
            found.append(word)
            option = by_spelling.get(word)
            has_place = has_place or not word.startswith("-") or word.startswith("--model=") or word == "--model"
            if option is None or option.is_switch or not rest:
                continue
            found.append(rest.pop(0))
            while option.takes_many and has_place and rest and not rest[0].startswith("-"):
                found += [word, rest.pop(0)]
        return found

    def _read_flags(self, argv: Sequence[str]) -> dict[str, Any]:
        words, unknown = self._argparser().parse_known_intermixed_args(argv)
        if unknown:
            raise self._unknown(unknown)
        given = {k: v for k, v in vars(words).items() if v not in (None, [])}
        return {k: self._by_name[k].read(v) if k in self._by_name else v for k, v in given.items()}

    def _add_positionals(self, given: dict[str, Any], words: Sequence[str]) -> None:
        """Takes everything after a bare `--` as positional arguments."""
        place = self.positional
        if place is not None and place.nargs == "*" and words:
            given[place.name] = [*given.get(place.name, []), *words]
        elif place is not None and place.name not in given and len(words) == 1:
            given[place.name] = words[0]
        elif words:
            raise ConfigError(f"unexpected argument {words[-1]!r}; see {self.prog} --help")

    def _argparser(self) -> argparse.ArgumentParser:
        parser = _Parser(prog=self.prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        for option in [*self.options, *self._foreign_options]:
            if option.is_switch:
                parser.add_argument(*option.spellings, dest=option.name, action=argparse.BooleanOptionalAction)
            else:
                action = "append" if option.is_repeatable or option.takes_many else "store"
                parser.add_argument(*option.spellings, dest=option.name, action=action)
        if self.positional is not None:
            parser.add_argument(self.positional.name, nargs=self.positional.nargs)
        return parser

    def _unknown(self, words: Sequence[str]) -> ConfigError:
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not flags:
            return ConfigError(f"unexpected argument {words[0]!r}; see {self.prog} --help")
        known = [s for option in [*self.options, *self._foreign_options] for s in option.spellings]
        return ConfigError(
            f"unknown flag {flags[0]}; {nearest(flags[0], [*known, '--help'], f'{self.prog} --help=all lists them')}"
        )

    def _read_config_file(self, path: Path) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for key, raw in read_config_file(path).items():
            name = str(key).replace("-", "_")
            if name not in self._by_name:
                self._adopt_foreign()
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
    """An argparse parser that raises ConfigError instead of printing its usage and exiting."""

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument ") + f"; see {self.prog} --help")


def normalise(argv: Sequence[str]) -> list[str]:
    """Returns flags with `-` for `_`; keys after a dot and values do not change."""
    words = list(argv)
    for i, word in enumerate(words):
        if word.startswith("--"):
            head, equals, value = word.partition("=")
            flag, dot, key = head.partition(".")
            words[i] = flag.replace("_", "-") + dot + key + equals + value
    return words


def join_dotted(argv: list[str], by_name: Mapping[str, Option]) -> list[str]:
    """Turns --x.a.b 1 and --x.c=2 into --x={"a":{"b":1},"c":2} for flags that take JSON; a JSON value is decoded."""
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
