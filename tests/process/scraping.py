"""Promise P12 over HTTP: whatever a test does to a server, its metrics are looked at every 50 ms meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2

from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.testing.metrics_audit import MetricsAudit, read_exposition, watching

INTERVAL_S = 0.05
TIME_LIMIT_S = 120.0


class Scraper:
    """Holds each answer of one server against the conservation laws, and against the answer before it."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self._audit = MetricsAudit()

    async def scrape(self) -> MetricsSnapshot:
        """Returns what the server says now. Raises AssertionError for an answer that cannot be true."""
        response = await self._client.get("/metrics")
        assert response.status_code == 200, response.text
        snapshot = read_exposition(response.text)
        self._audit.check(snapshot)
        return snapshot

    async def check_at_rest(self) -> MetricsSnapshot:
        """Returns what the server says while no request is live. Raises AssertionError as `scrape`."""
        snapshot = await self.scrape()
        self._audit.check_at_rest(snapshot)
        return snapshot

    async def watch(self, may_be_gone: Callable[[], bool]) -> None:
        """Scrape until the server is gone, if it may be."""
        try:
            while True:
                await self.scrape()
                await asyncio.sleep(INTERVAL_S)
        except httpx2.TransportError:
            if not may_be_gone():
                raise


@asynccontextmanager
async def scraped(url: str, *, may_be_gone: Callable[[], bool] = lambda: False) -> AsyncIterator[Scraper]:
    """The laws hold at every scrape while the block runs. The server answers all the time, unless it `may_be_gone`."""
    async with httpx2.AsyncClient(base_url=url, timeout=TIME_LIMIT_S) as client:
        scraper = Scraper(client)
        await scraper.scrape()
        async with watching(scraper.watch(may_be_gone)):
            yield scraper
