"""JSON as models write it: where a value ends, and what a string says."""

from __future__ import annotations

import json
import re

_BETWEEN = re.compile(r"[ \t\r\n,:\w.+-]*", re.ASCII)
"""What may stand between the brackets and strings of a value."""
_SCALAR = re.compile(r"[\w.+-]*", re.ASCII)
_STRING = re.compile(r'[^"\\]*')


class JsonScanner:
    """Finds the end of one JSON value in text that comes in pieces. A counter of depth, no stack and no recursion.

    It knows strings and brackets; whether the value is valid JSON is for those who read it. A character that can stand
    nowhere in JSON ends the value before it.
    """

    def __init__(self) -> None:
        self.is_over = False
        """The value has ended, or can have no end."""
        self.is_broken = False
        """It ended at something that is not JSON."""
        self.is_scalar = False
        """A number or a word, whose end is seen only in what follows."""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False

    def advance(self, text: str, start: int) -> int:
        """Go on at `start`; the index up to which `text` belongs to the value."""
        at, end = start, len(text)
        while at < end and not self.is_over:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            elif self._in_string:
                at = self._in_a_string(text, at)
            elif self.is_scalar:
                at = _end(_SCALAR, text, at)
                self.is_over = at < end
            elif self._has_begun:
                at = _end(_BETWEEN, text, at)
                at = self._at_a_sign(text, at) if at < end else at
            else:
                at = self._at_its_start(text, at)
        return at

    def _in_a_string(self, text: str, at: int) -> int:
        at = _end(_STRING, text, at)
        if at == len(text):
            return at
        self._is_escaped = text[at] == "\\"
        if not self._is_escaped:
            self._in_string = False
            self.is_over = self._depth == 0
        return at + 1

    def _at_its_start(self, text: str, at: int) -> int:
        self._has_begun = True
        if text[at] in '"{[':
            return self._at_a_sign(text, at)
        self.is_scalar = _end(_SCALAR, text, at) > at
        self.is_over = self.is_broken = not self.is_scalar
        return at

    def _at_a_sign(self, text: str, at: int) -> int:
        sign = text[at]
        if sign == '"':
            self._in_string = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            self.is_over = self._depth == 0
        else:
            self.is_over = self.is_broken = True
            return at
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found is not None else at


def decode_string(raw: str) -> str | None:
    """What a JSON string says; None if it is none. Line breaks within are taken, half a surrogate pair becomes "?"."""
    try:
        value = json.loads(raw, strict=False) if raw.startswith('"') else None
    except ValueError:
        return None
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def escape_string(text: str) -> str:
    """What stands between the quotes of a JSON string that says `text`."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
