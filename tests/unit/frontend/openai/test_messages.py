"""Anthropic's /v1/messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .serving import Server, check

PATH = "/v1/messages"
BODY: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 6,
    "system": [{"type": "text", "text": "Be short."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
}
AS_CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


def test_an_answer_is_that_of_the_chat_route() -> None:
    async def test(server: Server) -> None:
        answer = await server.answer(PATH, **BODY)
        chat = await server.answer("/v1/chat/completions", messages=AS_CHAT, max_tokens=6)
        assert list(answer) == [
            "id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage",
        ]  # fmt: skip
        assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
        assert answer["stop_reason"] == "max_tokens"
        counted = await server.answer(f"{PATH}/count_tokens", model="demo", messages=BODY["messages"])
        assert counted["input_tokens"] < answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert answer["usage"]["output_tokens"] == 6

    check(test)


def test_a_stream_has_anthropics_events_in_their_order() -> None:
    async def test(server: Server) -> None:
        whole = await server.answer(PATH, **BODY)
        response = await server.post(PATH, {**BODY, "stream": True})
        events = [block.split("\n") for block in response.text.strip().split("\n\n")]
        data = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
        assert [lines[0] for lines in events] == [f"event: {d['type']}" for d in data]
        kinds = [d["type"] for d in data]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert "".join(d["delta"]["text"] for d in data[2:-3]) == whole["content"][0]["text"]
        assert data[-2]["usage"] == whole["usage"]
        assert data[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}

    check(test)


@pytest.mark.parametrize(
    ("change", "status", "kind", "word"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "x"}, 404, "not_found_error", "'x'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "image"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, 400, "invalid_request_error", "tools"),
        ({"chat_template_kwargs": {"tools": []}}, 400, "invalid_request_error", "chat_template_kwargs"),
    ],
)
def test_errors_have_anthropics_shape(change: dict[str, Any], status: int, kind: str, word: str) -> None:
    async def test(server: Server) -> None:
        response = await server.post(PATH, {**BODY, **change})
        assert response.status_code == status
        body = response.json()
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
        assert word in body["error"]["message"]

    check(test)
