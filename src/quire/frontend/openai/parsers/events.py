"""Events of a parser: the content, reasoning and tool calls of a model's text, in order; and one run of a parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from quire.frontend.openai.parsers.source import Step, TextSource


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Reasoning, which the user need not see."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. The `Arguments` up to the next `CallStart` belong to it."""

    name: str
    call_id: str | None = None
    """Id that the model wrote, if the format has one."""


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments: JSON text."""

    text: str


Event = Content | Reasoning | CallStart | Arguments


class EventSink:
    """Collects the events of a parser. `take` returns the new ones, with pieces of one kind joined.

    With `trims`, white space that only separates calls belongs to the format: at the start and after a call it is held
    until something follows, and dropped if that is a call. At the end it is dropped after a call only.
    """

    def __init__(self, *, trims: bool = False) -> None:
        self._trims = trims
        self._held: list[str] | None = [] if trims else None
        """White space that may be dropped; None while content is passed on at once."""
        self._has_calls = False
        self._events: list[Event] = []
        self._kind: type[Content | Reasoning | Arguments] | None = None
        self._parts: list[str] = []

    def content(self, text: str) -> None:
        """Adds text for the user."""
        if self._held is None:
            self._add(Content, text)
        elif text.isspace():
            self._held.append(text)
        elif text:
            self._add(Content, "".join([*self._held, text]))
            self._held = None

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        self._add(Reasoning, text)

    def start(self, name: str, call_id: str | None = None) -> None:
        """Begins a call."""
        self._join()
        self._events.append(CallStart(name, call_id))
        self._has_calls = True
        if self._trims:
            self._held = []

    def arguments(self, text: str) -> None:
        """Adds to the latest call's arguments."""
        self._add(Arguments, text)

    def close(self) -> None:
        """Ends the text."""
        if self._held and not self._has_calls:
            self._add(Content, "".join(self._held))
        self._held = None

    def take(self) -> list[Event]:
        """Returns the new events."""
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
"""Reads a source and writes to a sink. Text that it leaves unread is content."""


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
        """Returns the events of new text."""
        if not text:
            return []
        self.source.append(text)
        next(self._run)
        return self._sink.take()

    def finish(self) -> list[Event]:
        """Returns the events of text that was held back, at the end of the text."""
        self.source.close()
        for _ in self._run:
            raise AssertionError("a parser waits for text that cannot come")
        self._sink.close()
        return self._sink.take()
