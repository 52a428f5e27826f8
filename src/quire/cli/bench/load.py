"""Load on an OpenAI-compatible server, any server's: requests at Poisson arrivals, streamed and timed chunk by chunk.

Plain asyncio and HTTP/1.1, one connection per request, so that the client costs little on the machine it shares with
the server. Prompts are token ids and outputs have their full length (`ignore_eos`, `min_tokens`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.cli.bench.measure import percentiles_ms
from quire.cli.bench.workloads import BenchRequest
from quire.cli.generation import RequestTiming
from quire.errors import ConfigError

ALL_AT_ONCE = float("inf")
_LONGEST_LINE = 1 << 20
"""Bytes of one line of an answer, at most."""


@dataclass(frozen=True)
class Target:
    """A server: `base_url` without `/v1`, and the name of the model it serves."""

    base_url: str
    model: str
    request_limit_s: float = 600.0

    @property
    def address(self) -> tuple[str, int, str]:
        """Host, port, and the path of completions. Raises ConfigError if the URL is not plain HTTP."""
        url = urlsplit(self.base_url)
        if url.scheme != "http" or url.hostname is None:
            raise ConfigError(f"the server's URL {self.base_url!r} does not begin with http://HOST")
        return url.hostname, url.port or 80, url.path.rstrip("/") + "/v1/completions"


@dataclass
class LoadResult:
    """All requests of one run. `errors` holds what went wrong with those that did not finish."""

    wall_s: float
    timings: list[RequestTiming] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        return len(self.timings) / self.wall_s if self.wall_s > 0 else 0.0

    def summarize(self) -> dict[str, Any]:
        """Rates, and percentiles of TTFT, inter-token gaps, time per token and end to end, in milliseconds."""
        ends = [t.last_token_s - t.added_s for t in self.timings if t.last_token_s is not None]
        return {
            "num_requests": len(self.timings) + len(self.errors),
            "num_failed": len(self.errors),
            "first_error": self.errors[0] if self.errors else None,
            "wall_s": round(self.wall_s, 3),
            "requests_per_s": round(self.requests_per_s, 3),
            "output_tokens_per_s": round(sum(t.num_output_tokens for t in self.timings) / max(self.wall_s, 1e-9), 1),
            "ttft_ms": percentiles_ms([t.ttft_s for t in self.timings if t.ttft_s is not None]),
            "itl_ms": percentiles_ms([gap for t in self.timings for gap in t.gaps_s]),
            "tpot_ms": percentiles_ms([t.tpot_s for t in self.timings if t.tpot_s is not None]),
            "e2e_ms": percentiles_ms(ends),
        }


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests of a Poisson process of `rate` per second arrive."""
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += 0.0 if rate == ALL_AT_ONCE else rng.expovariate(rate)
        times.append(now)
    return times


async def run_load(target: Target, requests: Sequence[BenchRequest], rate: float, seed: int = 0) -> LoadResult:
    """Send all of `requests`, the n-th at its arrival time whatever has become of those before it."""
    start = time.perf_counter()
    result = LoadResult(0.0)

    async def one(request: BenchRequest, arrival_s: float) -> None:
        await asyncio.sleep(max(0.0, start + arrival_s - time.perf_counter()))
        try:
            async with asyncio.timeout(target.request_limit_s):
                result.timings.append(await send(target, request))
        except (OSError, EOFError, ValueError, TimeoutError) as e:
            result.errors.append(f"{type(e).__name__}: {e}"[:300])

    arrivals = arrival_times(rate, len(requests), seed)
    async with asyncio.TaskGroup() as group:
        for request, arrival_s in zip(requests, arrivals, strict=True):
            group.create_task(one(request, arrival_s))
    result.wall_s = max((t.last_token_s or start for t in result.timings), default=start) - start
    return result


async def send(target: Target, request: BenchRequest) -> RequestTiming:
    """One streamed completion. Raises OSError, EOFError or ValueError when it is refused or breaks off."""
    host, port, path = target.address
    timing = RequestTiming(time.perf_counter(), num_prompt_tokens=len(request.prompt_token_ids))
    reader, writer = await asyncio.open_connection(host, port, limit=_LONGEST_LINE)
    try:
        writer.write(_http_request(host, port, path, _body(target, request)))
        await writer.drain()
        async for chunk in _events(reader):
            _record(timing, chunk, time.perf_counter())
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if timing.num_output_tokens != request.output_len:
        raise ValueError(f"{timing.num_output_tokens} tokens arrived, not {request.output_len}")
    return timing


def _body(target: Target, request: BenchRequest) -> bytes:
    return json.dumps(
        {
            "model": target.model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.output_len,
            "min_tokens": request.output_len,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def _http_request(host: str, port: int, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    status = (await reader.readline()).split(b" ", 2)
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    lines = _lines(reader, is_chunked=headers.get(b"transfer-encoding") == b"chunked")
    if len(status) < 2 or status[1] != b"200":
        text = b" ".join([line async for line in lines])
        raise ValueError(f"status {b' '.join(status[1:]).decode(errors='replace').strip()}: {text[:200]!r}")
    async for line in lines:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise EOFError("the stream ended without [DONE]")


async def _lines(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """The lines of a body, whose chunks (RFC 9112 §7.1) may end anywhere."""
    rest = b""
    while True:
        if is_chunked:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            piece = await reader.readexactly(size)
            await reader.readline()
        else:
            piece = await reader.read(1 << 16)
        if not piece:
            break
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


def _record(timing: RequestTiming, event: dict[str, Any], now: float) -> None:
    """Count one event. A chunk with a choice is a token or more; the number of all comes with the usage at the end."""
    if event.get("error"):
        raise ValueError(f"error in the stream: {event['error']}"[:300])
    usage = event.get("usage")
    if usage:
        timing.num_output_tokens = usage.get("completion_tokens") or timing.num_output_tokens
    choices = event.get("choices")
    if not choices or (choices[0].get("finish_reason") and not choices[0].get("text")):
        return
    if timing.last_token_s is None:
        timing.first_token_s = now
    else:
        timing.gaps_s.append(now - timing.last_token_s)
    timing.last_token_s = now
