"""Items of /v1/responses as messages that chat templates know."""

from __future__ import annotations

from typing import Any

from quire.frontend.openai.protocol.response_items import messages_of, with_instructions


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", "id": "fc_1", "status": "x"}


def called(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part]}


def test_text_is_the_users() -> None:
    assert messages_of("Hi") == [{"role": "user", "content": "Hi"}]


def test_what_an_assistant_does_without_a_break_is_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        reasoning("Hm"), said("c"), call("1"), call("2"),
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "s"}]},
        call("3"),
    ]  # fmt: skip
    assert messages_of(items) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning": "Hm", "tool_calls": [called("1"), called("2")]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": "s"},
        {"role": "assistant", "content": "", "tool_calls": [called("3")]},
    ]


def test_a_second_message_of_the_assistant_is_its_own() -> None:
    assert [m["content"] for m in messages_of([said("a"), said("b")])] == ["a", "b"]
    after_call = messages_of([call("1"), reasoning("Hm"), said("a")])
    assert after_call[1] == {"role": "assistant", "content": "a", "reasoning": "Hm"}


def test_reasoning_that_came_to_nothing_is_left_out() -> None:
    items = [reasoning("Hm"), {"role": "user", "content": "x"}, {"type": "reasoning", "summary": []}]
    assert messages_of(items) == [{"role": "user", "content": "x"}]


def test_the_systems_first_words_are_one_message() -> None:
    items = [
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "c"},
    ]
    assert with_instructions("a", messages_of(items)) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "c"},
    ]
    assert with_instructions(None, [{"role": "user", "content": "x"}]) == [{"role": "user", "content": "x"}]
    assert with_instructions("a", []) == [{"role": "system", "content": "a"}]
