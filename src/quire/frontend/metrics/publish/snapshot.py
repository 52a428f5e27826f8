"""All metrics of one process at one moment, as plain data: what is written for Prometheus, read by `get_metrics`, sent
to another process and merged there.

A snapshot is made in one go by the thread that counts, so the laws between its numbers hold (promise P12).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.frontend.metrics.catalog.spec import Kind


class Exemplar(msgspec.Struct, array_like=True, gc=False):
    """The latest observation of one bucket, and whose it was."""

    value: float
    timestamp: float
    labels: dict[str, str]


class Series(msgspec.Struct, array_like=True, gc=False):
    """One set of label values: a number, or what was observed."""

    labels: tuple[str, ...]
    value: float = 0.0
    """Of a counter or a gauge; the sum of what was observed."""
    counts: list[int] = []
    """Of a histogram: per bucket, not cumulative, the last one without bound. Of a summary: one number."""
    stamp: float = 0.0
    """Of a gauge: when it was true, by the wall clock."""
    exemplars: dict[int, Exemplar] = {}
    """By bucket."""

    @property
    def count(self) -> int:
        """How often something was observed."""
        return sum(self.counts)


class Family(msgspec.Struct, array_like=True, gc=False):
    """One metric: its series and what they mean."""

    name: str
    """As in queries, without the `_total` of a counter."""
    kind: Kind
    help: str
    label_names: tuple[str, ...]
    bounds: tuple[float, ...] = ()
    series: list[Series] = []


class MetricsSnapshot(msgspec.Struct, array_like=True, gc=False):
    """The families in the order of the catalog."""

    families: list[Family]

    def find(self, name: str) -> Family:
        """The family called `name`. Raises KeyError."""
        for family in self.families:
            if family.name == name:
                return family
        raise KeyError(name)

    def value(self, name: str, *labels: str) -> float:
        """The value (or sum) of one metric, added up over its series, or of those whose labels include `labels`."""
        wanted = set(labels)
        return sum(series.value for series in self.find(name).series if wanted <= set(series.labels))

    def count(self, name: str) -> int:
        """How often a histogram was observed, in all its series."""
        return sum(series.count for series in self.find(name).series)


def merge_snapshots(snapshots: Iterable[MetricsSnapshot]) -> MetricsSnapshot:
    """Several processes in front of the same engines as one. Counters and observations add up; a gauge speaks of the
    engine, and who heard of it last is right.

    Commutative and associative. Raises ValueError where two processes do not mean the same by a name.
    """
    families: dict[str, Family] = {}
    for snapshot in snapshots:
        for family in snapshot.families:
            known = families.get(family.name)
            if known is None:
                families[family.name] = msgspec.structs.replace(family, series=[_copy(s) for s in family.series])
            else:
                _merge_family(known, family)
    return MetricsSnapshot(list(families.values()))


def _copy(series: Series) -> Series:
    return msgspec.structs.replace(series, counts=list(series.counts), exemplars=dict(series.exemplars))


def _merge_family(into: Family, other: Family) -> None:
    if (into.kind, into.label_names, into.bounds) != (other.kind, other.label_names, other.bounds):
        raise ValueError(f"two processes mean different things by the metric {into.name}; they must run one version")
    known = {series.labels: series for series in into.series}
    for series in other.series:
        mine = known.get(series.labels)
        if mine is None:
            into.series.append(_copy(series))
        elif into.kind == "gauge":
            mine.stamp, mine.value = max((mine.stamp, mine.value), (series.stamp, series.value))
        else:
            mine.value += series.value
            mine.stamp = max(mine.stamp, series.stamp)
            mine.counts = [a + b for a, b in zip(mine.counts, series.counts, strict=True)]
            for bucket, exemplar in series.exemplars.items():
                if bucket not in mine.exemplars or mine.exemplars[bucket].timestamp < exemplar.timestamp:
                    mine.exemplars[bucket] = exemplar
