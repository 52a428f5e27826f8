"""Clients that make a server do everything its dashboards show."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

REFUSED = 503
PAUSE_S = 0.1
"""Pause of a client that was refused: one that comes back at once would only make work."""
LONG, SHORT = 300, 40
VOCABULARY = range(100, 2000)


class Clients:
    """So many at any time, with common beginnings; every fourth answer is left in the middle."""

    def __init__(self, url: str, at_once: int) -> None:
        self._url = url
        self._at_once = at_once
        self._rng = random.Random(11)
        self._beginnings = [self._tokens(160) for _ in range(3)]
        self.is_over = threading.Event()

    async def run(self) -> None:
        limits = httpx2.Limits(max_connections=self._at_once + 1)
        async with httpx2.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:
            await asyncio.gather(self._ask_nonsense(client), *(self._visit(client) for _ in range(self._at_once)))

    async def _visit(self, client: httpx2.AsyncClient) -> None:
        number = 0
        while not self.is_over.is_set():
            number += 1
            await self._ask(client, leaves=number % 4 == 0, n=2 if number % 3 == 0 else 1)

    async def _ask(self, client: httpx2.AsyncClient, *, leaves: bool, n: int) -> None:
        prompt = [*self._rng.choice(self._beginnings), *self._tokens(self._rng.choice((20, 60)))]
        length = self._rng.choice((LONG, SHORT))
        body = {"prompt": prompt, "max_tokens": length, "n": n, "temperature": 1, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == REFUSED:
                await asyncio.sleep(PAUSE_S)
                return
            assert response.status_code == 200, await response.aread()
            async for _ in response.aiter_lines():
                if leaves or self.is_over.is_set():
                    return

    async def _ask_nonsense(self, client: httpx2.AsyncClient) -> None:
        """A prompt longer than any context, until there is room for it to be looked at."""
        body = {"prompt": self._tokens(4000), "max_tokens": 1}
        while not self.is_over.is_set():
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != REFUSED:
                assert answer.status_code == 400, answer.text
                return
            await asyncio.sleep(PAUSE_S)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.choice(VOCABULARY) for _ in range(count)]


@contextmanager
def load_on(url: str, *, at_once: int) -> Iterator[None]:
    """For as long as the block runs. What a client stumbles over fails the block."""
    clients = Clients(url, at_once)
    failures: list[Exception] = []

    def run() -> None:
        try:
            asyncio.run(clients.run())
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        clients.is_over.set()
        thread.join()
        assert failures == [], failures
