"""Runs of parsers in tests: the text in pieces, what came of it joined."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from quire.frontend.openai.parsers.events import Arguments, CallStart, Content, Event, Program, Reasoning, StreamParser

Summary = list[tuple[str, str]]
"""(kind, text), with neighbours of one kind joined."""

_KINDS = {Content: "content", Reasoning: "reasoning", CallStart: "call", Arguments: "arguments"}


def read(program: Program, pieces: Iterable[str], *, trims: bool = True) -> Summary:
    """Returns the events of `program` for a text that comes in `pieces`."""
    parser = StreamParser(program, trims=trims)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def joined(events: Sequence[Event]) -> Summary:
    found: Summary = []
    for event in events:
        kind, text = _KINDS[type(event)], event.name if isinstance(event, CallStart) else event.text
        if found and found[-1][0] == kind != "call":
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


def all_text(summary: Summary) -> str:
    return "".join(text for _, text in summary)


def split(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def count_work(program: Program, pieces: Sequence[str]) -> int:
    """Lines of Python that ran, and characters that were searched or copied, while `pieces` were read."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        nonlocal lines
        if "/quire/frontend/openai/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    parser = StreamParser(program, trims=True)
    sys.settrace(trace)
    try:
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
    finally:
        sys.settrace(before)
    return lines + parser.source.num_examined
