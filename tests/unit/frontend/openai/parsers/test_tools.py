"""Which parser a chat template asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.errors import ConfigError
from quire.frontend.openai.parsers import reasoning as reasoning_registry
from quire.frontend.openai.parsers.events import CallStart, StreamParser
from quire.frontend.openai.parsers.tools import TOOL_PARSERS, make_call_id, recognize, tool_parser
from quire.frontend.text.chat_template import render_chat

from ..reading import read, split
from .templates import TEMPLATES


def test_the_demo_models_template_is_recognized() -> None:
    path = Path(quire.__file__).parent / "assets" / "demo" / "tokenizer_config.json"
    assert recognize(json.loads(path.read_text())["chat_template"]) == "hermes"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=a> arguments", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>arguments</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>{name}\n<arg_key>arguments</arg_key>", None),
        ("[TOOL_CALLS][{", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("<|start|>assistant<|channel|>commentary to=functions.f<|message|>", "openai"),
        ("<tool_call> arguments [TOOL_CALLS]", None),  # two at once: no guess
    ],
)
def test_only_what_is_sure_is_recognized(template: str | None, name: str | None) -> None:
    assert recognize(template) == name


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_chooses_its_own_parsers_or_none(name: str) -> None:
    sample = TEMPLATES[name]
    assert recognize(sample.template) == sample.tools
    assert reasoning_registry.recognize(sample.template) == sample.reasoning


@pytest.mark.parametrize("name", sorted(name for name, sample in TEMPLATES.items() if sample.end))
def test_a_call_is_read_as_the_template_writes_it(name: str) -> None:
    """Renders two calls of a conversation and reads them again."""
    sample = TEMPLATES[name]
    arguments: list[dict[str, Any]] = [{"city": "Os'lo", "days": [1, 2], "now": True}, {}]
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
        for i, (name, values) in enumerate(zip("fg", arguments, strict=True))
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    prompt = render_chat(sample.template, messages[:1], tools=[{}], add_generation_prompt=True)
    whole = render_chat(sample.template, messages, tools=[{}]).rstrip()
    prompt = prompt.removesuffix("<think>")
    assert whole.startswith(prompt)
    written = whole.removeprefix(prompt).removesuffix(sample.end.strip())
    found = read(TOOL_PARSERS[sample.reads or sample.tools or ""].program, split(written, 5))
    assert [kind for kind, _ in found] == ["call", "arguments"] * 2
    assert [text for kind, text in found if kind == "call"] == ["f", "g"]
    assert [json.loads(text) for kind, text in found if kind == "arguments"] == arguments


def test_rows_that_templates_cannot_choose_are_named_here() -> None:
    """All others have a template above that chooses them."""
    chosen = {sample.tools for sample in TEMPLATES.values()}
    assert set(TOOL_PARSERS) - chosen == {
        "deepseek_v31", "glm47", "jamba", "llama3_json", "llama4_json", "llama4_pythonic", "pythonic", "qwen3_xml",
    }  # fmt: skip


def test_reasoning_is_read_unasked_only_where_it_must_be() -> None:
    assert reasoning_registry.recognize(None) is None
    assert reasoning_registry.recognize("<think>{{ reasoning }}</think>") is None
    assert reasoning_registry.recognize("<|start|><|channel|><|message|>functions.") == "openai_gptoss"


def test_ids_of_calls_are_unique_and_in_the_form_of_the_family() -> None:
    assert len({make_call_id() for _ in range(100)}) == 100
    assert make_call_id().startswith("chatcmpl-tool-")
    mistral = TOOL_PARSERS["mistral"].make_call_id()
    assert len(mistral) == 9
    assert mistral.isalnum()


def test_kimis_ids_are_the_models_own() -> None:
    parser = StreamParser(TOOL_PARSERS["kimi_k2"].program)
    call = "<|tool_call_begin|>functions.a:b:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    start = parser.feed(f"<|tool_calls_section_begin|>{call}")[0]
    assert start == CallStart("a:b", "functions.a:b:1")


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        tool_parser("zeus")
