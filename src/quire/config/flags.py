"""Flags: each is one documented field of a config dataclass.

`flag(default, "help", ...)` declares it. The command line, its `--help` and the keyword arguments of `EngineArgs` are
derived from the declaration.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ValidationError, nearest
from quire.field_bounds import FieldBound

_METADATA_KEY = "quire.flag"


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    parse: Callable[[str], Any] = str,
    name: str | None = None,
    metavar: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    takes_many: bool = False,
    alias: str | None = None,
    short: str | None = None,
) -> Any:
    """Returns a dataclass field that is also a command-line flag.

    `parse` turns the command line's text into the value (bool defaults make a --x/--no-x switch instead). `name` is the
    keyword and flag name where it differs from the field's. `minimum`/`maximum` are inclusive and checked by
    `validate_flags`; a field holding None is not checked. `takes_many` allows several values after one use of the flag.
    `alias` is a second name on the command line, `short` one with its dash.
    """
    spec = {
        "help": help,
        "choices": choices,
        "parse": parse,
        "name": name,
        "metavar": metavar,
        "minimum": minimum,
        "maximum": maximum,
        "takes_many": takes_many,
        "alias": alias,
        "short": short,
    }
    return dataclasses.field(default=default, metadata={_METADATA_KEY: spec})


@dataclass(frozen=True)
class FlagSpec:
    """One flag: its dataclass, and everything a parser needs. `name` uses underscores: the keyword argument."""

    name: str
    owner: type
    field_name: str
    default: Any
    help: str
    choices: tuple[str, ...]
    parse: Callable[[str], Any]
    metavar: str | None
    minimum: float | None
    maximum: float | None
    takes_many: bool
    alias: str | None
    short: str | None

    @property
    def is_switch(self) -> bool:
        """True for --x / --no-x."""
        return isinstance(self.default, bool)

    @property
    def is_list(self) -> bool:
        """True for a flag that may be repeated; its default is a tuple."""
        return isinstance(self.default, tuple)

    @property
    def option(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    def read(self, value: Any) -> Any:
        """Returns the flag's value for a keyword argument: None is the default, text is read as on the command line.

        Raises ConfigError for a value of another kind, or one that is not allowed.
        """
        if value is None:
            return self.default
        try:
            value = self._convert(value)
        except (TypeError, ValueError) as e:
            why = f": {e}" if isinstance(e, ConfigError) else f" is not {_KINDS.get(self._kind, 'text')}"
            raise ConfigError(f"{self.option} {value!r}{why}") from None
        self.validate(value)
        return value

    @property
    def _kind(self) -> Any:
        return bool if self.is_switch else self.parse

    def _convert(self, value: Any) -> Any:
        """Raises TypeError or ValueError for a value of another kind."""
        if isinstance(value, bool) or self.is_switch:
            if not (isinstance(value, bool) and self.is_switch):
                raise TypeError
            return value
        if self.takes_many and isinstance(value, list | tuple):
            items = [str(item) for item in value]
            return tuple(items) if self.is_list else items
        if isinstance(value, str):
            parsed = self.parse(value)
            return (parsed,) if self.is_list and isinstance(parsed, str) else parsed
        if self.parse is str:
            if str(value).startswith("torch."):  # a type: dtype=torch.bfloat16
                return str(value).removeprefix("torch.")
            return os.fspath(value)
        if self.parse is parse_json_object:
            if not isinstance(value, Mapping):
                raise TypeError
            return dict(value)
        return float(value) if self.parse is float else operator.index(value)

    def validate(self, value: Any) -> None:
        """Raises ConfigError unless `value` is allowed."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.option} {value!r} is not one of {', '.join(self.choices)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if not math.isfinite(value):
            raise ConfigError(f"{self.option} {value} is not a finite number")
        if self.minimum is not None and value < self.minimum:
            raise ConfigError(f"{self.option} {value} is below the minimum of {self.minimum:.15g}")
        if self.maximum is not None and value > self.maximum:
            raise ConfigError(f"{self.option} {value} is above the maximum of {self.maximum:.15g}")


def flags_of(owner: type) -> list[FlagSpec]:
    """Returns the flags declared by config dataclass `owner`, in order."""
    specs = []
    for field in dataclasses.fields(owner):
        meta = field.metadata.get(_METADATA_KEY)
        if meta is None:
            continue
        details = {k: v for k, v in meta.items() if k != "name"}
        specs.append(FlagSpec(meta["name"] or field.name, owner, field.name, field.default, **details))
    return specs


def parse_human_int(text: str) -> int:
    """Parses '4k' = 4000, '4K' = '4KiB' = 4096, '1.5m', '2G', plain integers; '-1' and 'auto' both give -1: chosen
    automatically.

    Lower-case suffixes are decimal, upper-case ones binary, as vLLM's flags have them; with iB they are binary.
    """
    if text == "auto":
        return -1
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    if text.endswith(("KiB", "MiB", "GiB", "TiB")):
        text = text[:-2]
    factor = scale.get(text[-1:], 1)
    digits = text[:-1] if factor != 1 else text
    try:
        return int(digits) * factor if factor == 1 else int(float(digits) * factor)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number; write 4096, 4k (decimal), 4K or 4KiB (binary)") from None


def parse_json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object, or the file that `@FILE` names, for flags with metavar="JSON"."""
    try:
        value = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{text!r} is not a JSON object: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{text!r} is not a JSON object")
    return value


_KINDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    parse_human_int: "an integer",
    float: "a number",
    parse_json_object: "a dict or a JSON object",
}
"""Words for the value of a flag, by what parses its text."""


def bounds_by_name(*bounds: FieldBound) -> dict[str, FieldBound]:
    """Returns the bounds of the keys of a JSON object, by name."""
    return {bound.name: bound for bound in bounds}


def check_keys(values: Mapping[str, Any], bounds: Mapping[str, FieldBound], where: str) -> None:
    """Raises ConfigError for an unknown key of a JSON object, or a value out of its bounds. `where` names the
    object."""
    for name, value in values.items():
        if name not in bounds:
            hint = nearest(name, bounds, f"its keys are {', '.join(bounds)}")
            raise ConfigError(f"{where} has an unknown key {name!r}; {hint}")
        try:
            bounds[name].validate(value)
        except ValidationError as e:
            raise ConfigError(f"{where}: {e}") from None
