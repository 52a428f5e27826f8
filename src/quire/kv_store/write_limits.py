"""Limits what is written to a store: by a rate, by what was written lately, and by a rest after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.kv_store.access import REST_S

MAX_WRITE_BYTES_PER_S = 200_000_000
SAVED_S = 5.0
"""Time for which a block is taken as written before a scan has found it."""


class WriteBudget:
    """A rate of bytes with a burst of one second."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._left, self._ts = float(bytes_per_s), clock()

    def take(self, num_bytes: int) -> bool:
        """Takes `num_bytes` if there are any left; a debt is paid before the next."""
        if self.seconds_left() > 0:
            return False
        self._left -= num_bytes
        return True

    def seconds_left(self) -> float:
        """Returns the seconds until some bytes are left; 0: there are now."""
        if self._left > 0:
            return 0.0
        now = self._clock()
        self._left = min(float(self._rate), self._left + (now - self._ts) * self._rate)
        self._ts = now
        return 0.0 if self._left > 0 else max(1e-3, -self._left / self._rate)


class WriteLimits:
    """Limits what an engine orders to be written."""

    def __init__(self, bytes_per_s: int) -> None:
        self._budget = WriteBudget(bytes_per_s)
        self._ordered: dict[tuple[int, bytes], float] = {}
        """Blocks (group, digest) that were ordered lately, and when."""
        self._forget_ts = float("-inf")
        """Time at which those of `_ordered` that were ordered long ago are forgotten."""
        self._rest_ts = float("-inf")

    def seconds_left(self) -> float:
        """Returns the seconds until anything may be written; 0: it may now."""
        return max(0.0, self._rest_ts - time.monotonic(), self._budget.seconds_left())

    def rest(self) -> None:
        """Orders nothing for a while: writing has failed."""
        self._rest_ts = time.monotonic() + REST_S / 10

    def take(self, name: tuple[int, bytes], num_bytes: int, is_there: Callable[[], bool]) -> bool:
        """Returns whether a block is to be written, which counts as ordered then. `is_there`: the store has it."""
        now = time.monotonic()
        if now < self._rest_ts:
            return False
        if now >= self._forget_ts:  # seldom: it takes long to find the first entry of a dict that has lost many
            self._forget_ts = now + 1.0
            self._ordered = {name: ts for name, ts in self._ordered.items() if ts >= now - SAVED_S}
        if name in self._ordered or is_there() or not self._budget.take(num_bytes):
            return False
        self._ordered[name] = now
        return True

    def forget(self, name: tuple[int, bytes]) -> None:
        """Lets a block be ordered again."""
        self._ordered.pop(name, None)

    def forget_all(self) -> None:
        """Lets all blocks be ordered again."""
        self._ordered.clear()
