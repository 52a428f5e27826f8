"""Who asks a server to end, and how often."""

from __future__ import annotations

import asyncio
import os
import signal

from quire.frontend.openai.server import StopSignals


def test_the_second_signal_is_a_hurry_and_a_call_is_none() -> None:
    """A parent's call and a signal to the whole group are one wish, whichever comes first."""

    async def run() -> None:
        with StopSignals() as stop:
            stop.ask()
            stop.ask()
            heard = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
            for number in (signal.SIGTERM, signal.SIGUSR1):  # handlers are called in the order of the signals
                os.kill(os.getpid(), number)
            await asyncio.wait_for(heard.wait(), 60)
            assert stop.asked.is_set()
            assert not stop.hurried.is_set()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(stop.hurried.wait(), 60)
            asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    asyncio.run(run())


def test_a_hurry_is_a_wish_to_end() -> None:
    stop = StopSignals()
    stop.hurry()
    assert stop.asked.is_set()
    assert stop.hurried.is_set()
