"""Runs a parser's program over text as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from quire.frontend.openai.parsing.events import Event, EventSink
from quire.frontend.openai.parsing.source import Step, TextSource

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
