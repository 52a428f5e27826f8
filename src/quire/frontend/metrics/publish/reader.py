"""`LLM.get_metrics()`: a snapshot as values a program can use."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.frontend.metrics.catalog.spec import VLLM
from quire.frontend.metrics.publish.exposition import format_value
from quire.frontend.metrics.publish.snapshot import Family, MetricsSnapshot, Series

_POSITION = "position"
"""A counter with this label is a vector."""


@dataclass(frozen=True)
class Metric:
    """One series of one metric: the name as in queries (a counter's without `_total`) and all its labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """How much there was since the start."""

    value: float = 0


@dataclass(frozen=True)
class Vector(Metric):
    """A counter per position."""

    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Gauge(Metric):
    """How much there is."""

    value: float = 0.0


@dataclass(frozen=True)
class Histogram(Metric):
    """What was observed. `buckets` are cumulative, by upper bound as Prometheus writes it; "+Inf" has all."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def read_metrics(snapshot: MetricsSnapshot, prefix: str = VLLM) -> list[Metric]:
    """The metrics whose names begin with `prefix`, in the order of the catalog."""
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
