"""A call written as a JSON object: {"name": "f", "arguments": {...}}, the heart of most formats."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from quire.frontend.openai.parsers.events import EventSink
from quire.frontend.openai.parsers.source import SPACE, Step, TextSource, decode_string

NAME = re.compile(r"[\w.:/-]*", re.ASCII)
"""Characters of the name of a tool."""
MAX_NAME_CHARS = 128
MAX_KEY_CHARS = 64
ARGUMENT_KEYS = ("arguments", "parameters")
_CLOSING = re.compile(r"[ \t\r\n,}\]]*")


class Found(Enum):
    """Result of reading an object."""

    NO_CALL = auto()
    """No call. All that was read of it has become content."""
    CALL = auto()
    BROKEN_CALL = auto()
    """A call without a proper end. The text after its arguments has become content."""


def read_call(
    source: TextSource, sink: EventSink, *, is_marked: bool = True, is_open: bool = False, name_key: str = "name"
) -> Step[Found]:
    """Reads one object; the caller has begun to record, and with `is_open` has read its "{". After a CALL its end is
    recorded, too.

    The call starts as soon as its name and the beginning of its arguments are known; from then on arguments are passed
    on as they come. Keys may be in any order, and other keys are skipped. Arguments are an object, or text that holds
    one, which is unpacked; null is {}. Where the format marks its calls (`is_marked`) they may be missing.
    """
    reader = _CallReader(source, sink, is_marked, name_key)
    is_whole = yield from reader.read_object(is_open)
    if is_whole and reader.has_started:
        return Found.CALL
    rest = source.roll_back()
    if reader.has_started and source.is_closed and _CLOSING.fullmatch(rest):
        rest = ""  # the end of the text has cut off only closing brackets of the call
    sink.content(rest)
    return Found.BROKEN_CALL if reader.has_started else Found.NO_CALL


class _CallReader:
    def __init__(self, source: TextSource, sink: EventSink, is_marked: bool, name_key: str) -> None:
        self.has_started = False
        self._source = source
        self._sink = sink
        self._is_marked = is_marked
        self._name_key = name_key
        self._name: str | None = None
        self._has_arguments = False
        self._early: list[str] | None = None
        """Arguments that come before the name."""

    def read_object(self, is_open: bool) -> Step[bool]:
        """Reads the object. Returns False where it breaks off or is no call."""
        source = self._source
        if not is_open and not (yield from source.match("{")):
            return False
        while True:
            yield from source.skip_space()
            if (yield from source.match("}")):
                break
            key = yield from read_string(source, MAX_KEY_CHARS)
            yield from source.skip_space()
            if key is None or not (yield from source.match(":")):
                return False
            yield from source.skip_space()
            if not (yield from self._read_value(key)):
                return False
            yield from source.skip_space()
            if (yield from source.match(",")):
                continue
            if not (yield from source.match("}")):
                return False
            break
        if not self._has_arguments and self._name is not None and self._is_marked:
            self._start(self._name, "{}")
        return True

    def _read_value(self, key: str) -> Step[bool]:
        if key == self._name_key and self._name is None:
            self._name = yield from read_string(self._source, MAX_NAME_CHARS)
            if self._name is None or not is_name(self._name):
                return False
            if self._early is not None:
                self._start(self._name, "".join(self._early))
            return True
        if key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._read_arguments())
        return (yield from self._source.copy_json(lambda text: None))

    def _read_arguments(self) -> Step[bool]:
        source, sign = self._source, (yield from self._source.peek())
        if self._name is None:
            self._early = []
        if sign == "{":
            if self._name is None:
                return (yield from source.copy_json(self._write))
            self._start(self._name)
            is_whole = yield from source.copy_json(self._sink.arguments)
            source.begin()
            return is_whole
        parts: list[str] = []
        if not self._is_marked or not (yield from source.copy_json(parts.append)):
            return False
        raw = "".join(parts)
        text = "{}" if raw == "null" else decode_string(raw)
        if text is None:
            return False
        self._write(text)
        return True

    def _write(self, text: str) -> None:
        """Passes arguments on, or holds them back until the name is known."""
        if self._early is not None:
            self._early.append(text)
        elif self._name is not None:
            self._start(self._name, text)

    def _start(self, name: str, arguments: str = "") -> None:
        self.has_started = True
        self._sink.start(name)
        self._sink.arguments(arguments)
        self._source.forget()
        if arguments:
            self._source.begin()


def is_name(text: str) -> bool:
    """Returns whether `text` may be the name of a tool."""
    return 0 < len(text) <= MAX_NAME_CHARS and NAME.fullmatch(text) is not None


def read_string(source: TextSource, limit: int) -> Step[str | None]:
    """Reads a JSON string. Returns None for anything else, and for more than `limit` characters."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from source.copy_json(parts.append)):
        return None
    raw = "".join(parts)
    return decode_string(raw) if len(raw) <= 6 * limit + 2 else None


def read_calls(
    source: TextSource, sink: EventSink, separators: re.Pattern[str] = SPACE, *, is_open: bool = False
) -> Step[None]:
    """Reads unmarked calls with `separators` between them, up to what is no call. With `is_open` the "{" of the first
    has been read."""
    while (yield from read_call(source, sink, is_marked=False, is_open=is_open)) is Found.CALL:
        is_open = False
        source.forget()
        source.begin()
        yield from source.take_while(separators)
        if (yield from source.peek()) != "{":
            sink.content(source.roll_back())
            return


ReadOne = Callable[[TextSource, EventSink], Step[Found]]
"""Reads one element of an array, as `read_call` does."""


def read_call_array(source: TextSource, sink: EventSink, read_one: ReadOne = read_call) -> Step[bool]:
    """Reads [call, call, ...] with its end; the caller has begun to record. Returns whether it has an end."""
    if not (yield from source.match("[")):
        sink.content(source.roll_back())
        return False
    while True:
        yield from source.skip_space()
        if (yield from read_one(source, sink)) is not Found.CALL:
            return False
        source.forget()
        source.begin()
        yield from source.skip_space()
        if (yield from source.match(",")):
            continue
        is_whole = yield from source.match("]", or_end=True)
        if is_whole:
            source.forget()
        sink.content(source.roll_back())
        return is_whole


def read_bare_call(source: TextSource, sink: EventSink, name: str, call_id: str | None = None) -> Step[bool]:
    """Reads the arguments of a call whose name is not part of the object; the caller has begun to record.

    Returns True if they are complete: records from their end on, for `read_end`. Returns False if they are missing or
    break off; nothing is recorded then.
    """
    if (yield from source.peek()) != "{":
        sink.content(source.roll_back())
        return False
    sink.start(name, call_id)
    source.forget()
    is_whole = yield from source.copy_json(sink.arguments)
    if is_whole:
        source.begin()
    return is_whole


def read_end(source: TextSource, sink: EventSink, literal: str) -> Step[None]:
    """Reads the end of a CALL, after white space. If it is missing, the text that was read is content."""
    source.forget()
    source.begin()
    yield from source.skip_space()
    if (yield from source.match(literal, or_end=True)):
        source.forget()
    sink.content(source.roll_back())
