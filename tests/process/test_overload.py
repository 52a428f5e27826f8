"""Promise P9: however many requests come, a server does as much as it can, and holds no more than its limits. Its
metrics count every one of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx2
import pytest

from quire.frontend.metrics.publish.snapshot import MetricsSnapshot

from .scraping import scraped
from .serving import serving
from .soak import usage

SEATS = 8
MAX_QUEUED = 16
NUM_TOKENS = 20
"""Length of an answer, at 20 ms a token (`Leisurely`)."""
CAPACITY = SEATS / (NUM_TOKENS * 0.02)
"""Requests per second."""
TIME_LIMIT_S = 120.0


@dataclass
class Phase:
    """The outcomes of the requests that came at one rate."""

    rate: float
    statuses: Counter[int] = field(default_factory=Counter)
    took_s: float = 0.0
    """From the first arrival to the last answer: more than was meant where the machine is busy."""
    metrics: MetricsSnapshot = field(default_factory=lambda: MetricsSnapshot([]))
    """When all had been answered."""

    def goodput(self, seconds: float) -> float:
        """Answers per second."""
        return self.statuses[200] / seconds


async def offer(url: str, rate: float, seconds: float, rng: random.Random) -> Phase:
    """Poisson arrivals, each with one try."""
    phase = Phase(rate)
    limits = httpx2.Limits(max_connections=None)
    async with (
        scraped(url) as scraper,
        httpx2.AsyncClient(base_url=url, timeout=TIME_LIMIT_S, limits=limits) as client,
    ):

        async def ask() -> None:
            body = {"prompt": [50] * 20, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            if response.status_code == 503:
                assert 1 <= int(response.headers["retry-after"]) <= 60
            phase.statuses[response.status_code] += 1

        loop = asyncio.get_running_loop()
        start = loop.time()
        due, end, tasks = start, start + seconds, []
        while (due := due + rng.expovariate(rate)) < end:
            await asyncio.sleep(due - loop.time())
            tasks.append(asyncio.create_task(ask()))
        await asyncio.gather(*tasks)
        phase.took_s = loop.time() - start
        phase.metrics = await scraper.scrape()
    return phase


def overload(seconds: float, max_growth_mib: float) -> list[Phase]:
    """Once, twice, five times, twenty times what can be done, each for so long."""
    flags = ("--max-num-seqs", str(SEATS), "--max-num-queued-reqs", str(MAX_QUEUED))
    with serving(*flags, executor="Leisurely") as server:
        rng = random.Random(5)
        pids = server.process.pid, server.core_pid()
        phases = [asyncio.run(offer(server.url, CAPACITY, seconds, rng))]
        before = [usage(pid) for pid in pids]
        phases += [asyncio.run(offer(server.url, factor * CAPACITY, seconds, rng)) for factor in (2, 5, 20)]
        for was, pid in zip(before, pids, strict=True):
            now = usage(pid)
            assert now.rss_mib <= was.rss_mib + max_growth_mib, (was, now)
            assert now.num_threads <= was.num_threads, (was, now)
    answered: Counter[int] = Counter()
    for phase in phases:
        answered += phase.statuses
        assert set(phase.statuses) <= {200, 503}, phase
        assert phase.metrics.value("quire_requests_received") == answered.total()
        assert phase.metrics.value("quire_requests_rejected") == answered[503]
        assert phase.metrics.value("quire_requests_finished", "length") == answered[200]
    return phases


def test_of_twenty_times_too_many_most_are_refused() -> None:
    """All but those there is room for, and those whose turn comes meanwhile."""
    once, *_, twenty = overload(0.7, 32.0)
    assert 0 < twenty.statuses[200] <= SEATS + MAX_QUEUED + CAPACITY * twenty.took_s
    assert twenty.statuses.total() > 10 * CAPACITY
    assert once.statuses[200] > 0


@pytest.mark.slow
def test_a_minute_of_each() -> None:
    """A server does as much at twenty times the load, of which a few late requests are answered after the minute."""
    seconds = 60.0
    phases = overload(seconds, 32.0)
    most = max(phase.goodput(seconds) for phase in phases)
    assert phases[-1].goodput(seconds) >= 0.9 * most, phases
