"""DeepSeek V3, R1 and V3.1: calls between tags of their own, with the name outside of the JSON.

V3: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a line break, ```json, the arguments, ```, <｜tool▁call▁end｜>.
V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>. Both are read.
"""

from __future__ import annotations

from quire.frontend.openai.parsing.events import EventSink
from quire.frontend.openai.parsing.source import Markers, Step, TextSource
from quire.frontend.openai.tool_parsers.call_object import MAX_NAME_CHARS, NAME, is_name, read_bare_call

_CALLS = Markers("<｜tool▁calls▁begin｜>")
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_FENCE = "```"


def parse_deepseek(source: TextSource, sink: EventSink) -> Step[None]:
    """Blocks of calls anywhere in the text."""
    while (marker := (yield from source.copy_until(_CALLS, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        has_calls = False
        while (yield from source.match(_CALL)):
            if not (yield from _read_call(source, sink)):
                break
            has_calls = True
            source.forget()
            source.begin()
            yield from source.skip_space()
        else:
            if has_calls and (yield from source.match(_CALLS_END, or_end=True)):
                source.forget()
        sink.content(source.roll_back())


def _read_call(source: TextSource, sink: EventSink) -> Step[bool]:
    """One call, up to and with its end tag; what is recorded when it returns False is content."""
    name = yield from source.take_while(NAME, MAX_NAME_CHARS)
    if not (yield from source.match(_SEPARATOR)):
        return False
    is_fenced = (yield from source.peek()) != "{"
    if is_fenced:
        name = yield from source.take_while(NAME, MAX_NAME_CHARS)
        yield from source.skip_space()
        if not (yield from source.match(_FENCE + "json")):
            return False
        yield from source.skip_space()
    if not is_name(name) or not (yield from read_bare_call(source, sink, name)):
        return False
    yield from source.skip_space()
    if is_fenced:
        yield from source.match(_FENCE)
        yield from source.skip_space()
    return (yield from source.match(_CALL_END, or_end=True))
