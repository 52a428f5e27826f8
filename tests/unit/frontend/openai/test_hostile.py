"""Hostile values in every field of every body, through the whole server: 200 or the client's fault, never ours."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from .serving import Server, check
from .test_fields import ENDPOINTS, HOSTILE

CANARY = {"prompt": [40, 41, 42], "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "model": "demo"},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
MORE_HOSTILE: list[Any] = [
    [{"role": "user", "content": "x", "tool_calls": 3}], [{"role": "tool"}], [{"role": "x" * 3000, "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": 3}]}], [{"role": "user", "content": {}}], [[1, 2], "x"],
    {"type": "json_schema"}, {"include_usage": None}, {"max_pattern_size": 5000}, {"0": 1e30}, {"-1": 1}, "auto",
    [{"type": "function_call_output"}], [{"type": "reasoning", "content": [3]}], [{"role": "user", "content": [[]]}],
    [{"type": "tool_use", "name": 3}], {"format": {"type": "json_schema"}}, {"type": "allowed_tools", "tools": [{}]},
    [[]], [2**31 - 1], {"type": "function", "function": {"name": "f"}}, -(2**70), 1e-320, "\x1b[31m", "\u202e",
]  # fmt: skip
LEAKS = re.compile(r"Traceback|0x[0-9a-f]{6,}|/(?:home|root|usr|work|tmp)/|\.py\b")


def hostile_bodies(num_random: int) -> list[tuple[str, dict[str, Any]]]:
    """Every field of the generating routes with a few values each, and of the others with all."""
    draw = random.Random(3)
    cases = []
    for endpoint in ENDPOINTS:
        good = GOOD.get(endpoint.path)
        if good is None or endpoint.body is None:
            continue
        for name in endpoint.body.kind.__struct_fields__:
            values = [*HOSTILE, *MORE_HOSTILE]
            cases += [(endpoint.path, {**good, name: value}) for value in draw.sample(values, num_random)]
    return cases


async def bombard(server: Server, num_random: int) -> None:
    expected = (await server.answer("/v1/completions", **CANARY))["choices"]
    for number, (path, body) in enumerate(hostile_bodies(num_random)):
        response = await server.post(path, body)
        assert response.status_code < 500, (body, response.text)
        assert not LEAKS.search(response.text) or response.status_code == 200, (body, response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["message"], body
            assert path == "/v1/messages" or error["param"] is not None, (body, error)
        if number % 100 == 0:
            assert (await server.answer("/v1/completions", **CANARY))["choices"] == expected


def test_hostile_values() -> None:
    check(lambda server: bombard(server, 8))


@pytest.mark.slow
def test_all_hostile_values() -> None:
    check(lambda server: bombard(server, len(HOSTILE) + len(MORE_HOSTILE)), timeout_s=3600)
