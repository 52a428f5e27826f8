"""The table of tool parsers. A new format is a file with a program and a row (docs/recipes/add_a_tool_parser.md)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError
from quire.frontend.openai.parsers.events import Program
from quire.frontend.openai.parsers.harmony import is_harmony, parse_harmony
from quire.frontend.openai.parsers.marked_calls import (
    is_hermes,
    make_mistral_id,
    parse_deepseek,
    parse_hermes,
    parse_llama,
    parse_mistral,
)
from quire.frontend.openai.parsers.pythonic import parse_pythonic
from quire.frontend.openai.parsers.tagged_arguments import is_glm, is_qwen_coder, make_glm, make_qwen_coder


def make_call_id() -> str:
    """Returns a unique id for a call."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


@dataclass(frozen=True)
class ToolParserSpec:
    """Format in which a family of models writes its calls."""

    program: Program
    make_call_id: Callable[[], str] = make_call_id
    keeps_special_tokens: bool = False
    """True: markers are special tokens, so special tokens must stay in the text."""
    reads_reasoning: bool = False
    """True: the program reads reasoning, too, and no reasoning parser runs before it."""
    recognizes: Callable[[str], bool] = lambda template: False
    """Returns whether a chat template unambiguously asks for this format; then no flag is needed."""
    with_tools: Callable[[Sequence[Mapping[str, Any]]], Program] | None = None
    """Makes the program, for formats that cannot be read without knowing the tools."""

    def program_for(self, tools: Sequence[Mapping[str, Any]]) -> Program:
        """Returns the program for answers to a request with these tools."""
        return self.program if self.with_tools is None else self.with_tools(tools)


TOOL_PARSERS: Mapping[str, ToolParserSpec] = MappingProxyType(
    {
        "hermes": ToolParserSpec(parse_hermes, recognizes=is_hermes),
        "llama3_json": ToolParserSpec(parse_llama, keeps_special_tokens=True),
        "llama4_json": ToolParserSpec(parse_llama, keeps_special_tokens=True),
        "mistral": ToolParserSpec(
            parse_mistral,
            make_call_id=make_mistral_id,
            keeps_special_tokens=True,
            recognizes=lambda template: "[TOOL_CALLS]" in template,
        ),
        "pythonic": ToolParserSpec(parse_pythonic),
        "deepseek_v3": ToolParserSpec(
            parse_deepseek, keeps_special_tokens=True, recognizes=lambda template: "<｜tool▁calls▁begin｜>" in template
        ),
        "deepseek_v31": ToolParserSpec(parse_deepseek, keeps_special_tokens=True),
        "qwen3_coder": ToolParserSpec(make_qwen_coder(()), with_tools=make_qwen_coder, recognizes=is_qwen_coder),
        "qwen3_xml": ToolParserSpec(make_qwen_coder(()), with_tools=make_qwen_coder),
        "glm45": ToolParserSpec(make_glm(()), with_tools=make_glm, keeps_special_tokens=True, recognizes=is_glm),
        "openai": ToolParserSpec(parse_harmony, keeps_special_tokens=True, reads_reasoning=True, recognizes=is_harmony),
    }
)
"""Rows by the names of vLLM's --tool-call-parser."""


def tool_parser(name: str) -> ToolParserSpec:
    """Returns the row called `name`. Raises ConfigError."""
    spec = TOOL_PARSERS.get(name)
    if spec is None:
        raise ConfigError(f"--tool-call-parser {name!r} is not one of {', '.join(TOOL_PARSERS)}")
    return spec


def recognize(template: str | None) -> str | None:
    """Returns the name of the format that a chat template asks for; None unless exactly one row recognizes it."""
    found = [name for name, spec in TOOL_PARSERS.items() if template is not None and spec.recognizes(template)]
    return found[0] if len(found) == 1 else None
