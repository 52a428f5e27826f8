"""gpt-oss: the harmony format, in which every message has a channel, and a call is a message to a function.

<|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>ARGUMENTS<|call|>, or <|channel|>final<|message|>CONTENT<|return|>. The prompt has ended
with <|start|>assistant, so that an answer may begin with " to=functions.NAME" instead of a channel.
"""

from __future__ import annotations

import re
from functools import partial

from quire.frontend.openai.parsers.call_object import is_name
from quire.frontend.openai.parsers.events import EventSink
from quire.frontend.openai.parsers.source import Markers, Step, TextSource

MAX_HEADER_CHARS = 512
_START, _MESSAGE = "<|start|>", "<|message|>"
_HEADS = Markers(_START, "<|channel|>")
_BODY_ENDS = Markers(_START, "<|end|>", "<|call|>", "<|return|>")
_RECIPIENTS = (" to=functions.", "to=functions.")
_HEADER_TAGS = ("<|channel|>", "<|constrain|>")
_PLAIN = re.compile(r"[^<]*")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]*)")


def parse_harmony(source: TextSource, sink: EventSink, *, has_tools: bool = True) -> Step[None]:
    """Reads messages one after another. Text without a channel is content."""
    marker: str | None = None
    for recipient in _RECIPIENTS:
        if marker is None and (yield from source.match(recipient)):
            marker = recipient
    while True:
        if marker is None or marker not in (_START, *_RECIPIENTS):
            marker = yield from source.copy_until(_HEADS, sink.content)
        if marker is None:
            return
        header = yield from _read_header(source, marker)
        if header is None:
            sink.content(source.roll_back())
            marker = None
            continue
        source.forget()
        marker = yield from _read_body(source, sink, header, has_tools)


parse_harmony_text = partial(parse_harmony, has_tools=False)


def _read_header(source: TextSource, marker: str) -> Step[str | None]:
    """Reads a header with its <|message|>. Returns None if that is missing; the text is recorded then."""
    source.begin(marker)
    header = [marker]
    num_chars = 0
    while num_chars <= MAX_HEADER_CHARS:
        if (yield from source.match(_MESSAGE)):
            return "".join(header)
        part = yield from source.take_while(_PLAIN, MAX_HEADER_CHARS)
        for tag in _HEADER_TAGS:
            if not part and (yield from source.match(tag)):
                part = tag
        if not part:
            return None
        header.append(part)
        num_chars += len(part)
    return None


def _read_body(source: TextSource, sink: EventSink, header: str, has_tools: bool) -> Step[str | None]:
    """Reads the message. Returns the marker that ended it; None at the text's end."""
    function = _FUNCTION.search(header)
    channel = _CHANNEL.search(header)
    emit = sink.content
    if function is not None and has_tools and is_name(function[1]):
        sink.start(function[1])
        emit = sink.arguments
    elif channel is not None and channel[1] == "analysis":
        emit = sink.reasoning
    return (yield from source.copy_until(_BODY_ENDS, emit))


def is_harmony(template: str) -> bool:
    """Returns whether a chat template writes this format."""
    return all(sign in template for sign in (_START, "<|channel|>", _MESSAGE, "functions."))
