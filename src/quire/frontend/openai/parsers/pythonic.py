"""Calls as literals: [get_weather(city='Oslo', days=2), now()] of Llama 3.2 and 4, LFM2 and OLMo 3; Gemma 4's calls.

Llama: the list is the whole answer, Llama 4's sometimes between <|python_start|> and <|python_end|>. LFM2: a list
between <|tool_call_start|> and <|tool_call_end|>, anywhere. OLMo 3: calls without a list, one a line, between
<function_calls> and </function_calls>. Nothing is evaluated: names, strings, numbers, True, False, None, lists and
dicts are rewritten as JSON while they come. Gemma 4, with bare keys and strings without escapes:
<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:[1,2],now:true}<tool_call|>.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.frontend.openai.parsers.call_object import MAX_KEY_CHARS, MAX_NAME_CHARS, NAME, is_name, read_end
from quire.frontend.openai.parsers.events import EventSink
from quire.frontend.openai.parsers.source import Markers, Step, TextSource, escape_string

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


_LFM2_OPEN, _LFM2_CLOSE = Markers("<|tool_call_start|>"), "<|tool_call_end|>"
_OLMO3_OPEN, _OLMO3_CLOSE = Markers("<function_calls>"), "</function_calls>"


def parse_pythonic(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads one list of calls at the start of the text. Anything else is content."""
    source.begin()
    yield from source.skip_space()
    yield from _read_list(source, sink)


def parse_llama4_pythonic(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads one list of calls at the start of the text, between its tags or without them."""
    source.begin()
    yield from source.skip_space()
    is_tagged = yield from source.match("<|python_start|>")
    yield from source.skip_space()
    if (yield from _read_list(source, sink)) and is_tagged:
        yield from read_end(source, sink, "<|python_end|>")


def parse_lfm2(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads lists of calls anywhere in the text, each between its tags."""
    while (marker := (yield from source.copy_until(_LFM2_OPEN, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        if (yield from _read_list(source, sink)):
            yield from read_end(source, sink, _LFM2_CLOSE)
        sink.content(source.roll_back())


def parse_olmo3(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads blocks of calls anywhere in the text."""
    while (marker := (yield from source.copy_until(_OLMO3_OPEN, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        while (yield from _Call(source, sink).read_through()):
            source.forget()
            source.begin()
            yield from source.skip_space()
            if (yield from source.match(_OLMO3_CLOSE, or_end=True)):
                source.forget()
                break
        sink.content(source.roll_back())


def _read_list(source: TextSource, sink: EventSink) -> Step[bool]:
    """Reads a list of calls; the caller has begun to record. Returns whether it has an end. If not, the text since the
    last call is recorded."""
    if not (yield from source.match("[")):
        return False
    while True:
        yield from source.skip_space()
        if not (yield from _Call(source, sink).read_through()):
            return False
        source.forget()
        source.begin()
        yield from source.skip_space()
        if (yield from source.match("]", or_end=True)):
            source.forget()
            return True
        if not (yield from source.match(",")):
            return False


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
            if not (yield from copy_literal(source, self._write, _copy_key, _copy_scalar)):
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


Copy = Callable[[TextSource, Emit], Step[bool]]
"""Hands a part of a literal to `emit`. Returns False at anything else; the recorded text was not handed on."""


def copy_literal(source: TextSource, emit: Emit, copy_key: Copy, copy_scalar: Copy) -> Step[bool]:
    """Hands a literal to `emit` as JSON: lists and dicts of what `copy_scalar` reads, under keys that `copy_key` reads
    with their colons. Returns False at anything else; the recorded text was not handed on."""
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
            if closes and closes[-1] == "}" and not (yield from copy_key(source, emit)):
                return False
            sign = yield from source.peek()
            is_first = sign in _CLOSES
            if is_first:
                source.take_char()
                closes.append(_CLOSES[sign])
                emit(sign)
                continue
            if not (yield from copy_scalar(source, emit)):
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


_GEMMA_OPEN, _GEMMA_CLOSE = Markers("<|tool_call>"), "<tool_call|>"
_QUOTE = '<|"|>'
_QUOTES = Markers(_QUOTE)
_GEMMA_KEY = re.compile(r"[^\s:,{}\[\]<>\"]*")


def parse_gemma4(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads calls anywhere in the text, each between its tags."""

    def write(text: str) -> None:
        source.forget()
        sink.arguments(text)

    while (marker := (yield from source.copy_until(_GEMMA_OPEN, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        if (yield from source.match("call:")):
            name = yield from source.take_while(NAME, MAX_NAME_CHARS)
            if is_name(name) and (yield from source.peek()) == "{":
                sink.start(name)
                source.forget()
                if (yield from copy_literal(source, write, _copy_gemma_key, _copy_gemma_value)):
                    yield from read_end(source, sink, _GEMMA_CLOSE)
        sink.content(source.roll_back())


def _copy_gemma_key(source: TextSource, emit: Emit) -> Step[bool]:
    source.begin()
    if (yield from source.match(_QUOTE)):  # keys of maps may be quoted
        parts: list[str] = []
        if (yield from source.copy_until(_QUOTES, parts.append)) is None:
            return False
        key = "".join(parts)
    else:
        key = yield from source.take_while(_GEMMA_KEY, MAX_KEY_CHARS)
        if not 0 < len(key) <= MAX_KEY_CHARS:
            return False
    yield from source.skip_space()
    if not (yield from source.match(":")):
        return False
    yield from source.skip_space()
    source.forget()
    emit(f'"{escape_string(key)}": ')
    return True


def _copy_gemma_value(source: TextSource, emit: Emit) -> Step[bool]:
    source.begin()
    if (yield from source.match(_QUOTE)):
        source.forget()
        emit('"')
        is_whole = (yield from source.copy_until(_QUOTES, lambda text: emit(escape_string(text)))) is not None
        emit('"' if is_whole else "")
        return is_whole
    word = yield from source.take_while(_WORD, _MAX_WORD_CHARS)
    if word not in ("true", "false", "null") and (len(word) > _MAX_WORD_CHARS or not _NUMBER.fullmatch(word)):
        return False
    source.forget()
    emit(word)
    return True
