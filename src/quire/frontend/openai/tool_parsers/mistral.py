"""Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {...}}]; later [TOOL_CALLS]f{...} or [TOOL_CALLS]f[ARGS]{...}."""

from __future__ import annotations

import secrets
import string

from quire.frontend.openai.parsing.events import EventSink
from quire.frontend.openai.parsing.source import Markers, Step, TextSource
from quire.frontend.openai.tool_parsers.call_object import (
    MAX_NAME_CHARS,
    NAME,
    Found,
    read_bare_call,
    read_call,
    read_call_array,
)

_OPEN = Markers("[TOOL_CALLS]")
_ID_CHARS = string.ascii_letters + string.digits


def make_mistral_id() -> str:
    """Nine letters and digits: Mistral's templates take no other id back."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


def parse_mistral(source: TextSource, sink: EventSink) -> Step[None]:
    """Calls after each marker, in any of the three ways to write them."""
    while (marker := (yield from source.copy_until(_OPEN, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        sign = yield from source.peek()
        if sign == "[":
            yield from read_call_array(source, sink)
        elif sign == "{":
            if (yield from read_call(source, sink)) is Found.CALL:
                source.forget()
        else:
            yield from _read_named(source, sink)
            sink.content(source.roll_back())


def _read_named(source: TextSource, sink: EventSink) -> Step[None]:
    name = yield from source.take_while(NAME, MAX_NAME_CHARS)
    if not 0 < len(name) <= MAX_NAME_CHARS:
        return
    call_id = None
    if (yield from source.match("[CALL_ID]")):
        call_id = (yield from source.take_while(NAME, MAX_NAME_CHARS))[:MAX_NAME_CHARS]
    yield from source.match("[ARGS]")
    yield from source.skip_space()
    yield from read_bare_call(source, sink, name, call_id or None)
