"""Hermes, Qwen 2.5 and 3, and Quire's demo model: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from __future__ import annotations

from quire.frontend.openai.parsing.events import EventSink
from quire.frontend.openai.parsing.source import Markers, Step, TextSource
from quire.frontend.openai.tool_parsers.call_object import Found, read_call, read_end

CLOSE = "</tool_call>"
_OPEN = Markers("<tool_call>")


def parse_hermes(source: TextSource, sink: EventSink) -> Step[None]:
    """Calls anywhere in the text, each between its tags. A tag around anything else is content."""
    while (marker := (yield from source.copy_until(_OPEN, sink.content))) is not None:
        source.begin(marker)
        yield from source.skip_space()
        if (yield from read_call(source, sink)) is Found.CALL:
            yield from read_end(source, sink, CLOSE)


def is_hermes(template: str) -> bool:
    """Whether a chat template asks for this format: the tag, and JSON within it."""
    others = ("<function=", "<arg_key>", "<parameter=", "<｜tool")
    return "<tool_call>" in template and "arguments" in template and not any(sign in template for sign in others)
