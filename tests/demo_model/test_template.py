"""The chat template that ships with the model, rendered with the strictest Jinja environment."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tools.demo_model import documents

from quire.config.model import ASSETS_DIR

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
USER = {"role": "user", "content": "Hi"}


def render(messages: list[dict[str, Any]], **values: Any) -> str:
    settings = json.loads((ASSETS_DIR / "demo" / "tokenizer_config.json").read_text(encoding="utf-8"))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(settings["chat_template"]).render(messages=messages, **values)


def test_shipped_template_is_the_trained_one() -> None:
    for name in ("demo", "demo-draft"):
        settings = json.loads((ASSETS_DIR / name / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert settings["chat_template"] == documents.TEMPLATE_FILE.read_text(encoding="utf-8")


def test_a_plain_turn_is_rendered_between_its_marks() -> None:
    text = render([USER], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_system_turn_comes_first() -> None:
    text = render([{"role": "system", "content": "Be kind."}, USER])
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_tools_are_listed_in_the_system_turn() -> None:
    text = render([{"role": "system", "content": "Be kind."}, USER], tools=[WEATHER])
    assert text.startswith(
        "<|im_start|>system\nBe kind.\n\nTools:\n"
        "get_weather(city: string, days: integer): Current weather of a city.\n"
        'Call a tool with <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n'
    )


def test_tool_without_parameters_or_description() -> None:
    assert "\nnow()\n" in render([USER], tools=[{"type": "function", "function": {"name": "now"}}])


def test_arguments_as_object_or_text_render_alike() -> None:
    arguments = {"city": "Köln"}
    calls = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get_weather", "arguments": form}}]}
        for form in (arguments, json.dumps(arguments, ensure_ascii=False))
    ]
    first, second = (render([USER, call]) for call in calls)
    assert first == second
    assert first.endswith('<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call><|im_end|>\n')


def test_tool_result_is_a_turn() -> None:
    text = render([USER, {"role": "tool", "content": "21"}], add_generation_prompt=True)
    assert text.endswith("<|im_start|>tool\n21<|im_end|>\n<|im_start|>assistant\n")


def test_a_longer_conversation_only_appends() -> None:
    """Prefix caching of a chat needs this: the text of earlier turns never changes."""
    messages = [USER, {"role": "assistant", "content": "Hello!"}, USER, {"role": "assistant", "content": "Yes?"}]
    texts = [render(messages[:end]) for end in range(1, 5)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
