"""Prometheus' text format, and what can be made of two readings of it: rates and percentiles."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')

Buckets = list[tuple[float, float]]
"""(upper bound, how many were not above it), sorted."""


class Metrics:
    """One reading, summed over all labels but a histogram's bounds."""

    def __init__(self, text: str) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
        for line in text.splitlines():
            found = _LINE.match(line)
            if found is None or line.startswith("#"):
                continue
            name, labels, value = found[1], found[2] or "", _number(found[3])
            self._totals[name] += value
            if name.endswith("_bucket"):
                bound = dict(_LABEL.findall(labels)).get("le", "+Inf")
                self._buckets[name.removesuffix("_bucket")][_number(bound)] += value

    def total(self, name: str) -> float | None:
        """A gauge or a counter; None if there is none of this name."""
        return self._totals.get(name)

    def buckets(self, name: str) -> Buckets:
        """Of a histogram; empty if there is none of this name."""
        return sorted(self._buckets.get(name, {}).items())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def growth(before: Metrics, after: Metrics, name: str) -> float | None:
    """By how much a counter has grown; all of it where it has started anew, None if it is not there."""
    end = after.total(name)
    if end is None:
        return None
    start = before.total(name) or 0.0
    return end - start if end >= start else end


def quantile_between(before: Metrics, after: Metrics, name: str, share: float) -> float | None:
    """The value below which `share` of what a histogram took in between two readings lies, as its buckets tell."""
    earlier = dict(before.buckets(name))
    end = after.buckets(name)
    new = [(bound, count - earlier.get(bound, 0.0)) for bound, count in end]
    return quantile(end if any(count < 0 for _, count in new) else new, share)


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """The same of buckets; None if they are empty."""
    total = buckets[-1][1] if buckets else 0.0
    if not total > 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
        if bound != math.inf:
            low, below = bound, count
    return low
