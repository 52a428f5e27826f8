from __future__ import annotations

import asyncio

import pytest

from quire.testing.metrics_audit import watching


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
