"""The table of tool parsers. A new format is a file with a program and a row (docs/recipes/add_a_tool_parser.md)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError
from quire.frontend.openai.parsers.events import Program
from quire.frontend.openai.parsers.harmony import is_harmony, parse_harmony
from quire.frontend.openai.parsers.marked_calls import (
    is_hermes,
    make_mistral_id,
    parse_apertus,
    parse_cohere,
    parse_deepseek,
    parse_granite,
    parse_hermes,
    parse_internlm,
    parse_kimi,
    parse_llama,
    parse_mistral,
    parse_phi4_mini,
    parse_tool_calls,
)
from quire.frontend.openai.parsers.pythonic import (
    parse_gemma4,
    parse_lfm2,
    parse_llama4_pythonic,
    parse_olmo3,
    parse_pythonic,
)
from quire.frontend.openai.parsers.tagged_arguments import (
    MakeProgram,
    is_qwen_coder,
    make_glm,
    make_minimax,
    make_qwen_coder,
    make_seed,
)


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


def _has(*signs: str) -> Callable[[str], bool]:
    """Returns the condition that all `signs` are in a template."""
    return lambda template: all(sign in template for sign in signs)


def _marked(program: Program, *signs: str) -> ToolParserSpec:
    """Returns a row for a format whose markers are special tokens. `signs` in a template identify it."""
    return ToolParserSpec(program, keeps_special_tokens=True, recognizes=_has(*signs) if signs else lambda _: False)


def _typed(make: MakeProgram, *signs: str) -> ToolParserSpec:
    """Returns a row as `_marked` does, for a format that cannot be read without knowing the tools."""
    return replace(_marked(make(()), *signs), with_tools=make)


_LLAMA, _DEEPSEEK, _HERMES = (_marked(program) for program in (parse_llama, parse_deepseek, parse_hermes))

TOOL_PARSERS: Mapping[str, ToolParserSpec] = MappingProxyType(
    {
        "apertus": _marked(parse_apertus, "<|tools_prefix|>"),
        "cohere_command": _marked(parse_cohere, "<|START_ACTION|>", "tool_name"),
        "deepseek_v3": replace(_DEEPSEEK, recognizes=_has("<｜tool▁calls▁begin｜>")),
        "deepseek_v31": _DEEPSEEK,
        "ernie45": replace(_HERMES, recognizes=_has("<tool_call>", "<response>")),
        "gemma4": _marked(parse_gemma4, "<|tool_call>", "<tool_call|>"),
        "glm45": _typed(make_glm, "<arg_key>", "<arg_value>"),
        "glm47": _typed(make_glm),
        "granite": _marked(parse_granite, "<|tool_call|>", "<|start_of_role|>"),
        "granite4": replace(_HERMES, recognizes=_has("<tool_call>", "arguments", "<|start_of_role|>")),
        "hermes": ToolParserSpec(parse_hermes, recognizes=is_hermes),
        "hunyuan_a13b": ToolParserSpec(parse_tool_calls, recognizes=_has("<tool_calls>", "</tool_calls>")),
        "internlm": _marked(parse_internlm, "<|action_start|>", "<|plugin|>"),
        "jamba": ToolParserSpec(parse_tool_calls),
        "kimi_k2": _marked(parse_kimi, "<|tool_calls_section_begin|>"),
        "lfm2": _marked(parse_lfm2, "<|tool_call_start|>"),
        "llama3_json": _LLAMA,
        "llama4_json": _LLAMA,
        "llama4_pythonic": _marked(parse_llama4_pythonic),
        "minimax_m2": _typed(make_minimax, "<minimax:tool_call>", '<invoke name="'),
        "mistral": replace(_marked(parse_mistral, "[TOOL_CALLS]"), make_call_id=make_mistral_id),
        "olmo3": ToolParserSpec(parse_olmo3, recognizes=_has("<function_calls>", "</function_calls>")),
        "openai": replace(_marked(parse_harmony), reads_reasoning=True, recognizes=is_harmony),
        "phi4_mini_json": _marked(parse_phi4_mini, "<|tool|>", "<|/tool|>"),
        "pythonic": ToolParserSpec(parse_pythonic),
        "qwen3_coder": ToolParserSpec(make_qwen_coder(()), with_tools=make_qwen_coder, recognizes=is_qwen_coder),
        "qwen3_xml": ToolParserSpec(make_qwen_coder(()), with_tools=make_qwen_coder),
        "seed_oss": _typed(make_seed, "<seed:tool_call>", "<function="),
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
