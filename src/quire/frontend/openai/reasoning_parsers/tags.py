"""Reasoning between two tags at the start of the text: <think>...</think> and its kin."""

from __future__ import annotations

from functools import partial

from quire.frontend.openai.parsing.events import EventSink
from quire.frontend.openai.parsing.source import Markers, Step, TextSource
from quire.frontend.openai.parsing.stream_parser import Program


def parse_tags(open_tag: str, close_tag: str, is_inside: bool, source: TextSource, sink: EventSink) -> Step[None]:
    """Reasoning up to the closing tag, content behind it.

    The reasoning begins with the opening tag, or at once if `is_inside`. Tags are of neither kind. A text that begins
    otherwise is content, and tags further on in it are, too; one without a closing tag is reasoning to its end.
    """
    source.begin()
    yield from source.skip_space()
    if (yield from source.match(open_tag)):
        source.forget()
    elif is_inside:
        sink.reasoning(source.roll_back())
    else:
        return
    yield from source.copy_until(Markers(close_tag), sink.reasoning)


def tag_program(open_tag: str, close_tag: str, begins_inside: bool, prompt: str) -> Program:
    """The program for an answer to `prompt`, which may have opened the reasoning, or closed it, already."""
    end = prompt[-(len(open_tag) + len(close_tag) + 16) :].rstrip()
    is_inside = end.endswith(open_tag) or (begins_inside and not end.endswith(close_tag))
    return partial(parse_tags, open_tag, close_tag, is_inside)
