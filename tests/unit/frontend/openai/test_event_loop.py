"""Promise P15: whatever a body holds, nothing runs on the event loop for more than 50 ms at a stretch.

Measured is what each callback takes of the loop thread's own processor time, so that other programs on the machine do
not count; one good try of a few is enough, so that a cold cache does not. Processors differ, and one may be slow for a
while: where a bare JSON reader takes long for a plain text of that size at that moment, the limit is a multiple of it.
A text of escapes takes the same reader three to five times as long, by the processor, and one text cannot be read in
parts: where a body is one text, its own reading counts, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from benchmarks.bodies import LARGE_BODIES, TEXT

from .serving import Server, check
from .test_field_fuzzer import post

LIMIT_S = 0.05
LIMIT_IN_READINGS = 4
LIMIT_IN_OWN_READINGS = 1.5
QUOTES_OF_ONE_TEXT = 4
"""In a body of one field, which is a text."""
NUM_TRIES = 12
PLAIN_TEXT = json.dumps(TEXT).encode()


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


def time_reading(text: bytes) -> float:
    """Seconds of the processor that a bare JSON reader takes."""
    start = time.thread_time()
    msgspec.json.decode(text)
    return time.thread_time() - start


def time_limit(body: bytes) -> float:
    """Seconds that a callback may take of this processor, now, where this body is served."""
    own_s = time_reading(body) if body.count(b'"') == QUOTES_OF_ONE_TEXT else 0.0
    return max(LIMIT_S, LIMIT_IN_READINGS * time_reading(PLAIN_TEXT), LIMIT_IN_OWN_READINGS * own_s)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer makes everything on the loop slower")
def test_no_body_holds_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Server) -> None:
        monitor, blocked = LoopMonitor(monkeypatch), {}
        for name, make in LARGE_BODIES.items():
            path, value = make()
            body = json.dumps(value).encode()
            tries: list[tuple[float, float]] = []
            for _ in range(NUM_TRIES):
                limit_s = time_limit(body)
                taken_s = await monitor.watch(lambda path=path, body=body: post(server.app, path, body))  # type: ignore[misc]
                if taken_s <= limit_s:
                    break
                tries.append((taken_s, limit_s))
            else:
                blocked[name] = tries
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
