"""What a model's text is made of, as parsers tell it: content, reasoning and tool calls, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from quire.frontend.openai.parsers.source import Step, TextSource


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text the model wrote for itself."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. All `Arguments` up to the next `CallStart` are its own."""

    name: str
    call_id: str | None = None
    """The id the model gave it, if the format has one."""


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments: JSON text."""

    text: str


Event = Content | Reasoning | CallStart | Arguments


class EventSink:
    """Where a parser writes. `take` gives what came since the last time, pieces of one kind joined.

    With `trims`, white space that only sets calls apart belongs to the format: at the start and after a call it is
    held until something follows, and dropped if that is a call. At the end it is dropped after a call only.
    """

    def __init__(self, *, trims: bool = False) -> None:
        self._trims = trims
        self._held: list[str] | None = [] if trims else None
        """White space whose fate is open; None while content is passed on at once."""
        self._has_calls = False
        self._events: list[Event] = []
        self._kind: type[Content | Reasoning | Arguments] | None = None
        self._parts: list[str] = []

    def content(self, text: str) -> None:
        """Text for the user."""
        if self._held is None:
            self._add(Content, text)
        elif text.isspace():
            self._held.append(text)
        elif text:
            self._add(Content, "".join([*self._held, text]))
            self._held = None

    def reasoning(self, text: str) -> None:
        """Text the model wrote for itself."""
        self._add(Reasoning, text)

    def start(self, name: str, call_id: str | None = None) -> None:
        """A call begins."""
        self._join()
        self._events.append(CallStart(name, call_id))
        self._has_calls = True
        if self._trims:
            self._held = []

    def arguments(self, text: str) -> None:
        """More of the latest call's arguments."""
        self._add(Arguments, text)

    def close(self) -> None:
        """Nothing follows."""
        if self._held and not self._has_calls:
            self._add(Content, "".join(self._held))
        self._held = None

    def take(self) -> list[Event]:
        """What is new."""
        self._join()
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[Content | Reasoning | Arguments], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._join()
            self._kind = kind
        self._parts.append(text)

    def _join(self) -> None:
        if self._kind is not None:
            self._events.append(self._kind("".join(self._parts)))
        self._kind, self._parts = None, []


Program: TypeAlias = Callable[[TextSource, EventSink], Step[None]]
"""Reads a source and writes to a sink. What it leaves unread when it ends is content."""


class StreamParser:
    """One run of a program, over the text of one choice."""

    def __init__(self, program: Program, *, trims: bool = False) -> None:
        self.source = TextSource()
        self._sink = EventSink(trims=trims)
        self._run = self._steps(program)

    def _steps(self, program: Program) -> Step[None]:
        yield from program(self.source, self._sink)
        self._sink.content(self.source.roll_back())
        yield from self.source.copy_rest(self._sink.content)

    def feed(self, text: str) -> list[Event]:
        """What the new text adds."""
        if not text:
            return []
        self.source.append(text)
        next(self._run)
        return self._sink.take()

    def finish(self) -> list[Event]:
        """What was held back, now that the text is at its end."""
        self.source.close()
        for _ in self._run:
            raise AssertionError("a parser waits for text that cannot come")
        self._sink.close()
        return self._sink.take()
