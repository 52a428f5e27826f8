"""Llama 3.1 and later: {"name": "f", "parameters": {...}}, alone or after <|python_tag|>, several with ; between."""

from __future__ import annotations

import re

from quire.frontend.openai.parsing.events import EventSink
from quire.frontend.openai.parsing.source import Markers, Step, TextSource
from quire.frontend.openai.tool_parsers.call_object import read_calls

_SEPARATORS = re.compile(r"[ \t\r\n;,]*")
_TAG = Markers("<|python_tag|>")


def parse_llama(source: TextSource, sink: EventSink) -> Step[None]:
    """Calls at the very start, or after the tag. JSON anywhere else is content: nothing marks it as a call."""
    marker: str | None = ""
    while marker is not None:
        source.begin(marker)
        yield from source.skip_space()
        if (yield from source.peek()) == "{":
            yield from read_calls(source, sink, _SEPARATORS)
        else:
            sink.content(source.roll_back())
        marker = yield from source.copy_until(_TAG, sink.content)
