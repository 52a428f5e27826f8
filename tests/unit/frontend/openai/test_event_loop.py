"""Promise P15: whatever a body holds, nothing runs on the event loop for more than 50 ms at a stretch.

Measured is what each callback takes of the loop thread's own processor time, so that other programs on the machine do
not count; the best of a few tries, so that a cold cache does not. Processors differ: where reading a plain text of that
size already takes long, the limit is a multiple of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.testing.large_bodies import LARGE_BODIES

from .serving import Server, check
from .test_field_fuzzer import post

LIMIT_S = 0.05
LIMIT_IN_TEXTS = 4
NUM_TRIES = 12


class LoopMonitor:
    """The longest stretch that a callback of this thread's loop has taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worst_s = 0.0
        run_callback = asyncio.events.Handle._run

        def run(handle: asyncio.Handle) -> None:
            start = time.thread_time()
            run_callback(handle)
            self.worst_s = max(self.worst_s, time.thread_time() - start)

        monkeypatch.setattr(asyncio.events.Handle, "_run", run)

    async def watch(self, work: Callable[[], Any]) -> float:
        """The longest one of what is done meanwhile."""
        await asyncio.sleep(0)
        self.worst_s = 0.0
        await asyncio.create_task(work())
        await asyncio.sleep(0)
        return self.worst_s


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer makes everything on the loop slower")
def test_no_body_holds_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Server) -> None:
        monitor, blocked, limit_s = LoopMonitor(monkeypatch), {}, LIMIT_S
        for name, make in LARGE_BODIES.items():
            path, value = make()
            body = json.dumps(value).encode()
            tries = []
            while (not tries or min(tries) > limit_s) and len(tries) < NUM_TRIES:
                tries.append(await monitor.watch(lambda path=path, body=body: post(server.app, path, body)))  # type: ignore[misc]
            if min(tries) > limit_s:
                blocked[name] = tries
            if name == "text":
                limit_s = max(limit_s, LIMIT_IN_TEXTS * min(tries))
        assert not blocked

    check(test, timeout_s=300)


def test_the_monitor_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hold_up() -> None:
        until = time.thread_time() + 2 * LIMIT_S
        while time.thread_time() < until:
            pass

    async def run() -> float:
        return await LoopMonitor(monkeypatch).watch(hold_up)

    assert asyncio.run(run()) > LIMIT_S
