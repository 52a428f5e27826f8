"""A command's options as rows of a table: the parser, its help and its config file are derived from them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

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
    """--x / --no-x."""
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
        """Its spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> list[str]:
        """Every spelling argparse is told, short one first."""
        alias = ["--" + self.alias.replace("_", "-")] if self.alias else []
        return [*([self.short] if self.short else []), self.flag, *alias]

    @property
    def is_json(self) -> bool:
        """True where the value is a JSON object, so that --x.key value may set one key of it."""
        return self.metavar == "JSON"

    def read(self, raw: Any) -> Any:
        """The value of `raw`: text of the command line, or a YAML value. Raises ConfigError."""
        if self.is_repeatable or (self.takes_many and isinstance(raw, list)):
            values = [self._read_one(item) for item in (raw if isinstance(raw, list) else [raw])]
            return values if self.is_repeatable or len(values) > 1 else values[0]
        return self._read_one(raw)

    def _read_one(self, raw: Any) -> Any:
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
    """What stands without a flag. `nargs` is argparse's: "?" for at most one (default None), "*" for a list."""

    name: str
    help: str
    nargs: str = "?"


class Arguments:
    """What a command line says: `args["max_tokens"]` is the value given, or the option's default."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self._values = {**defaults, **given}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def given_among(self, names: Iterable[str]) -> dict[str, Any]:
        """The given values among `names`."""
        return {name: self.given[name] for name in names if name in self.given}


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """ "did you mean X?" for the known word nearest to `word`, or `otherwise`."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise
