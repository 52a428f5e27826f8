"""Rendered prompts against transformers', byte for byte, and what is refused."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import ValidationError
from quire.frontend.text import chat_template
from quire.frontend.text.chat_template import detect_content_format, render_chat

LLAMA3 = """{{- bos_token }}
{%- if tools is not none and tools %}
    {{- "<|start|>system<|end|>\\n\\nYou may call:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>ipython<|end|>' + (message.content if message.content is string else message.content | tojson) }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("Only one call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'user' and not enable_thinking | default(true) %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
      {% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL = """{%- set ns = namespace(index=0) %}
{{ bos_token }}{% for message in messages %}
  {% if (message['role'] == 'user') != (ns.index % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% set ns.index = ns.index + 1 %}
{{ '[INST] ' + message['content'] + ' [/INST]' if message['role'] == 'user' else message['content'] + eos_token }}
{% endfor %}"""
PARTS = """{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message['content'] %}{% if part.type == 'text' %}
{{- part.text }}{% endif %}{% endfor %}{% endif %}
</{{ message.role }}>{% endfor %}"""
PARTS_ONLY = (
    "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wie ist das Wetter? <b>'&'</b> 天气",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TURNS = [
    {"role": "user", "content": "What is <b>prefix caching</b> & why? 缓存 \U0001f600"},
    {"role": "assistant", "content": "  It keeps blocks.  "},
    {"role": "user", "content": "Thanks"},
]
CALL = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": "rain"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    conversation = [{k: v for k, v in m.items() if v is not None} for m in messages]  # as apply_chat_template does
    rendered, _ = render_jinja_template([conversation], chat_template=template, **SPECIAL, **options)
    return str(rendered[0])


@pytest.mark.parametrize("template", [LLAMA3, CHATML, MISTRAL, PARTS], ids=["llama3", "chatml", "mistral", "parts"])
@pytest.mark.parametrize("messages", [TURNS, TURNS[:1]], ids=["turns", "one"])
@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": True}, {"tools": TOOLS}], ids=["", "generation", "tools"]
)
def test_equal_to_transformers(template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    assert render_chat(template, messages, variables=SPECIAL, **options) == theirs(template, messages, **options)


def test_tool_calls_equal_to_transformers() -> None:
    expected = theirs(LLAMA3, CALL, tools=TOOLS)
    assert render_chat(LLAMA3, CALL, tools=TOOLS, variables=SPECIAL) == expected
    as_text = [dict(m) for m in CALL]
    as_text[1] = {**CALL[1], "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}]}
    assert render_chat(LLAMA3, as_text, tools=TOOLS, variables=SPECIAL) == expected
    assert "Köln" in expected


def test_arguments_that_are_no_json_are_left_alone() -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments }}|{{ messages[0].tool_calls[1] }}"
    calls = [{"function": {"name": "f", "arguments": "not json"}}, "odd"]
    assert render_chat(template, [{"role": "assistant", "tool_calls": calls}]) == "not json|odd"


def test_variables_win_over_special_tokens_and_reach_the_template() -> None:
    variables = {**SPECIAL, "enable_thinking": False}
    assert render_chat(CHATML, TURNS, variables=variables) == theirs(CHATML, TURNS, enable_thinking=False)


@pytest.mark.parametrize("template", [LLAMA3, CHATML, MISTRAL], ids=["llama3", "chatml", "mistral"])
@pytest.mark.parametrize("ending", ["The answer is", "The answer is ", "  two\n\n"])
def test_continue_final_message_equals_transformers(template: str, ending: str) -> None:
    messages = [TURNS[0], {"role": "assistant", "content": ending}]
    options = {"continue_final_message": True}
    ours = render_chat(template, messages, variables=SPECIAL, **options)  # type: ignore[arg-type]
    assert ours == theirs(template, messages, **options)
    assert ours.endswith((ending.strip(), ending))
    assert messages[1]["content"] == ending  # the caller's message is not touched


def test_continue_final_message_of_parts_equals_transformers() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    ours = render_chat(PARTS, messages, continue_final_message=True)
    assert ours == theirs(PARTS, messages, continue_final_message=True) == "<assistant>one two"


@pytest.mark.parametrize(
    ("template", "messages", "options", "message"),
    [
        (CHATML, TURNS, {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        (CHATML, [{"role": "user"}], {"continue_final_message": True}, "no text to continue"),
        ("x", TURNS, {"continue_final_message": True}, "left the last message out"),
        (MISTRAL, TURNS[1:], {}, r"refused the conversation: Conversation roles must alternate"),
        (CHATML, [{"role": "user"}], {}, "refused the conversation: 'dict object' has no attribute 'content'"),
        ("{{ 1 / 0 }}", TURNS, {}, "ZeroDivisionError"),
        ("{{ messages + 1 }}", TURNS, {}, "TypeError"),
        ("{{ messages.append(1) }}", TURNS, {}, "refused the conversation"),
        ("{{ ''.__class__.__mro__ }}", TURNS, {}, "refused the conversation"),
        ("{% for x in range(999999) %}{% endfor %}", TURNS, {}, "OverflowError"),
        ("{% for %}", TURNS, {}, r"does not parse \(line 1\)"),
        ("x", [], {}, "messages is empty"),
        ("x", ["hi"], {}, r"messages\[0\] must be an object with a role, got str"),
        ("x", [{"content": "hi"}], {}, r"messages\[0\] must be an object with a role"),
        ("x", [{"role": "user", "content": 5}], {}, "must be text or a list of parts, got int"),
        ("x", [{"role": "user", "content": [{"type": "image_url"}]}], {}, "type 'image_url'; this model takes text"),
        ("x", [{"role": "user", "content": [{"type": "text"}]}], {}, "type 'text'"),
        ("x", [{"role": "user", "content": [5]}], {}, "type 'int'"),
        ("x", TURNS, {"content_format": "xml"}, "not one of auto, string, openai"),
        ("x" * (1 << 20) + "y", TURNS, {}, "at most 1048576 are accepted"),
    ],
)
def test_refusals_are_validation_errors(template: str, messages: Any, options: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        render_chat(template, messages, variables=SPECIAL, **options)


def test_the_size_of_what_a_template_writes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100)
    endless = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(ValidationError, match="wrote more than 100 characters"):
        render_chat(endless, TURNS)


def test_a_template_may_ask_for_the_date() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    assert render_chat("{{ strftime_now('%Y-%m-%d') }}", TURNS) in (before, datetime.now().strftime("%Y-%m-%d"))


# -- content formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAMA3, "string"),
        (CHATML, "string"),
        (MISTRAL, "string"),
        (PARTS, "openai"),
        (PARTS_ONLY, "openai"),
        ("{% for m in messages %}{% for p in m.content | list %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}", "openai"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", "string"),
        ("{% for m in messages %}{% for w in m['content'].split() %}{{ w }}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_detect_content_format(template: str, expected: str) -> None:
    assert detect_content_format(template) == expected


def test_text_parts_become_a_string_for_a_string_template() -> None:
    parts = [
        {"type": "text", "text": "one"},
        {"type": "input_text", "text": "two"},
        "three",
        {"type": "refusal", "refusal": "no"},
    ]
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo\nthree\nno"


def test_a_string_becomes_parts_for_a_template_that_knows_only_those() -> None:
    assert render_chat(PARTS_ONLY, [{"role": "user", "content": "hi"}]) == "[hi]"
    assert render_chat(PARTS, [{"role": "user", "content": "hi"}]) == "<user>hi</user>"


def test_the_format_can_be_forced() -> None:
    template = "{{ messages[0].content | tojson }}"
    messages = [{"role": "user", "content": "hi"}]
    assert render_chat(template, messages) == '"hi"'
    assert render_chat(template, messages, content_format="openai") == '[{"type": "text", "text": "hi"}]'
    listed = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert render_chat(PARTS, listed, content_format="string") == "<user>hi</user>"


PHI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "<|system|>{{ m['content'] }}<|tool|>{{ m['tools'] }}<|/tool|><|end|>"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "é"}}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "Hi"}], '<|system|><|tool|>[{"name": "f", "description": "é"}]<|/tool|><|end|>'),
        (
            [{"role": "system", "content": "Be."}],
            '<|system|>Be.<|tool|>[{"name": "f", "description": "é"}]<|/tool|><|end|>',
        ),
        ([{"role": "system", "content": "Be.", "tools": "own"}], "<|system|>Be.<|tool|>own<|/tool|><|end|>"),
    ],
)
def test_a_template_that_looks_for_tools_in_the_system_message_finds_them(messages: Any, expected: str) -> None:
    assert render_chat(PHI, messages, tools=[TOOL]).startswith(expected)
    assert "<|tool|>[" not in render_chat(PHI, messages)
    both = PHI + "{{ tools }}"  # takes them itself
    assert "<|tool|>[" not in render_chat(both, messages, tools=[TOOL])
