"""Addresses that are left alone for a while, because they could not be used."""

from __future__ import annotations

import time

REST_S, MAX_REST_S = 5.0, 60.0
"""First rest of an address; each that follows without a success between them is twice as long, up to the most."""
MAX_ADDRESSES = 1024
"""Most addresses that are remembered: they come from requests, too."""


class Rests:
    """The addresses with a fault since their last success. Not thread-safe."""

    def __init__(self) -> None:
        self._faults: dict[str, tuple[float, float]] = {}
        """Length of the last rest, and its end (`time.monotonic`), by address."""

    def note_fault(self, address: str) -> float:
        """Begins a rest. Returns its length. A fault in a rest, of something that had begun before, changes nothing."""
        now = time.monotonic()
        seconds, end = self._faults.get(address, (0.0, 0.0))
        if now < end:
            return seconds
        if address not in self._faults and len(self._faults) >= MAX_ADDRESSES:
            del self._faults[next(iter(self._faults))]
        seconds = min(2 * seconds, MAX_REST_S) if seconds else REST_S
        self._faults[address] = seconds, now + seconds
        return seconds

    def begin(self, address: str, seconds: float) -> None:
        """Begins a rest of so many seconds, which is no fault's."""
        self._faults[address] = seconds, time.monotonic() + seconds

    def note_good(self, address: str) -> None:
        """Ends a rest: the next one is a short one."""
        self._faults.pop(address, None)

    def is_resting(self, address: str) -> bool:
        """Returns whether an address is left alone."""
        return self.seconds_left(address) > 0

    def seconds_left(self, address: str) -> float:
        """Returns the seconds until the end of a rest; 0: there is none."""
        return max(0.0, self._faults.get(address, (0.0, 0.0))[1] - time.monotonic())
