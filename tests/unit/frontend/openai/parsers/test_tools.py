"""Which parser a chat template asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quire
from quire.errors import ConfigError
from quire.frontend.openai.parsers import reasoning as reasoning_registry
from quire.frontend.openai.parsers.tools import TOOL_PARSERS, make_call_id, recognize, tool_parser


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


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        tool_parser("zeus")
