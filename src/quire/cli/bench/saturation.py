"""The highest rate a server sustains, found by trying: doubling until one fails, then halving what lies between."""

from __future__ import annotations

import math


class RateSearch:
    """Says which rate to try next. `sustained` and `failed` enclose what is looked for, within `tolerance` at the end.

    Knows nothing of servers. Whatever the verdicts are, it ends after `max_probes`.
    """

    def __init__(self, first_rate: float, tolerance: float = 0.1, max_probes: int = 16) -> None:
        assert first_rate > 0
        assert tolerance > 0
        self.sustained: float | None = None
        """The highest rate that was sustained."""
        self.failed: float | None = None
        """The lowest rate that was not."""
        self.num_probes = 0
        self._first_rate = first_rate
        self._tolerance = tolerance
        self._max_probes = max_probes

    def next_rate(self) -> float | None:
        """The rate to try; None at the end."""
        if self.num_probes >= self._max_probes:
            return None
        if self.sustained is None:
            return self._first_rate if self.failed is None else self.failed / 2
        if self.failed is None:
            return self.sustained * 2
        if self.failed <= self.sustained * (1 + self._tolerance):
            return None
        return math.sqrt(self.sustained * self.failed)

    def record(self, rate: float, *, is_sustained: bool) -> None:
        """The verdict on `next_rate()`."""
        self.num_probes += 1
        if is_sustained:
            self.sustained = rate
        else:
            self.failed = rate
