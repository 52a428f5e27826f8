from __future__ import annotations

import asyncio
import threading

import pytest

from quire.errors import EngineDeadError
from quire.frontend.client.mailbox import MAX_TURN_S, LoopMailbox
from quire.wire.engine_core import EngineCoreOutputs


def numbered(number: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(engine_index=number)


async def read_all(mailbox: LoopMailbox, seen: list[int]) -> None:
    while True:
        seen.append((await mailbox.take()).engine_index)


def test_everything_comes_through_in_order_then_the_end() -> None:
    async def run() -> list[int]:
        mailbox = LoopMailbox()
        mailbox.put_outputs(numbered(0))

        def put() -> None:
            for number in range(1, 5000):
                mailbox.put_outputs(numbered(number))
            mailbox.put_end(EngineDeadError("that was all"))

        thread = threading.Thread(target=put)
        thread.start()
        seen: list[int] = []
        with pytest.raises(EngineDeadError, match="that was all"):
            await read_all(mailbox, seen)
        thread.join()
        with pytest.raises(EngineDeadError, match="that was all"):
            await mailbox.take()
        return seen

    assert asyncio.run(asyncio.wait_for(run(), 20)) == list(range(5000))


def test_a_burst_wakes_the_loop_once() -> None:
    async def run() -> int:
        loop, mailbox, num_wakes = asyncio.get_running_loop(), LoopMailbox(), 0
        wake = loop.call_soon_threadsafe

        def count(*args: object) -> object:
            nonlocal num_wakes
            num_wakes += 1
            return wake(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = count  # type: ignore[method-assign, assignment]
        reader = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        for number in range(100):
            mailbox.put_outputs(numbered(number))
        await reader
        return num_wakes

    assert asyncio.run(run()) == 1


async def count_until_others_ran(mailbox: LoopMailbox, refill: int) -> int:
    """Returns how many outputs are taken in a row before another callback of the loop runs, from a full mailbox."""
    others_ran = asyncio.Event()
    await mailbox.take()
    asyncio.get_running_loop().call_soon(others_ran.set)
    count = 0
    while not others_ran.is_set() and count < 10_000:
        for _ in range(refill):
            mailbox.put_outputs(numbered(0))
        await mailbox.take()
        count += 1
    return count


def test_a_core_that_is_faster_than_the_loop_does_not_starve_it() -> None:
    async def run() -> int:
        mailbox = LoopMailbox()
        for number in range(20):
            mailbox.put_outputs(numbered(number))
        return await count_until_others_ran(mailbox, refill=3)

    assert asyncio.run(run()) == 20  # what was there is handed out in one turn; the next begins after the others'


def test_a_turn_is_bounded_in_time() -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += MAX_TURN_S / 4
        return now

    async def run() -> int:
        mailbox = LoopMailbox(clock=tick)
        for number in range(100):
            mailbox.put_outputs(numbered(number))
        return await count_until_others_ran(mailbox, refill=0)

    assert asyncio.run(run()) == 4


def test_a_full_mailbox_says_when_it_has_room() -> None:
    async def run() -> None:
        rooms: list[int] = []
        mailbox = LoopMailbox(2, lambda: rooms.append(1))
        for number in range(3):
            mailbox.put_outputs(numbered(number))
        assert mailbox.is_full
        for expected in ([1], [1, 1], [1, 1]):
            await mailbox.take()
            assert rooms == expected
        assert not mailbox.is_full

    asyncio.run(run())
    assert not LoopMailbox().is_full


def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    async def run() -> None:
        mailbox = LoopMailbox()
        reader = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put_outputs(numbered(7))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert (await mailbox.take()).engine_index == 7

    asyncio.run(run())


def test_a_closed_loop_is_no_ones_error() -> None:
    mailbox = LoopMailbox()
    mailbox.put_outputs(numbered(1))

    async def read() -> None:
        await mailbox.take()

    asyncio.run(read())
    mailbox.put_outputs(numbered(2))
    mailbox.put_end(EngineDeadError("late"))
