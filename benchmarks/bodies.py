"""Request bodies as large as a server accepts, each in another way: one text, many objects, many numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZE = 27_000_000
TEXT = "The quick brown fox jumps over the lazy dog. " * (SIZE // 45)


def _chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}


def _message(messages: list[Any]) -> tuple[str, Any]:
    return "/v1/messages", {"model": "demo", "max_tokens": 2, "messages": messages}


def _tool(number: int) -> dict[str, Any]:
    properties = {f"p{j}": {"type": "string", "description": "what it is"} for j in range(20)}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"properties": properties}}}


def _schema(num_properties: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(num_properties)}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": properties}}}


def _call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


LARGE_BODIES: dict[str, Callable[[], tuple[str, Any]]] = {
    "text": lambda: ("/v1/completions", {"prompt": TEXT}),
    "one word": lambda: ("/v1/completions", {"prompt": "x" * SIZE}),
    "text that is cut": lambda: ("/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 10}),
    "escapes": lambda: ("/v1/completions", {"prompt": "Ж" * (SIZE // 6)}),
    "many texts": lambda: ("/v1/completions", {"prompt": ["x" * 13_000] * 2_000}),
    "ids": lambda: ("/v1/completions", {"prompt": [1] * 250_000}),
    "a conversation": lambda: _chat(messages=[{"role": "user", "content": TEXT}]),
    "many messages": lambda: _chat(messages=[{"role": "user", "content": "x" * 80}] * 32_768),
    "parts": lambda: _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 99}] * 40_000}]),
    "tools": lambda: _chat(tools=[_tool(i) for i in range(800)]),
    "arguments": lambda: _chat(messages=[{"role": "user", "content": "x"}, _call(str(list(range(200_000))))]),
    "a schema": lambda: _chat(response_format=_schema(500)),
    "too large a schema": lambda: _chat(response_format=_schema(80_000)),
    "biases": lambda: ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(65_000)}}),
    "a wrong field": lambda: ("/v1/completions", {"prompt": "x", "temperature": TEXT}),
    "tokens to count": lambda: ("/tokenize", {"prompt": TEXT}),
    "tokens to read": lambda: ("/detokenize", {"tokens": [50] * 250_000}),
    "a response": lambda: ("/v1/responses", {"input": TEXT}),
    "many items": lambda: ("/v1/responses", {"input": [{"role": "user", "content": "x" * 80}] * 65_000}),
    "many turns": lambda: _message([{"role": "user", "content": "x" * 80}] * 32_768),
    "a message": lambda: _message([{"role": "user", "content": TEXT}]),
}
"""Makers of a path and a body, by name."""
