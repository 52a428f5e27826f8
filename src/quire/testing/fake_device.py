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


class InFlight(Future[ModelRunnerOutput]):
    """The output of a step on a device that is always still busy: not done until someone waits for it."""

    def __init__(self, output: ModelRunnerOutput, finish: Callable[[InFlight], None]) -> None:
        super().__init__()
        self._output = output
        self._finish = finish

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the step. Steps must be waited for in the order they were started."""
        if not self.done():
            self._finish(self)
            self.set_result(self._output)
        return super().result(timeout)


def as_future(run: Callable[[], InFlight | None]) -> Future[Any]:
    """What `run` returns, or a Future of its None or of its error."""
    future: Future[Any] = Future()
    try:
        result = run()
    except Exception as e:
        future.set_exception(e)
        return future
    if result is not None:
        return result
    future.set_result(None)
    return future
