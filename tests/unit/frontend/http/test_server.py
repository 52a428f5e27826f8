"""Requests to end a server, by signal and otherwise, and its start."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.server import ServerConfig
from quire.frontend.http import server
from quire.frontend.http.server import Listeners, StopSignals
from quire.frontend.metrics.publish.stat_loggers import StatLoggerManager
from quire.timeline import hold_garbage


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


def build_nothing(*_: object, **flags: bool) -> Any:
    """The application of a server that serves nothing."""


class Uvicorn:
    """A server that only runs."""

    started = True
    should_exit = False

    async def serve(self, sockets: object) -> None:
        while not self.should_exit:
            await asyncio.sleep(0)


def test_collections_do_not_walk_what_start_up_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment the server is ready, and no longer than it serves."""
    frozen: list[int] = []

    async def drain(*args: object) -> None:
        """Nothing is under way."""

    async def run() -> None:
        stop = StopSignals()

        def note_ready() -> None:
            frozen.append(gc.get_freeze_count())
            assert gc.isenabled(), "it was off for the start only"
            stop.ask()

        engine = SimpleNamespace(pipeline=SimpleNamespace(stat_loggers=StatLoggerManager()))
        state: Any = SimpleNamespace(config=ServerConfig(), engine=engine)
        await server.serve(state, build_nothing, listeners, shutdown_timeout_s=0.0, on_ready=note_ready, stop=stop)

    monkeypatch.setattr(server, "_route_log", lambda config: None)
    monkeypatch.setattr(server, "_make_server", lambda *args, **flags: Uvicorn())
    monkeypatch.setattr(server, "drain", drain)
    listeners = Listeners.bind(ServerConfig(host="127.0.0.1", port=0))
    before = gc.get_freeze_count()
    hold_garbage()
    asyncio.run(run())
    listeners.close()
    assert frozen[0] > before + 1000
    assert gc.get_freeze_count() == 0
