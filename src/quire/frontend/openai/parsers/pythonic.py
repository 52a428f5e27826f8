"""Calls as a list in Python: [get_weather(city='Oslo', days=2), now()], as Llama 3.2 and 4 and others write it.

Nothing is evaluated: names, strings, numbers, True, False, None, lists and dicts are rewritten as JSON while they come.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.frontend.openai.parsers.call_object import MAX_NAME_CHARS, NAME, is_name
from quire.frontend.openai.parsers.events import EventSink
from quire.frontend.openai.parsers.source import Step, TextSource, escape_string

_KEYWORD = re.compile(r"\w*", re.ASCII)
_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_HEX = re.compile(r"[0-9A-Fa-f]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_WORD_CHARS = 512
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'", '"': '"',
    "\n": "",
}  # fmt: skip
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_CLOSES = {"[": "]", "{": "}"}

Emit = Callable[[str], None]


def parse_pythonic(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads one list of calls at the start of the text. Anything else is content."""
    source.begin()
    yield from source.skip_space()
    if not (yield from source.match("[")):
        return
    while True:
        yield from source.skip_space()
        if not (yield from _Call(source, sink).read_through()):
            return
        source.forget()
        source.begin()
        yield from source.skip_space()
        if (yield from source.match("]", or_end=True)):
            source.forget()
            return
        if not (yield from source.match(",")):
            return


class _Call:
    """Reads name(keyword=value, ...). The call starts with the first valid value."""

    def __init__(self, source: TextSource, sink: EventSink) -> None:
        self._source = source
        self._sink = sink
        self._name = ""
        self._waiting = "{"
        """JSON before the next value. The first value starts the call, too."""
        self._has_started = False

    def read_through(self) -> Step[bool]:
        """Reads up to the closing parenthesis. Returns False where it is no call, or breaks off: the recorded text is
        content then."""
        source = self._source
        self._name = yield from source.take_while(NAME, MAX_NAME_CHARS)
        if not is_name(self._name) or not (yield from source.match("(")):
            return False
        yield from source.skip_space()
        while not (yield from source.match(")")):
            keyword = yield from source.take_while(_KEYWORD, MAX_NAME_CHARS)
            yield from source.skip_space()
            if not is_name(keyword) or not (yield from source.match("=")):
                return False
            self._waiting += f'"{keyword}": '
            if not (yield from _copy_literal(source, self._write)):
                return False
            self._waiting = ", "
            source.begin()
            yield from source.skip_space()
            if (yield from source.match(",")):
                yield from source.skip_space()
            elif (yield from source.peek()) != ")":
                return False
        self._waiting = ""
        self._write("}" if self._has_started else "{}")
        return True

    def _write(self, text: str) -> None:
        if not self._has_started:
            self._has_started = True
            self._sink.start(self._name)
        self._source.forget()
        self._sink.arguments(self._waiting + text)
        self._waiting = ""


def _copy_literal(source: TextSource, emit: Emit) -> Step[bool]:
    """Hands a Python literal to `emit` as JSON. Returns False at anything else; the recorded text was not handed on."""
    closes: list[str] = []
    is_first = True
    while True:
        # A value is expected, or the end of a list that is empty or ends with a comma.
        source.begin()
        yield from source.skip_space()
        sign = yield from source.peek()
        if closes and sign == closes[-1]:
            source.take_char()
            emit(closes.pop())
        else:
            if closes and not is_first:
                emit(", ")
            if closes and closes[-1] == "}" and not (yield from _copy_key(source, emit)):
                return False
            sign = yield from source.peek()
            is_first = sign in _CLOSES
            if is_first:
                source.take_char()
                closes.append(_CLOSES[sign])
                emit(sign)
                continue
            if not (yield from _copy_scalar(source, emit)):
                return False
        # After a value.
        is_first = False
        while closes:
            source.begin()
            yield from source.skip_space()
            sign = yield from source.peek()
            if sign == ",":
                source.take_char()
                break
            if sign != closes[-1]:
                return False
            source.take_char()
            emit(closes.pop())
        source.forget()
        if not closes:
            return True


def _copy_key(source: TextSource, emit: Emit) -> Step[bool]:
    if (yield from source.peek()) not in _PLAIN or not (yield from _copy_string(source, emit)):
        return False
    source.begin()
    yield from source.skip_space()
    if not (yield from source.match(":")):
        return False
    yield from source.skip_space()
    emit(": ")
    return True


def _copy_scalar(source: TextSource, emit: Emit) -> Step[bool]:
    if (yield from source.peek()) in _PLAIN:
        return (yield from _copy_string(source, emit))
    source.begin()
    word = yield from source.take_while(_WORD, _MAX_WORD_CHARS)
    text = _CONSTANTS.get(word) or (word if len(word) <= _MAX_WORD_CHARS and _NUMBER.fullmatch(word) else None)
    if text is None:
        return False
    emit(text)
    source.forget()
    return True


def _copy_string(source: TextSource, emit: Emit) -> Step[bool]:
    quote = yield from source.peek()
    source.take_char()
    emit('"')
    while True:
        yield from source.copy_while(_PLAIN[quote], lambda text: emit(escape_string(text)))
        source.begin()
        sign = yield from source.peek()
        if not sign:
            return False
        source.take_char()
        if sign == quote:
            emit('"')
            source.forget()
            return True
        text = yield from _read_escape(source)
        if text is None:
            return False
        emit(text)
        source.forget()


def _read_escape(source: TextSource) -> Step[str | None]:
    """Reads what follows a backslash. Returns it as JSON; None if Python has no such escape."""
    sign = yield from source.peek()
    if not sign:
        return None
    source.take_char()
    num_digits = _HEX_DIGITS.get(sign)
    if num_digits is None:
        return escape_string(_ESCAPES.get(sign, "\\" + sign))
    digits = yield from source.take_while(_HEX, num_digits - 1)
    if len(digits) < num_digits:
        return None
    code = int(digits, 16)
    if code > 0x10FFFF:
        return None
    return f"\\u{code:04x}" if code <= 0xFFFF else escape_string(chr(code))
