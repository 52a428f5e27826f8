"""An event loop whose time passes only when nothing else can happen: timers of hours, tests of milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualSelector(selectors.DefaultSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for no file. What would be a wait moves the time on."""
        ready = super().select(0)
        if timeout is None and not ready:
            raise AssertionError("every coroutine waits for something that will not happen")
        if not ready:
            self.now += max(timeout or 0.0, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """No threads, please: a loop that waits for one would not wait."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtually(main: Coroutine[Any, Any, T], *, debug: bool = True) -> T:
    """`asyncio.run` on a VirtualLoop."""
    with asyncio.Runner(debug=debug, loop_factory=VirtualLoop) as runner:
        return runner.run(main)
