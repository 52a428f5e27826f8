"""Text that comes in pieces, read as if it were all there.

A parser is a generator: it asks its `TextSource` for text with `yield from`, and waits while there is none. So a format
reads from top to bottom, and the events cannot depend on how the text was cut. No character is examined twice, except
the few of a marker that may be incomplete: the work is linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeAlias, TypeVar

SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[\w.+-]*", re.ASCII)
_VALID_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_STRING = re.compile(r'[^"\\]*')


class _Expects(Enum):
    """Next element of a JSON value, after white space."""

    VALUE = auto()
    VALUE_OR_END = auto()
    """After "[": a value, or the array's end."""
    KEY = auto()
    KEY_OR_END = auto()
    """After "{": a key, or the object's end."""
    COLON = auto()
    COMMA_OR_END = auto()


class JsonScanner:
    """Finds the end of one JSON value in text that comes in pieces, without recursion.

    A character that JSON does not allow at its place ends the value before it; an invalid word ends it after the word.
    Text within strings is not checked: models write line breaks and odd escapes into them.
    """

    def __init__(self) -> None:
        self.is_over = False
        """True once the value has ended, or cannot end."""
        self.is_broken = False
        """True once the value has ended at something that is not JSON."""
        self.is_scalar = False
        """True: the value is a number or a word, whose end is visible only in what follows."""
        self._open: list[str] = []
        """Open brackets."""
        self._expects = _Expects.VALUE
        self._in_string = False
        self._is_escaped = False
        self._scalar: list[str] | None = None
        """Pieces of the number or word that is being read."""

    def advance(self, text: str, start: int) -> int:
        """Goes on at `start`. Returns the index up to which `text` belongs to the value."""
        at, end = start, len(text)
        while at < end and not self.is_over:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            elif self._in_string:
                at = self._in_a_string(text, at)
            elif self._scalar is not None:
                at = self._in_a_scalar(self._scalar, text, at)
            else:
                at = _end(SPACE, text, at) if self._open else at
                at = self._at_a_sign(text[at], at) if at < end else at
        return at

    def _in_a_string(self, text: str, at: int) -> int:
        at = _end(_STRING, text, at)
        if at == len(text):
            return at
        self._is_escaped = text[at] == "\\"
        if not self._is_escaped:
            self._in_string = False
            if self._expects in (_Expects.KEY, _Expects.KEY_OR_END):
                self._expects = _Expects.COLON
            else:
                self._end_value()
        return at + 1

    def _in_a_scalar(self, pieces: list[str], text: str, at: int) -> int:
        stop = _end(_SCALAR, text, at)
        pieces.append(text[at:stop])
        if stop < len(text):
            self._scalar = None
            self._end_value()
            if self._open and not _VALID_SCALAR.fullmatch("".join(pieces)):
                self.is_over = self.is_broken = True
        return stop

    def _at_a_sign(self, sign: str, at: int) -> int:
        match self._expects, sign:
            case ((_Expects.VALUE | _Expects.VALUE_OR_END | _Expects.KEY | _Expects.KEY_OR_END), '"'):
                self._in_string = True
            case ((_Expects.VALUE | _Expects.VALUE_OR_END), ("{" | "[")):
                self._open.append(sign)
                self._expects = _Expects.KEY_OR_END if sign == "{" else _Expects.VALUE_OR_END
            case (_Expects.VALUE_OR_END, "]") | (_Expects.KEY_OR_END, "}") | (_Expects.COMMA_OR_END, ("]" | "}")) if (
                self._open[-1] == _OPENED_BY[sign]
            ):
                self._open.pop()
                self._end_value()
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA_OR_END, ",":
                self._expects = _Expects.KEY if self._open[-1] == "{" else _Expects.VALUE
            case ((_Expects.VALUE | _Expects.VALUE_OR_END), _) if _SCALAR.fullmatch(sign):
                self.is_scalar = not self._open
                self._scalar = []
                return at
            case _:
                self.is_over = self.is_broken = True
                return at
        return at + 1

    def _end_value(self) -> None:
        self.is_over = not self._open
        self._expects = _Expects.COMMA_OR_END


_OPENED_BY = {"]": "[", "}": "{"}


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found is not None else at


def decode_string(raw: str) -> str | None:
    """Returns the text of a JSON string; None for anything else. Line breaks within are accepted, half a surrogate pair
    becomes "?"."""
    try:
        value = json.loads(raw, strict=False) if raw.startswith('"') else None
    except ValueError:
        return None
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def escape_string(text: str) -> str:
    """Returns `text` as it is between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


Result = TypeVar("Result")
Step: TypeAlias = Generator[None, None, Result]
"""Part of a parser. It yields when it needs more text."""


class Markers:
    """Literal texts to search for. None may be the beginning of another."""

    def __init__(self, *literals: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, literals)))
        self.longest = max(map(len, literals))
        self._beginnings = frozenset(literal[:i] for literal in literals for i in range(1, len(literal)))

    def num_open(self, text: str, start: int) -> int:
        """Returns the number of characters at the end of `text[start:]` that may be the beginning of a marker."""
        for length in range(min(self.longest - 1, len(text) - start), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class TextSource:
    """Text that is still to be read, by one reader."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._record: list[str] | None = None
        self.is_closed = False
        """True: no more text will come."""
        self.num_examined = 0
        """Number of characters copied or searched so far; tests compare it with the text's length."""

    def append(self, text: str) -> None:
        """Adds text."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self.num_examined += len(self._text)

    def close(self) -> None:
        """Ends the text."""
        self.is_closed = True

    # -- a record of what was read, in case it is no call ----------------------------------------------------------

    def begin(self, text: str = "") -> None:
        """Begins to record what is read, after `text`. Does nothing if it records already."""
        if self._record is None:
            self._record = [text]

    def forget(self) -> None:
        """Drops the record: the text was a call."""
        self._record = None

    def roll_back(self) -> str:
        """Returns the record, which is content, and ends it. Reading goes on where it is."""
        text = "".join(self._record or ())
        self._record = None
        return text

    def put_back(self, marker: str) -> None:
        """Makes a marker unread again, right after `copy_until` has returned it."""
        self._at -= len(marker)

    # -- reading ----------------------------------------------------------------------------------------------------

    def take(self, end: int) -> str:
        """Reads up to index `end` of the present piece."""
        piece = self._text[self._at : end]
        self.num_examined += len(piece)
        self._at = end
        if self._record is not None and piece:
            self._record.append(piece)
        return piece

    def take_char(self) -> None:
        """Reads the character that `peek` has returned."""
        self.take(self._at + 1)

    def peek(self) -> Step[str]:
        """Returns the next character; "" at the end."""
        while self._at >= len(self._text):
            if self.is_closed:
                return ""
            yield
        return self._text[self._at]

    def match(self, literal: str, *, or_end: bool = False) -> Step[bool]:
        """Reads `literal` if it comes next. Returns whether it does. With `or_end` the text's end may cut it off."""
        while True:
            self.num_examined += len(literal)
            if self._text.startswith(literal, self._at):
                self.take(self._at + len(literal))
                return True
            if len(self._text) - self._at >= len(literal) or not literal.startswith(self._text[self._at :]):
                return False
            if self.is_closed:
                if or_end:
                    self.take(len(self._text))
                return or_end
            yield

    def take_while(self, pattern: re.Pattern[str], limit: int = 1 << 62) -> Step[str]:
        """Reads what `pattern`, a repeated set of characters, matches: at most one character more than `limit`."""
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._at, min(len(self._text), self._at + limit + 1))
            end = found.end() if found is not None else self._at
            limit -= end - self._at
            parts.append(self.take(end))
            if self._at < len(self._text) or self.is_closed or limit < 0:
                return "".join(parts)
            yield

    def copy_while(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Step[None]:
        """Hands what `pattern`, a repeated set of characters, matches to `emit` as it comes."""
        while True:
            found = pattern.match(self._text, self._at)
            emit(self.take(found.end() if found is not None else self._at))
            if self._at < len(self._text) or self.is_closed:
                return
            yield

    def skip_space(self) -> Step[None]:
        """Reads white space."""
        yield from self.take_while(SPACE)

    def copy_until(self, markers: Markers, emit: Callable[[str], None]) -> Step[str | None]:
        """Hands everything before the next marker to `emit` as it comes, and reads the marker. Returns it; None at the
        end."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            if found is not None:
                emit(self.take(found.start()))
                self._at = found.end()
                return found.group()
            held = 0 if self.is_closed else markers.num_open(self._text, self._at)
            emit(self.take(len(self._text) - held))
            if self.is_closed:
                return None
            yield

    def copy_rest(self, emit: Callable[[str], None]) -> Step[None]:
        """Hands everything to `emit`."""
        while True:
            emit(self.take(len(self._text)))
            if self.is_closed:
                return
            yield

    def copy_json(self, emit: Callable[[str], None]) -> Step[bool]:
        """Hands one JSON value to `emit` as it comes. Returns False, and stops, if it is none or breaks off."""
        scanner = JsonScanner()
        while True:
            emit(self.take(scanner.advance(self._text, self._at)))
            if scanner.is_over:
                return not scanner.is_broken
            if self.is_closed:
                return scanner.is_scalar
            yield
