"""Promise P11: a server ends while streams are in all phases of their lives.

Every admitted request gets an end, an answer's or an error's; the exit code is 0, and nothing is left behind. The
metrics add up until the server is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path

import httpx2
import pytest

from .scraping import scraped
from .serving import ServerProcess, serving

NUM_STREAMS = 32
TIME_LIMIT_S = 120


class Crowd:
    """Streams of many lengths, and a signal at a moment of one of them."""

    def __init__(self, server: ServerProcess, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self._num_chunks_left = rng.randint(1, 40 * NUM_STREAMS)
        self._has_struck = False
        self.ends: Counter[str] = Counter()

    async def run(self) -> None:
        limits, url = httpx2.Limits(max_connections=None), self._server.url
        async with (
            scraped(url, may_be_gone=lambda: self._has_struck),
            httpx2.AsyncClient(base_url=url, timeout=TIME_LIMIT_S, limits=limits) as client,
        ):
            lengths = [self._rng.choice((1, 10, 60, 400)) for _ in range(NUM_STREAMS)]
            waits = [self._rng.choice((0, 0, 5, 20)) for _ in range(NUM_STREAMS)]
            await asyncio.gather(*map(self._stream, [client] * NUM_STREAMS, lengths, waits))
            self._strike(self._num_chunks_left)  # all have ended before

    async def _stream(self, client: httpx2.AsyncClient, num_tokens: int, num_before: int) -> None:
        for _ in range(num_before):  # turns of short requests, so that streams begin at different times
            await self._read(client, 1)
        await self._read(client, num_tokens)

    async def _read(self, client: httpx2.AsyncClient, num_tokens: int) -> None:
        body = {"prompt": [50] * 20, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        events: list[str] = []
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code == 503:
                    self.ends["refused"] += 1
                    return
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))
                        self._strike(1)
        except httpx2.TransportError as e:
            if events:
                raise AssertionError(f"one that was let in was hung up on after {events}") from e
            self.ends["not let in"] += 1
            return
        assert events[-1] == "[DONE]", events
        last = json.loads(events[-2])
        assert ("error" in last) != bool(last.get("choices") and last["choices"][0]["finish_reason"]), last
        self.ends["error" if "error" in last else "answer"] += 1

    def _strike(self, num_chunks: int) -> None:
        self._num_chunks_left -= num_chunks
        if self._num_chunks_left <= 0 and not self._has_struck:
            self._has_struck = True
            self._server.process.send_signal(signal.SIGTERM)


def drain(seed: int) -> Counter[str]:
    """One server's life."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        with serving("--shutdown-timeout", "1", executor="Leisurely") as server:
            core = server.core_pid()
            crowd = Crowd(server, random.Random(seed))
            asyncio.run(asyncio.wait_for(crowd.run(), TIME_LIMIT_S))
            assert server.process.wait(TIME_LIMIT_S) == 0
            assert not os.path.exists(f"/proc/{core}")
        assert not [path for path in Path(directory).iterdir() if path.name.startswith("quire")]
        return crowd.ends


def test_a_server_is_told_to_end() -> None:
    assert drain(1)["answer"]


@pytest.mark.slow
def test_fifty_servers_are_told_to_end() -> None:
    ends: Counter[str] = Counter()
    for seed in range(3, 53):
        ends += drain(seed)
    assert min(ends["answer"], ends["error"], ends["refused"]) > 0, ends
