"""The table of reasoning parsers: a new family is a row here, and a file if it is not written between two tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.errors import ConfigError
from quire.frontend.openai.parsing.stream_parser import Program
from quire.frontend.openai.reasoning_parsers.tags import ReasoningTags
from quire.frontend.openai.tool_parsers.harmony import is_harmony, parse_harmony_text


@dataclass(frozen=True)
class ReasoningParserSpec:
    """How a family of models writes its reasoning."""

    make_program: Callable[[str], Program]
    """The program for an answer to a prompt, of which it sees the text ("" where there is none)."""
    keeps_special_tokens: bool = False
    """Its markers may be special tokens, which must not be left out of the text."""
    recognizes: Callable[[str], bool] = lambda template: False
    """Whether a chat template's answers are unreadable without it; then no flag is needed."""
    tags: ReasoningTags | None = None
    """What it stands between, if that is all there is to it."""


def _tags(open_tag: str, close_tag: str, *, begins_inside: bool = False, special: bool = False) -> ReasoningParserSpec:
    tags = ReasoningTags(open_tag, close_tag, begins_inside)
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
        "qwen3": _THINK,
        "seed_oss": _tags("<seed:think>", "</seed:think>"),
        "step3": _THINK_AT_ONCE,
        "openai_gptoss": ReasoningParserSpec(
            lambda prompt: parse_harmony_text, keeps_special_tokens=True, recognizes=is_harmony
        ),
    }
)
"""By the names of vLLM's --reasoning-parser."""


def reasoning_parser(name: str) -> ReasoningParserSpec:
    """The row called `name`. Raises ConfigError."""
    spec = REASONING_PARSERS.get(name)
    if spec is None:
        raise ConfigError(f"--reasoning-parser {name!r} is not one of {', '.join(REASONING_PARSERS)}")
    return spec


def recognize(template: str | None) -> str | None:
    """The name of the family that a chat template is of, if there is no doubt."""
    if template is None:
        return None
    return next((name for name, spec in REASONING_PARSERS.items() if spec.recognizes(template)), None)
