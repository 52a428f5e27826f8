"""`quire.cli.bench.load` against small servers that answer as they are told."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.bench.load import ALL_AT_ONCE, LoadResult, Target, arrival_times, run_load
from quire.cli.bench.workloads import BenchRequest
from quire.errors import ConfigError

REQUESTS = [BenchRequest([5, 6, 7], 3), BenchRequest([8], 2)]
Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def stream_of(body: dict[str, Any]) -> bytes:
    """What a server sends for a request: a chunk per token, an empty last one, the usage."""
    n = body["max_tokens"]
    chunks = [event({"choices": [{"text": "é", "finish_reason": None}]}) for _ in range(n)]
    end = event({"choices": [{"text": "", "finish_reason": "length"}]})
    return b"".join([b": a comment\n\n", *chunks, end, event({"choices": [], "usage": {"completion_tokens": n}})])


def load(answer: Answer, requests: list[BenchRequest] = REQUESTS) -> tuple[LoadResult, list[dict[str, Any]]]:
    """Run a load on a server that gives `answer`; also the bodies it saw."""
    seen: list[dict[str, Any]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        body = json.loads(await reader.readexactly(size))
        seen.append(body)
        await answer(body, writer)
        writer.close()

    async def run() -> LoadResult:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await run_load(Target(f"http://127.0.0.1:{port}/", "m", 30.0), requests, ALL_AT_ONCE)

    return asyncio.run(run()), seen


async def plain(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + stream_of(body) + event(b"[DONE]"))


async def chunked(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Chunks of seven bytes, which end inside lines and characters."""
    data = stream_of(body) + event(b"[DONE]")
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for i in range(0, len(data), 7):
        piece = data[i : i + 7]
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
    writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("answer", [plain, chunked])
def test_a_stream_is_timed_chunk_by_chunk(answer: Answer) -> None:
    result, seen = load(answer)
    assert result.errors == []
    assert sorted(t.num_output_tokens for t in result.timings) == [2, 3]
    assert sorted(len(t.gaps_s) for t in result.timings) == [1, 2]
    assert all(t.ttft_s is not None and t.ttft_s > 0 for t in result.timings)
    body = next(b for b in seen if len(b["prompt"]) == 3)
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["stream"]) == (3, 3, True, True)
    figures = result.summarize()
    assert (figures["num_requests"], figures["num_failed"]) == (2, 0)
    assert figures["ttft_ms"]["p50"] > 0


async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\nnot yet")


async def break_off(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + stream_of(body))


async def stop_early(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + stream_of({"max_tokens": 1}) + event(b"[DONE]"))


async def fail(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event({"error": {"message": "broken"}}))


async def hang_up(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    pass


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refuse, "status 503 Service Unavailable: b'not yet'"),
        (break_off, "ended without"),
        (stop_early, "1 tokens arrived, not"),
        (fail, "broken"),
        (hang_up, "status"),
    ],
)
def test_what_goes_wrong_is_an_error_and_no_timing(answer: Answer, message: str) -> None:
    result, _ = load(answer)
    assert result.timings == []
    assert len(result.errors) == 2
    assert message in result.errors[0]
    assert result.summarize()["num_failed"] == 2
    assert result.summarize()["ttft_ms"] == {}


def test_nobody_there() -> None:
    result = asyncio.run(run_load(Target("http://127.0.0.1:1", "m"), REQUESTS, ALL_AT_ONCE))
    assert "Connect" in result.errors[0]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://example", "ftp://x"])
def test_only_plain_http(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST"):
        _ = Target(url, "m").address


def test_addresses() -> None:
    assert Target("http://host:81", "m").address == ("host", 81, "/v1/completions")
    assert Target("http://host/base/", "m").address == ("host", 80, "/base/v1/completions")


@given(st.floats(0.1, 100.0), st.integers(0, 1000))
def test_arrivals_are_those_of_a_poisson_process(rate: float, seed: int) -> None:
    times = arrival_times(rate, 400, seed)
    assert times == arrival_times(rate, 400, seed)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) * rate == pytest.approx(1.0, rel=0.3)  # six standard deviations
    assert arrival_times(ALL_AT_ONCE, 3, seed) == [0.0, 0.0, 0.0]
