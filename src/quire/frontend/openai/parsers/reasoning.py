"""The table of reasoning parsers. A new family is a row, and a file if its reasoning is not between two tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
        yield from _read_answer(tags, source, sink)
        return
    yield from source.match(tags.label)
    ends = Markers(tags.close, *filter(None, [tags.call]))
    marker = yield from source.copy_until(ends, sink.reasoning)
    if marker is not None and marker == tags.call:
        held = [marker]
        is_closed = (yield from source.copy_until(Markers(tags.close), held.append)) is not None
        (sink.reasoning if is_closed else sink.content)("".join(held))
    yield from _read_answer(tags, source, sink)


def _read_answer(tags: ReasoningTags, source: TextSource, sink: EventSink) -> Step[None]:
    """Reads the answer. White space and tags around it, with their line breaks, are dropped if the format has tags."""
    if not tags.answer:
        return
    source.begin()
    yield from source.skip_space()
    if not (yield from source.match(tags.answer)):
        return
    source.forget()
    yield from source.match("\n")
    held = ""

    def emit(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        sink.content(text.removesuffix(held))

    if (yield from source.copy_until(Markers(tags.answer_end), emit)) is None:
        sink.content(held)
    source.begin()
    yield from source.skip_space()
    if not (yield from source.peek()):
        source.forget()


@dataclass(frozen=True)
class ReasoningTags:
    """Tags around reasoning. With `begins_inside` an answer begins with reasoning even without the opening tag."""

    open: str
    close: str
    begins_inside: bool = False
    label: str = ""
    """Text after the opening tag that is no reasoning."""
    answer: str = ""
    """Opening tag of the answer behind the reasoning, which may be missing; "": the format has none."""
    answer_end: str = ""
    call: str = ""
    """Opening tag of a tool call that ends reasoning without a closing tag, which the model may forget; "": none."""

    def is_inside(self, prompt: str) -> bool:
        """Returns whether an answer to `prompt` begins with reasoning that need not be opened."""
        end = self._end_of(prompt)
        return end.endswith((self.open, (self.open + self.label).rstrip())) or (
            self.begins_inside and not end.endswith(self.close)
        )

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
        return prompt[-(len(self.open) + len(self.label) + len(self.close) + 16) :].rstrip()


@dataclass(frozen=True)
class ReasoningParserSpec:
    """Format in which a family of models writes its reasoning."""

    make_program: Callable[[str], Program]
    """Makes the program for an answer to a prompt from the prompt's text ("" where there is none)."""
    keeps_special_tokens: bool = False
    """True: markers may be special tokens, so special tokens must stay in the text."""
    recognizes: Callable[[str], bool] = lambda template: False
    """Returns whether a chat template is of this family without doubt; then no flag is needed. <think> alone is the
    sign of many."""
    tags: ReasoningTags | None = None
    """Tags around the reasoning; None for a format without tags."""


def _row(tags: ReasoningTags, *signs: str, special: bool = False) -> ReasoningParserSpec:
    """Returns a row. `signs` in a template identify it."""
    return ReasoningParserSpec(
        tags.make_program,
        special,
        recognizes=lambda template: bool(signs) and all(sign in template for sign in signs),
        tags=tags,
    )


_THINK = ReasoningTags("<think>", "</think>")
_AT_ONCE = replace(_THINK, begins_inside=True)

REASONING_PARSERS: Mapping[str, ReasoningParserSpec] = MappingProxyType(
    {
        "apertus": _row(
            ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>", call="<|tools_prefix|>"),
            "<|inner_prefix|>",
            special=True,
        ),
        "cohere_command": _row(
            ReasoningTags(
                "<|START_THINKING|>",
                "<|END_THINKING|>",
                answer="<|START_RESPONSE|>",
                answer_end="<|END_RESPONSE|>",
                call="<|START_ACTION|>",
            ),
            "<|START_RESPONSE|>",
            special=True,
        ),
        "deepseek_r1": _row(_AT_ONCE),
        "deepseek_v3": _row(_THINK),
        "ernie45": _row(
            replace(_THINK, answer="<response>", answer_end="</response>", call="<tool_call>"), "<response>", "</think>"
        ),
        "gemma4": _row(
            ReasoningTags("<|channel>", "<channel|>", label="thought\n", call="<|tool_call>"),
            "<|channel>",
            "<channel|>",
            special=True,
        ),
        "glm45": _row(_THINK),
        "granite": _row(ReasoningTags("Here is my thought process:", "Here is my response:")),
        "hunyuan_a13b": _row(
            replace(_THINK, answer="<answer>", answer_end="</answer>", call="<tool_calls>"), "<answer>", "</think>"
        ),
        "kimi_k2": _row(replace(_THINK, call="<|tool_calls_section_begin|>")),
        "minimax_m2": _row(_AT_ONCE, "<minimax:tool_call>", "<think>"),
        "mistral": _row(ReasoningTags("[THINK]", "[/THINK]"), "[THINK]", "[/THINK]", special=True),
        "olmo3": _row(_AT_ONCE),
        "qwen3": _row(replace(_THINK, call="<tool_call>")),
        "seed_oss": _row(ReasoningTags("<seed:think>", "</seed:think>"), "<seed:think>"),
        "step3": _row(_AT_ONCE),
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
    """Returns the name of the family that a chat template belongs to; None unless exactly one row recognizes it."""
    found = [name for name, spec in REASONING_PARSERS.items() if template is not None and spec.recognizes(template)]
    return found[0] if len(found) == 1 else None
