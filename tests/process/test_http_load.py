"""Promises P1, P6, P9, P10 and P12 at once, over HTTP, on the demo model.

A server at saturation, whose clients leave, stand still and come in too great a number, and whose core is killed on the
way. The clients that stay do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.testing.metrics_audit import watching

from .scraping import Scraper, scraped
from .serving import ServerProcess, serving

TIME_LIMIT_S = 120.0
NUM_CLIENTS = 48
NUM_SEATS = 24
MAX_QUEUED = 16
TEXTS = ("What is prefix caching?", "Tell me a story about a page that was lost.", "1, 2, 3,", "The quick brown fox")


@dataclass(frozen=True)
class Ask:
    """One of a few requests whose answers are known beforehand."""

    prompt: str
    max_tokens: int
    seed: int

    def body(self) -> dict[str, Any]:
        more = {"ignore_eos": True, "return_token_ids": True, "stream": True}
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "seed": self.seed, "temperature": 0.8, **more}


ASKS = [Ask(text, max_tokens, seed) for text in TEXTS for max_tokens in (8, 24) for seed in (1, 2)]


@dataclass
class Load:
    """The end of every request."""

    server: ServerProcess
    expected: dict[Ask, list[int]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_accepted: int = 0
    prompt_tokens: dict[Ask, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    least_tokens: int = 0


async def stream(client: httpx2.AsyncClient, ask: Ask) -> AsyncIterator[tuple[list[int], str | None, dict[str, Any]]]:
    """(tokens, finish reason, the chunk) of each event. Raises RefusedError."""
    async with client.stream("POST", "/v1/completions", json=ask.body()) as response:
        if response.status_code == 503:
            assert 1 <= int(response.headers["retry-after"]) <= 60
            raise RefusedError
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            (choice,) = chunk["choices"]
            yield choice["token_ids"] or [], choice["finish_reason"], choice


class RefusedError(Exception):
    """There is no room now."""


async def read_whole(client: httpx2.AsyncClient, ask: Ask) -> tuple[list[int], int]:
    """All tokens of an answer, and how many its prompt has. There is one end, and nothing after it."""
    tokens: list[int] = []
    ends: list[str] = []
    num_prompt_tokens = 0
    async for new, reason, choice in stream(client, ask):
        assert not ends
        tokens += new
        num_prompt_tokens = num_prompt_tokens or len(choice.get("prompt_token_ids") or ())
        ends += [reason] if reason else []
    assert ends == ["length"]
    return tokens, num_prompt_tokens


class Crowd:
    """Clients that ask one thing after the other, each in a way of its own."""

    def __init__(self, load: Load, client: httpx2.AsyncClient, num_requests: int, num_kills: int) -> None:
        self._load, self._client = load, client
        self._rng = random.Random(11)
        self._left = num_requests
        self._kill_at = {num_requests * (turn + 1) // (num_kills + 1) for turn in range(num_kills)}
        self._kills: list[asyncio.Task[None]] = []
        self._stalled: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client_loop() for _ in range(NUM_CLIENTS)))
        await asyncio.gather(*self._kills)
        for reader, writer in self._stalled:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            assert not reader.at_eof() or reader.exception() is None

    async def _client_loop(self) -> None:
        while self._left:
            self._left -= 1
            if self._left in self._kill_at:
                self._kills.append(asyncio.create_task(self._kill()))
            ask = self._rng.choice(ASKS)
            way = self._rng.choices((self._stay, self._leave, self._stand_still), (0.8, 0.15, 0.05))[0]
            while True:
                try:
                    await way(ask)
                    break
                except RefusedError:
                    self._load.outcomes["refused"] += 1
                    await asyncio.sleep(0.02 + 0.05 * self._rng.random())

    async def _stay(self, ask: Ask) -> None:
        tokens, _ = await read_whole(self._client, ask)
        assert tokens == self._load.expected[ask], "lost, repeated or changed"
        self._accept(ask, "stayed")
        self._load.least_tokens += len(tokens)

    async def _leave(self, ask: Ask) -> None:
        """After the first token, whatever is under way then."""
        async with contextlib.aclosing(stream(self._client, ask)) as answer:
            async for tokens, _, _ in answer:
                if tokens:
                    assert tokens == self._load.expected[ask][: len(tokens)]
                    break
        self._accept(ask, "left")

    async def _stand_still(self, ask: Ask) -> None:
        """Read the beginning, and no more; the connection stays open to the end of the test."""
        url = urlsplit(self._load.server.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=256)
        body = json.dumps(ask.body() | {"logprobs": 20}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        status = await reader.readline()
        if b" 503 " in status:
            writer.close()
            raise RefusedError
        assert b" 200 " in status
        self._stalled.append((reader, writer))
        self._accept(ask, "stood still")

    def _accept(self, ask: Ask, outcome: str) -> None:
        self._load.outcomes[outcome] += 1
        self._load.num_accepted += 1
        self._load.num_prompt_tokens += self._load.prompt_tokens[ask]

    async def _kill(self) -> None:
        """The core, as soon as there is one that is ready."""
        while (await self._client.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0.02)
        os.kill(self._load.server.core_pid(), signal.SIGKILL)
        self._load.outcomes["kills"] += 1


async def watch_health(client: httpx2.AsyncClient) -> None:
    """The process answers, all the time."""
    while True:
        assert (await client.get("/health/live")).status_code == 200
        await asyncio.sleep(0.1)


async def attack(server: ServerProcess, num_requests: int, num_kills: int) -> Load:
    load = Load(server)
    limits = httpx2.Limits(max_connections=NUM_CLIENTS + 8)
    async with (
        scraped(server.url) as scraper,
        httpx2.AsyncClient(base_url=server.url, timeout=TIME_LIMIT_S, limits=limits) as client,
    ):
        for ask in ASKS:
            load.expected[ask], load.prompt_tokens[ask] = await read_whole(client, ask)
        before = await scraper.scrape()
        memory = _resident_mib(server.process.pid)
        async with watching(watch_health(client)):
            await Crowd(load, client, num_requests, num_kills).run()
        while (await client.get("/load")).json() != {"server_load": 0}:
            await asyncio.sleep(0.02)
        check_ledger(load, before, await settled(scraper))
        assert _resident_mib(server.process.pid) - memory < 64
        tokens, _ = await read_whole(client, ASKS[0])
        assert tokens == load.expected[ASKS[0]]
    return load


async def settled(scraper: Scraper) -> MetricsSnapshot:
    """The counts when the core has said that nothing runs."""
    while (found := await scraper.scrape()).value("vllm:num_requests_running") or found.value(
        "vllm:num_requests_waiting"
    ):
        await asyncio.sleep(0.02)
    return found


def check_ledger(load: Load, before: MetricsSnapshot, after: MetricsSnapshot) -> None:
    def more(name: str) -> float:
        return after.value(name) - before.value(name)

    def observed(name: str) -> int:
        return after.count(name) - before.count(name)

    assert more("vllm:request_success") == load.num_accepted
    assert observed("vllm:e2e_request_latency_seconds") == load.num_accepted
    assert observed("vllm:time_to_first_token_seconds") == load.num_accepted
    assert more("vllm:prompt_tokens") == load.num_prompt_tokens
    assert load.outcomes["refused"] == more("vllm:admission_rejections")
    assert load.least_tokens <= more("vllm:generation_tokens") <= 24 * load.num_accepted
    assert after.value("vllm:kv_cache_usage_perc") == 0


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def run(num_requests: int, num_kills: int, *more: str) -> None:
    flags = ("--max-num-seqs", str(NUM_SEATS), "--max-num-queued-reqs", str(MAX_QUEUED), "--max-model-len", "256")
    with serving(*flags, *more, "--disable-uvicorn-access-log", "--core-restart-limit", "100") as server:
        load = asyncio.run(asyncio.wait_for(attack(server, num_requests, num_kills), 1800))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIME_LIMIT_S) == 0
    outcomes = load.outcomes
    assert outcomes["stayed"] + outcomes["left"] + outcomes["stood still"] == num_requests
    assert outcomes["kills"] == num_kills
    assert min(outcomes["stayed"], outcomes["left"], outcomes["stood still"], outcomes["refused"]) > 0


def test_eighty_requests_and_a_death() -> None:
    run(80, 1)


@pytest.mark.slow
def test_two_thousand_requests_and_five_deaths() -> None:
    run(2000, 5)


@pytest.mark.slow
def test_six_hundred_requests_with_drafts_and_three_deaths() -> None:
    run(600, 3, "-sc", '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": false}')
