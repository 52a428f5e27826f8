"""Control operations of one frontend: how long each took, which are under way, and how deep the engine sleeps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SLEEP_OPERATIONS = ("sleep", "release_kv_cache_memory", "wake")
WEIGHT_OPERATIONS = ("init", "shutdown", "start", "start_draft", "update", "finish")
"""vLLM's; of these Quire has `update`."""


@dataclass(frozen=True, slots=True)
class ControlOperation:
    """One that has ended, well or not."""

    operation: str
    """One of SLEEP_OPERATIONS or WEIGHT_OPERATIONS."""
    duration_s: float


class ControlOperations:
    """Times what is done inside `timed`, and tells `on_end`."""

    def __init__(self, on_end: Callable[[ControlOperation], None]) -> None:
        self._on_end = on_end
        self.in_flight: Counter[str] = Counter()
        self.sleep_level = 0
        """0: awake."""
        self.sleep_time = 0.0
        """Wall clock of when that was last set; 0 for never."""

    def set_sleep_level(self, level: int) -> None:
        """The engine sleeps that deep from now on."""
        self.sleep_level, self.sleep_time = level, time.time()

    @contextmanager
    def timed(self, operation: str) -> Iterator[ControlOperations]:
        """Around the operation."""
        start = time.monotonic()
        self.in_flight[operation] += 1
        try:
            yield self
        finally:
            self.in_flight[operation] -= 1
            self._on_end(ControlOperation(operation, time.monotonic() - start))
