"""Templates that never end, or fill the memory, are stopped; honest ones of any size are not. No clock is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.errors import ValidationError
from quire.frontend.text.chat_template import render_chat
from tests.security.templates import ESCAPES, WORK

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
HARMLESS = ("caller",)
"""Little work, however it looks."""
LOOT = ("root:", "<class", "<module", "uid=", "<function", "<code", "site-packages", "subclasses")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WORK)
def test_too_much_work_is_refused(name: str) -> None:
    if name in HARMLESS:
        assert len(render_chat(WORK[name], MESSAGES)) < 100
        return
    with pytest.raises(ValidationError) as refused:
        render_chat(WORK[name], MESSAGES)
    assert refused.value.param in ("messages", "chat_template")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("name", ESCAPES)
def test_nobody_gets_out(name: str) -> None:
    try:
        text = render_chat(ESCAPES[name], MESSAGES)
    except ValidationError as e:
        text = str(e)
    assert not [loot for loot in LOOT if loot in text]
    assert MESSAGES == [{"role": "user", "content": "hello"}]


USUAL = """{% macro show(m) %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ '\n' ~ eos }}{% endmacro -%}
{%- set ns = namespace(num=0, text='') -%}
{%- for message in messages if message.role != 'tool' -%}
{%- set ns.num = ns.num + 1 -%}
{%- if loop.first and not loop.last %}[{{ loop.length }}]{% endif -%}
{{ show(message) }}{%- if message.content is string and '</think>' in message.content -%}
{{ message.content.split('</think>')[-1].lstrip('\n') }}{%- endif -%}
{%- endfor -%}
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor -%}
{{ "%s of %d" % ("all", ns.num) }}"""


@pytest.mark.parametrize("num_messages", [1, 100, 5000])
@pytest.mark.parametrize("num_chars", [1, 2000])
def test_honest_templates_have_room(num_messages: int, num_chars: int) -> None:
    messages = [{"role": "user", "content": "x" * num_chars}] * num_messages
    tools = [
        {"name": f"f{i}", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}} for i in range(50)
    ]
    text = render_chat(USUAL, messages, tools=tools, variables={"eos": "</s>"})
    assert text.endswith(f"all of {num_messages}")
    assert text.count("<|user|>") == num_messages
    assert json.dumps(tools[0], indent=4) in text


def test_work_is_paid_for_by_each_conversation_anew() -> None:
    template = "{% for i in range(90_000) %}{{ i }}{% endfor %}"
    for _ in range(4):
        render_chat(template, MESSAGES)
