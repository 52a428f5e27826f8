"""The time a fake step takes, and when its result arrives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from quire.wire.execution import ModelRunnerOutput


class Clock(Protocol):
    """Where the fake spends its time: the module `time`, or a `VirtualClock`."""

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""


class VirtualClock:
    """Time that passes only when someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float, /) -> None:
        """Move `now` on."""
        self.now += seconds


class InFlight(Future[Any]):
    """What a step yields on a device that is always still busy: not done until someone waits for it.

    `finish` is called then, before the output is handed out; it may raise.
    """

    def __init__(self, output: ModelRunnerOutput | None, finish: Callable[[InFlight], None] | None = None) -> None:
        super().__init__()
        self._output = output
        self._finish = finish

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the step."""
        if not self.done():
            if self._finish is not None:
                self._finish(self)
            self.set_result(self._output)
        return super().result(timeout)


def as_future(run: Callable[[], InFlight]) -> Future[Any]:
    """What `run` returns, or a Future of its error."""
    try:
        return run()
    except Exception as e:
        failed: Future[Any] = Future()
        failed.set_exception(e)
        return failed
