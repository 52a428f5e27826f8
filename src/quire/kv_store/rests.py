"""Sources and addresses that are left alone for a while, because they could not be used. Pure: no clock."""

from __future__ import annotations

REST_S, MAX_REST_S = 5.0, 60.0
"""First rest; each that follows without a success between them is twice as long, up to the most."""
MAX_NAMES = 1024
"""Most names that are remembered: addresses come from requests, too."""


class Rests:
    """The names with a fault since their last success. Not thread-safe. Times are those of one clock."""

    def __init__(self) -> None:
        self._faults: dict[str, tuple[float, float]] = {}
        """Length of the last rest, and its end, by name."""

    def note_fault(self, name: str, now: float) -> float:
        """Begins a rest. Returns its length. A fault in a rest, of something that had begun before, changes nothing."""
        seconds, end = self._faults.get(name, (0.0, now))
        if now < end:
            return seconds
        if name not in self._faults and len(self._faults) >= MAX_NAMES:
            del self._faults[next(iter(self._faults))]
        seconds = min(2 * seconds, MAX_REST_S) if seconds else REST_S
        self._faults[name] = seconds, now + seconds
        return seconds

    def begin(self, name: str, seconds: float, now: float) -> None:
        """Begins a rest of so many seconds, which is no fault's."""
        self._faults[name] = seconds, now + seconds

    def note_good(self, name: str, *, ends_rest: bool = True) -> None:
        """Notes a success: the next rest is a short one, and one that has begun ends, unless `ends_rest` is False."""
        if ends_rest:
            self._faults.pop(name, None)
        elif name in self._faults:
            self._faults[name] = 0.0, self._faults[name][1]

    def is_resting(self, name: str, now: float) -> bool:
        """Returns whether a source or an address is left alone."""
        return self.seconds_left(name, now) > 0

    def seconds_left(self, name: str, now: float) -> float:
        """Returns the seconds until the end of a rest; 0: there is none."""
        return max(0.0, self._faults.get(name, (0.0, now))[1] - now)
