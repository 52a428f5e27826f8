"""The log of requests: no text unless a flag asks for it, and then no more than the flag allows."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from .serving import Server, check

Log = pytest.LogCaptureFixture
CANARY = "canary in a coal mine"


def lines_of(caplog: Log, name: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == name]


def serve(caplog: Log, *, stream: bool = False, **flags: Any) -> list[logging.LogRecord]:
    """Two requests, and what quire.requests logged of them."""
    caplog.set_level(logging.DEBUG, "quire")  # a command in an earlier test may have made it less talkative

    async def test(server: Server) -> None:
        for prompt in (CANARY, [5, 6, 7]):
            body = {"model": "demo", "prompt": prompt, "max_tokens": 5, "ignore_eos": True}
            headers = {"x-request-id": "mine", "authorization": "Bearer canary-key-1234"}
            response = await server.post("/v1/completions", {**body, "stream": stream}, headers=headers)
            assert response.status_code == 200

    check(test, **flags)
    return lines_of(caplog, "quire.requests")


def test_by_default_nothing_of_a_request_is_logged(caplog: Log) -> None:
    assert serve(caplog) == []
    (access, _) = lines_of(caplog, "quire.access")
    assert (access.request_id, access.status, access.path) == ("mine", 200, "/v1/completions")  # type: ignore[attr-defined]
    assert "canary" not in caplog.text


def test_requests_without_their_text(caplog: Log) -> None:
    first, second = serve(caplog, enable_log_requests=True)
    assert first.request_id == second.request_id == "mine"  # type: ignore[attr-defined]
    assert "request cmpl-mine" in first.getMessage()
    assert "max_tokens=5, n=1" in first.getMessage()
    assert "3 prompt tokens" in second.getMessage()
    assert "prompt:" not in first.getMessage()
    assert "canary" not in caplog.text


def test_the_start_of_a_prompt(caplog: Log) -> None:
    first, second = serve(caplog, enable_log_requests=True, max_log_len=6)
    assert 'prompt: "canary"... (' in first.getMessage()
    assert "coal" not in caplog.text
    assert "prompt: " in second.getMessage()
    assert "canary-key" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_ends_and_outputs(caplog: Log, stream: bool) -> None:
    lines = serve(caplog, stream=stream, enable_log_requests=True, enable_log_outputs=True)
    ends = [line.getMessage() for line in lines if "finish_reason" in line.getMessage()]
    assert len(ends) == 2
    assert all("output 0: 5 tokens, finish_reason=length" in end for end in ends)
    assert all("text:" not in end for end in ends)
    caplog.clear()
    lines = serve(caplog, stream=stream, enable_log_requests=True, enable_log_outputs=True, max_log_len=3)
    ends = [line.getMessage() for line in lines if "finish_reason" in line.getMessage()]
    assert len(ends) == 2
    for end in ends:
        shown = end.split('text: "', 1)[1].split('"', 1)[0]
        assert len(shown) <= 3


def test_ends_can_be_logged_alone(caplog: Log) -> None:
    lines = serve(caplog, enable_log_outputs=True)
    assert ["finish_reason" in line.getMessage() for line in lines] == [True, True]
    assert "canary" not in caplog.text


def test_a_length_alone_shows_nothing(caplog: Log) -> None:
    assert serve(caplog, max_log_len=100) == []
    assert "canary" not in caplog.text
