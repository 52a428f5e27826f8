"""The table of reasoning parsers. A new family is a row, and a file if its reasoning is not between two tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from quire.errors import ConfigError
from quire.frontend.openai.parsers.events import EventSink, Program
from quire.frontend.openai.parsers.harmony import is_harmony, parse_harmony_text
from quire.frontend.openai.parsers.source import Markers, Step, TextSource
from quire.structured_outputs import ReasoningTokens


def parse_tags(tags: ReasoningTags, is_inside: bool, source: TextSource, sink: EventSink) -> Step[None]:
    """Reads reasoning up to the closing tag, and content after it.

    The reasoning begins with the opening tag, or at once if `is_inside`. Tags are of neither kind. A text that begins
    otherwise is content, and so are tags further on in it. Without a closing tag all of the text is reasoning, up to
    the tag of a call (`ReasoningTags.call`): from there on it is content.
    """
    source.begin()
    yield from source.skip_space()
    if (yield from source.match(tags.open)):
        source.forget()
    elif is_inside:
        sink.reasoning(source.roll_back())
    else:
        return
    ends = Markers(tags.close, *filter(None, [tags.call]))
    marker = yield from source.copy_until(ends, sink.reasoning)
    if marker is not None and marker == tags.call:
        held = [marker]
        is_closed = (yield from source.copy_until(Markers(tags.close), held.append)) is not None
        (sink.reasoning if is_closed else sink.content)("".join(held))


@dataclass(frozen=True)
class ReasoningTags:
    """Tags around reasoning. With `begins_inside` an answer begins with reasoning even without the opening tag."""

    open: str
    close: str
    begins_inside: bool = False
    call: str = ""
    """Opening tag of a tool call that ends reasoning without a closing tag, which the model may forget; "": none."""

    def is_inside(self, prompt: str) -> bool:
        """Returns whether an answer to `prompt` begins with reasoning that need not be opened."""
        end = self._end_of(prompt)
        return end.endswith(self.open) or (self.begins_inside and not end.endswith(self.close))

    def is_over(self, prompt: str) -> bool:
        """Returns whether the prompt has closed the reasoning, so that an answer has none."""
        return self._end_of(prompt).endswith(self.close)

    def make_program(self, prompt: str) -> Program:
        """Returns the program for an answer to `prompt`, which may have opened or closed the reasoning."""
        return partial(parse_tags, self, self.is_inside(prompt))

    def find_tokens(self, prompt: str, find_id: Callable[[str], int | None]) -> ReasoningTokens | None:
        """Returns the tokens around reasoning in an answer to `prompt`; None unless each tag is a single token."""
        close_id, open_id = find_id(self.close), find_id(self.open)
        is_inside = self.is_inside(prompt)
        if close_id is None or (open_id is None and not is_inside):
            return None
        return ReasoningTokens(close_id, None if is_inside else open_id)

    def _end_of(self, prompt: str) -> str:
        return prompt[-(len(self.open) + len(self.close) + 16) :].rstrip()


@dataclass(frozen=True)
class ReasoningParserSpec:
    """Format in which a family of models writes its reasoning."""

    make_program: Callable[[str], Program]
    """Makes the program for an answer to a prompt from the prompt's text ("" where there is none)."""
    keeps_special_tokens: bool = False
    """True: markers may be special tokens, so special tokens must stay in the text."""
    recognizes: Callable[[str], bool] = lambda template: False
    """Returns whether answers to a chat template are unreadable without this parser; then no flag is needed."""
    tags: ReasoningTags | None = None
    """Tags around the reasoning; None for a format without tags."""


def _tags(
    open_tag: str, close_tag: str, *, begins_inside: bool = False, special: bool = False, call: str = ""
) -> ReasoningParserSpec:
    tags = ReasoningTags(open_tag, close_tag, begins_inside, call)
    return ReasoningParserSpec(tags.make_program, special, tags=tags)


_THINK = _tags("<think>", "</think>")
_THINK_AT_ONCE = _tags("<think>", "</think>", begins_inside=True)

REASONING_PARSERS: Mapping[str, ReasoningParserSpec] = MappingProxyType(
    {
        "deepseek_r1": _THINK_AT_ONCE,
        "deepseek_v3": _THINK,
        "glm45": _THINK,
        "minimax_m2": _THINK_AT_ONCE,
        "mistral": _tags("[THINK]", "[/THINK]", special=True),
        "olmo3": _THINK_AT_ONCE,
        "qwen3": _tags("<think>", "</think>", call="<tool_call>"),
        "seed_oss": _tags("<seed:think>", "</seed:think>"),
        "step3": _THINK_AT_ONCE,
        "openai_gptoss": ReasoningParserSpec(
            lambda prompt: parse_harmony_text, keeps_special_tokens=True, recognizes=is_harmony
        ),
    }
)
"""Rows by the names of vLLM's --reasoning-parser."""


def reasoning_parser(name: str) -> ReasoningParserSpec:
    """Returns the row called `name`. Raises ConfigError."""
    spec = REASONING_PARSERS.get(name)
    if spec is None:
        raise ConfigError(f"--reasoning-parser {name!r} is not one of {', '.join(REASONING_PARSERS)}")
    return spec


def recognize(template: str | None) -> str | None:
    """Returns the name of the family that a chat template belongs to; None if no row recognizes it."""
    if template is None:
        return None
    return next((name for name, spec in REASONING_PARSERS.items() if spec.recognizes(template)), None)
