"""Gemma 4's calls: <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:[1,2],now:true}<tool_call|>.

Keys are bare, strings stand between two <|"|> without escapes, everything else is written as in JSON.
"""

from __future__ import annotations

import re

from quire.frontend.openai.parsers.call_object import MAX_KEY_CHARS, MAX_NAME_CHARS, NAME, is_name, read_end
from quire.frontend.openai.parsers.events import EventSink
from quire.frontend.openai.parsers.pythonic import Emit, copy_literal
from quire.frontend.openai.parsers.source import Markers, Step, TextSource, escape_string

_OPEN, _CLOSE = Markers("<|tool_call>"), "<tool_call|>"
_QUOTE = '<|"|>'
_QUOTES = Markers(_QUOTE)
_KEY = re.compile(r"[^\s:,{}\[\]<>\"]*")
_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_VALUE = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_MAX_WORD_CHARS = 512


def parse_gemma4(source: TextSource, sink: EventSink) -> Step[None]:
    """Reads calls anywhere in the text, each between its tags."""

    def write(text: str) -> None:
        source.forget()
        sink.arguments(text)

    while (marker := (yield from source.copy_until(_OPEN, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        if (yield from source.match("call:")):
            name = yield from source.take_while(NAME, MAX_NAME_CHARS)
            if is_name(name) and (yield from source.peek()) == "{":
                sink.start(name)
                source.forget()
                if (yield from copy_literal(source, write, _copy_key, _copy_value)):
                    yield from read_end(source, sink, _CLOSE)
        sink.content(source.roll_back())


def _copy_key(source: TextSource, emit: Emit) -> Step[bool]:
    source.begin()
    if (yield from source.match(_QUOTE)):  # keys of maps may be quoted
        parts: list[str] = []
        if (yield from source.copy_until(_QUOTES, parts.append)) is None:
            return False
        key = "".join(parts)
    else:
        key = yield from source.take_while(_KEY, MAX_KEY_CHARS)
        if not 0 < len(key) <= MAX_KEY_CHARS:
            return False
    yield from source.skip_space()
    if not (yield from source.match(":")):
        return False
    yield from source.skip_space()
    source.forget()
    emit(f'"{escape_string(key)}": ')
    return True


def _copy_value(source: TextSource, emit: Emit) -> Step[bool]:
    source.begin()
    if (yield from source.match(_QUOTE)):
        source.forget()
        emit('"')
        is_whole = (yield from source.copy_until(_QUOTES, lambda text: emit(escape_string(text)))) is not None
        emit('"' if is_whole else "")
        return is_whole
    word = yield from source.take_while(_WORD, _MAX_WORD_CHARS)
    if len(word) > _MAX_WORD_CHARS or not _VALUE.fullmatch(word):
        return False
    source.forget()
    emit(word)
    return True
