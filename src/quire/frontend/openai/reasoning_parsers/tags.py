"""Reasoning between two tags at the start of the text: <think>...</think> and its kin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quire.frontend.openai.parsing.events import EventSink
from quire.frontend.openai.parsing.source import Markers, Step, TextSource
from quire.frontend.openai.parsing.stream_parser import Program
from quire.structured_outputs import ReasoningTokens


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


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around reasoning. With `begins_inside` a prompt need not end with the opening tag to be in it."""

    open: str
    close: str
    begins_inside: bool = False

    def is_inside(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins with reasoning that need not be opened."""
        end = self._end_of(prompt)
        return end.endswith(self.open) or (self.begins_inside and not end.endswith(self.close))

    def is_over(self, prompt: str) -> bool:
        """Whether the prompt has closed it: an answer has none."""
        return self._end_of(prompt).endswith(self.close)

    def make_program(self, prompt: str) -> Program:
        """The program for an answer to `prompt`, which may have opened the reasoning, or closed it, already."""
        return partial(parse_tags, self.open, self.close, self.is_inside(prompt))

    def find_tokens(self, prompt: str, find_id: Callable[[str], int | None]) -> ReasoningTokens | None:
        """The tokens around reasoning in an answer to `prompt`; None unless each tag that comes is a token."""
        close_id, open_id = find_id(self.close), find_id(self.open)
        is_inside = self.is_inside(prompt)
        if close_id is None or (open_id is None and not is_inside):
            return None
        return ReasoningTokens(close_id, None if is_inside else open_id)

    def _end_of(self, prompt: str) -> str:
        return prompt[-(len(self.open) + len(self.close) + 16) :].rstrip()
