from __future__ import annotations

import asyncio

import pytest

from quire.frontend.metrics.catalog.spec import LORA
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.collect.facts import FrontendFacts
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.testing.metrics_audit import MetricsAudit, watching


def test_it_looks_while_the_block_runs_and_no_longer() -> None:
    looks = 0

    async def look() -> None:
        nonlocal looks
        while True:
            looks += 1
            await asyncio.sleep(0)

    async def run() -> None:
        async with watching(look()):
            for _ in range(5):
                await asyncio.sleep(0)
        seen = looks
        assert seen >= 5
        await asyncio.sleep(0)
        assert looks == seen

    asyncio.run(run())


def test_a_watcher_may_end_by_itself() -> None:
    async def run() -> None:
        async with watching(asyncio.sleep(0)):
            for _ in range(3):
                await asyncio.sleep(0)

    asyncio.run(run())


def test_what_it_finds_is_raised_after_the_block_and_whatever_the_block_raises() -> None:
    ended = []

    async def find() -> None:
        raise AssertionError("it is wrong")

    async def run(error: Exception | None) -> None:
        async with watching(find()):
            await asyncio.sleep(0)
            ended.append(error)
            if error is not None:
                raise error

    with pytest.raises(AssertionError, match="it is wrong"):
        asyncio.run(run(None))
    with pytest.raises(AssertionError, match="it is wrong") as found:
        asyncio.run(run(KeyError("lost")))
    assert isinstance(found.value.__context__, KeyError)
    assert len(ended) == 2


def test_a_block_that_fails_ends_the_watching() -> None:
    async def run() -> None:
        forever = asyncio.Event()
        with pytest.raises(KeyError):
            async with watching(_wait(forever)):
                raise KeyError
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def test_tokens_of_adapters_that_do_not_add_up_are_found() -> None:
    """They do not if a token is counted for two adapters."""
    logger = PrometheusStatLogger(
        MetricsSetup(model_name="m", conditions=frozenset({LORA})),
        lambda: FrontendFacts(time=1.0, ledger=RequestLedger(num_delivered_tokens=4), num_live={}),
    )
    stats = IterationStats(num_generation_tokens=4)
    stats.add_adapter_tokens("a", 0, 3)
    logger.record(None, stats)
    audit = MetricsAudit(one_clock=False)
    audit.check(logger.snapshot())
    found = logger.snapshot()
    found.find("quire_lora_generation_tokens").series[-1].value += 1
    with pytest.raises(AssertionError, match="generated tokens, and those of all adapters: 4 is not 5"):
        audit.check(found)
