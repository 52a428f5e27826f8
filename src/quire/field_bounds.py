"""The declared bound of a request field, as data.

Every request field has one row in a table (`SAMPLING_FIELDS`, and the tables of other modules). Validators, command
line, documentation and fuzz tests are derived from the rows. No field without a bound reaches the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import UnknownArgumentError, ValidationError, nearest

INT64_MAX = 2**63 - 1


class NamedFields(msgspec.StructMeta):
    """Makes Structs whose constructor raises UnknownArgumentError, a TypeError, for a name that is no field's.

    A Struct's `OLDER_NAMES` holds names of fields in earlier versions of vLLM, which are taken as the present ones.
    """

    if not TYPE_CHECKING:  # type checkers read the fields

        def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805
            try:
                return _call(cls, *args, **fields)
            except TypeError:
                name = next((name for name in fields if name not in cls.__struct_fields__), None)
                if name is None:
                    raise
                newer = getattr(cls, "OLDER_NAMES", {}).get(name)
                if newer is not None and newer not in fields:
                    return cls(*args, **{newer if key == name else key: value for key, value in fields.items()})
                hint = nearest(name, cls.__struct_fields__, f"help({cls.__name__}) lists its fields")
                raise UnknownArgumentError(f"{cls.__name__} has no field {name!r}; {hint}") from None


_call = msgspec.StructMeta.__call__


@dataclass(frozen=True)
class FieldBound:
    """The declared bound of one request field.

    `kind` is the accepted type: "int", "float" (finite unless said), "bool", "str", "list[int]", "list[str]",
    "dict[int,float]" or "object". `minimum`/`maximum` are inclusive unless `exclusive_minimum`. `max_len` bounds
    sequences, `max_item_len` each string in one. `special` lists values accepted outside the range.
    """

    name: str
    kind: str
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    max_len: int | None = None
    max_item_len: int | None = None
    optional: bool = False
    special: tuple[int, ...] = ()

    def validate(self, value: Any) -> None:
        """Raises ValidationError unless `value` is inside this bound."""
        if value is None:
            if not self.optional:
                raise self._error(value, "must not be null")
            return
        if not _KINDS[self.kind](value):
            raise self._error(value, f"must be {_KIND_WORDS[self.kind]}")
        if self.kind in ("int", "float"):
            low, high = self.minimum, self.maximum
            too_low = low is not None and (value <= low if self.exclusive_minimum else value < low)
            if (too_low or (high is not None and value > high)) and value not in self.special:
                raise self._error(value, f"must be in {self.range_text()}")
        elif self.max_len is not None and hasattr(value, "__len__") and len(value) > self.max_len:
            raise ValidationError(
                f"{self.name} has {len(value)} items; at most {self.max_len} are allowed", param=self.name
            )
        elif self.max_item_len is not None:
            longest = max(map(len, value), default=0)
            if longest > self.max_item_len:
                raise ValidationError(
                    f"{self.name} holds a string of {longest} characters; at most {self.max_item_len} are allowed",
                    param=self.name,
                )

    def range_text(self) -> str:
        """Returns the range as the documentation writes it: ``(0, 1]``."""
        low = "-inf" if self.minimum is None else f"{self.minimum:.15g}"
        high = "inf" if self.maximum is None else f"{self.maximum:.15g}"
        text = f"{'(' if self.exclusive_minimum or self.minimum is None else '['}{low}, {high}"
        text += ")" if self.maximum is None else "]"
        return text + (f" or {', '.join(map(str, self.special))}" if self.special else "")

    def _error(self, value: Any, rule: str) -> ValidationError:
        shown = repr(value)
        return ValidationError(
            f"{self.name} {rule}, got {shown if len(shown) <= 60 else shown[:57] + '...'}",
            param=self.name,
            value=value,
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -INT64_MAX - 1 <= value <= INT64_MAX


def _is_float(value: Any) -> bool:
    # math.isfinite overflows on huge ints, so integers go through the int64 bound
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_map(value: dict[Any, Any]) -> bool:
    return all(_is_int(k) and _is_float(x) for k, x in value.items())


def _is_plain_map(value: dict[Any, Any]) -> bool:
    """Returns True for a plain map inside the bound, without Python code per item: it may hold tens of thousands."""
    if set(map(type, value)) != {int} or set(map(type, value.values())) - {int, float}:
        return False
    numbers = value.values()
    in_range = max(value) <= INT64_MAX and min(value) >= -INT64_MAX and max(map(abs, numbers)) <= INT64_MAX
    return in_range and all(map(math.isfinite, numbers))


_KINDS: dict[str, Any] = {
    "int": _is_int,
    "float": _is_float,
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "list[int]": lambda v: isinstance(v, list | tuple) and all(map(_is_int, v)),
    "list[str]": lambda v: isinstance(v, list | tuple) and all(isinstance(s, str) for s in v),
    "dict[int,float]": lambda v: isinstance(v, dict) and (_is_plain_map(v) or _is_map(v)),
    "object": lambda v: True,
}
_KIND_WORDS = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a string",
    "list[int]": "a list of integers",
    "list[str]": "a list of strings",
    "dict[int,float]": "a map from token id to a finite number",
    "object": "an object",
}
