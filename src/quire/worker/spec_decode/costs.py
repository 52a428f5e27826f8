"""The time of a step by its rows, and of drafting, as measured in this process."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
"""Numbers of rows that are measured apart; others count as the next larger one."""
NUM_KEPT = 9
"""Measurements of a bucket of which the median is taken."""


class Costs:
    """Seconds of a step that computes a number of rows, without prompts. They never fall with the rows.

    Between measured buckets it interpolates. Beyond the last one it goes on with the slope before it; if only one is
    known, the time is proportional to the rows, so that nothing unmeasured looks cheap.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._curve: list[tuple[int, float]] = []

    @property
    def is_known(self) -> bool:
        """True once a step was measured."""
        return bool(self._times)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learns the time of a step. Larger ones than the last bucket are ignored."""
        if 1 <= num_rows <= BUCKETS[-1]:
            bucket = BUCKETS[bisect_left(BUCKETS, num_rows)]
            times = self._times.setdefault(bucket, deque(maxlen=NUM_KEPT))
            times.append(seconds)
            median_now = median(times)
            if self._medians.get(bucket) != median_now:
                self._medians[bucket] = median_now
                self._curve = []

    def seconds(self, num_rows: int) -> float:
        """Returns the expected time of a step; a step must have been measured."""
        curve = self._curve = self._curve or self._fit()
        at = bisect_left(curve, (num_rows, 0.0))
        if at == 0:
            return curve[0][1]
        if at == len(curve):
            if at == 1:
                return curve[0][1] * num_rows / curve[0][0]
            at -= 1
        (low, before), (high, after) = curve[at - 1], curve[at]
        return before + (after - before) * (num_rows - low) / (high - low)

    def _fit(self) -> list[tuple[int, float]]:
        """Returns the medians of the buckets, neighbours that fall replaced by their mean (isotonic regression)."""
        pools: list[tuple[float, int, list[int]]] = []  # mean, weight, buckets
        for bucket in sorted(self._times):
            mean, weight, buckets = self._medians[bucket], len(self._times[bucket]), [bucket]
            while pools and pools[-1][0] >= mean:
                other, other_weight, others = pools.pop()
                mean = (mean * weight + other * other_weight) / (weight + other_weight)
                weight, buckets = weight + other_weight, others + buckets
            pools.append((mean, weight, buckets))
        return [(bucket, mean) for mean, _, buckets in pools for bucket in buckets]


class RunningMedian:
    """Median of the last measurements; 0 before the first."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=NUM_KEPT)

    def observe(self, value: float) -> None:
        """Adds a measurement."""
        self._values.append(value)

    @property
    def value(self) -> float:
        """The median."""
        return median(self._values) if self._values else 0.0
