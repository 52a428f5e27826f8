"""The speed of the fake models `executors.Leisurely` and `Patient`, and durations on a machine that others use, too.

A stream that a test does something to must last until that is done, however long the test had to wait for a processor:
it is a thousand steps of 20 ms and more, and when all is done the rest of it takes no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACE_FILE = "PACE_FILE"
"""The variable that names the file."""
LEISURELY_STEP_S = 0.02
LIMIT_S = 120.0


class Pace:
    """A file: while it exists, steps take no time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.environment = {PACE_FILE: str(path)}
        """Environment of the process with the model."""

    def hurry(self) -> None:
        """No step from now on takes any time."""
        self._path.touch()

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """No step inside takes any time."""
        self.hurry()
        try:
            yield
        finally:
            self._path.unlink()


def processor_seconds_until(condition: Callable[[], bool]) -> float:
    """Returns a duration in processor time of this thread, which does nothing but look.

    On a machine with nothing else to do that is the time that passed; where many wait for a processor, the process that
    is waited for gets no larger share of it than this thread.
    """
    end = time.monotonic() + LIMIT_S
    start = time.thread_time()
    while not condition():
        assert time.monotonic() < end, "it does not happen"
    return time.thread_time() - start
