"""All metrics of one process at one moment, as plain data: written for Prometheus, returned by `LLM.get_metrics()`, or
sent to another process and merged there.

A snapshot is made in one go by the thread that counts, so the laws between its numbers hold (promise P12). Processes
exchange a `ProcessReport`, whose three parts are merged by different rules:

* `counted`: counters and histograms add up. A gauge there describes the engine core, so the latest value is right. The
  core sends its statistics to one process only (its client 0), so nothing of the core is counted twice.
* `facts`: `merge_facts` has a rule for each field. Rows are computed from the merged facts, once.
* `process`: memory, time and garbage collections, labelled with the process. They are never added, and end with it.

Merging is commutative and associative except for the rounding of sums of seconds. The laws of the ledger are equations
between sums, so they hold for a merged report whenever they hold for each part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.frontend.metrics.catalog.spec import VLLM, Kind
from quire.frontend.metrics.collect.facts import FrontendFacts, close_facts, merge_facts


class Exemplar(msgspec.Struct, array_like=True, gc=False):
    """The latest observation of one bucket."""

    value: float
    timestamp: float
    labels: dict[str, str]


class Series(msgspec.Struct, array_like=True, gc=False):
    """The number, or the observations, of one set of label values."""

    labels: tuple[str, ...]
    value: float = 0.0
    """Value of a counter or a gauge; sum of the observations otherwise."""
    counts: list[int] = []
    """Observations per bucket of a histogram, not cumulative, the last bucket without bound. One number for a summary.
    """
    stamp: float = 0.0
    """Wall-clock time at which a gauge was true."""
    exemplars: dict[int, Exemplar] = {}
    """Exemplars by bucket."""

    @property
    def count(self) -> int:
        """Returns the number of observations."""
        return sum(self.counts)


class Family(msgspec.Struct, array_like=True, gc=False):
    """One metric with its series."""

    name: str
    """Name as in queries, without the `_total` of a counter."""
    kind: Kind
    help: str
    label_names: tuple[str, ...]
    bounds: tuple[float, ...] = ()
    series: list[Series] = []


class MetricsSnapshot(msgspec.Struct, array_like=True, gc=False):
    """The families of all metrics, in the order of the catalog."""

    families: list[Family]

    def find(self, name: str) -> Family:
        """Returns the family called `name`. Raises KeyError."""
        for family in self.families:
            if family.name == name:
                return family
        raise KeyError(name)

    def has(self, name: str) -> bool:
        """Returns whether there is a family called `name`."""
        return any(family.name == name for family in self.families)

    def value(self, name: str, *labels: str) -> float:
        """Returns the value (or sum) of one metric, added over all series whose labels include `labels`."""
        wanted = set(labels)
        return sum(series.value for series in self.find(name).series if wanted <= set(series.labels))

    def count(self, name: str) -> int:
        """Returns the number of observations of a histogram in all its series."""
        return sum(series.count for series in self.find(name).series)


def merge_snapshots(snapshots: Iterable[MetricsSnapshot]) -> MetricsSnapshot:
    """Merges the snapshots of several processes in front of the same engines. Counters and observations are added; of a
    gauge, which describes the engine, the latest value is taken.

    Commutative and associative. Raises ValueError if two processes define a metric differently.
    """
    families: dict[str, Family] = {}
    for snapshot in snapshots:
        for family in snapshot.families:
            known = families.get(family.name)
            if known is None:
                families[family.name] = copy_family(family)
            else:
                _merge_family(known, family)
    return MetricsSnapshot(list(families.values()))


def copy_family(family: Family) -> Family:
    """Returns a copy that shares no series with `family`."""
    return msgspec.structs.replace(family, series=[_copy(series) for series in family.series])


def _copy(series: Series) -> Series:
    return Series(series.labels, series.value, series.counts.copy(), series.stamp, series.exemplars.copy())


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


class ProcessReport(msgspec.Struct, array_like=True, gc=False):
    """Report of one process. Made in one go by the thread that counts."""

    counted: MetricsSnapshot
    """The rows in which events are counted."""
    facts: FrontendFacts
    process: MetricsSnapshot
    """Families with the label `process`; in a merged report those of every live process."""

    def close(self, *, is_lost: bool) -> ProcessReport:
        """Returns what remains of it after its process has exited; `is_lost`: the process sent no final report."""
        return ProcessReport(self.counted, close_facts(self.facts, is_lost=is_lost), MetricsSnapshot([]))

    def note_late(self) -> ProcessReport:
        """Returns the same as the report of a process that does not answer now."""
        return msgspec.structs.replace(self, facts=msgspec.structs.replace(self.facts, num_processes={"late": 1}))


def merge_reports(reports: Sequence[ProcessReport]) -> ProcessReport:
    """Merges the reports of the processes of one server; at least one. Raises ValueError if their versions differ."""
    return ProcessReport(
        merge_snapshots(report.counted for report in reports),
        merge_facts([report.facts for report in reports]),
        merge_snapshots(report.process for report in reports),
    )


_POSITION = "position"
"""A counter with this label is returned as a `Vector`."""


@dataclass(frozen=True)
class Metric:
    """One series of one metric: its name as in queries (without the `_total` of a counter) and all its labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: float = 0


@dataclass(frozen=True)
class Vector(Metric):
    """A counter for each position."""

    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float = 0.0


@dataclass(frozen=True)
class Histogram(Metric):
    """Observations. `buckets` are cumulative, by upper bound as Prometheus writes it; "+Inf" has all."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def format_value(value: float) -> str:
    """Returns a number as Prometheus reads it: 1.0, 0.25, +Inf."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def read_metrics(snapshot: MetricsSnapshot, prefix: str = VLLM) -> list[Metric]:
    """Returns the metrics whose names begin with `prefix`, in the order of the catalog."""
    metrics: list[Metric] = []
    for family in snapshot.families:
        if not family.name.startswith(prefix):
            continue
        if family.kind == "counter" and family.label_names[-1:] == (_POSITION,):
            metrics += _read_vectors(family)
        else:
            metrics += [_read_series(family, series) for series in family.series]
    return metrics


def _read_vectors(family: Family) -> list[Metric]:
    values: dict[tuple[str, ...], list[float]] = {}
    for series in sorted(family.series, key=lambda s: int(s.labels[-1])):
        values.setdefault(series.labels[:-1], []).append(series.value)
    names = family.label_names[:-1]
    return [Vector(family.name, dict(zip(names, labels, strict=True)), found) for labels, found in values.items()]


def _read_series(family: Family, series: Series) -> Metric:
    labels = dict(zip(family.label_names, series.labels, strict=True))
    if family.kind == "counter":
        value = series.value
        return Counter(family.name, labels, int(value) if value.is_integer() else value)
    if family.kind == "gauge":
        return Gauge(family.name, labels, series.value)
    buckets, total = {}, 0
    for bound, count in zip((*family.bounds, float("inf")), series.counts, strict=True):
        total += count
        buckets[format_value(bound)] = total
    return Histogram(family.name, labels, total, series.value, buckets)
