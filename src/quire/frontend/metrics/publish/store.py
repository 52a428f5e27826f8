"""Counts the events of one frontend, for each row of the catalog. A snapshot is a copy of the counts."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from quire.frontend.metrics.catalog.spec import Condition, InfoSpec, MetricSpec, Sample
from quire.frontend.metrics.collect.facts import FrontendFacts
from quire.frontend.metrics.publish.snapshot import Exemplar, Family, MetricsSnapshot, Series, copy_family

MAX_SERIES = 1000
"""Limit of series per metric. Labels come from tables, so it is never reached; beyond it new series are left out."""


class MetricsStore:
    """Counts of one frontend, by row. Belongs to one thread.

    `base` gives the value of each base label but `engine`; the series of `engines` exist from the start. Rows with a
    condition in `hidden` are left out until something is counted. `clock` is the wall clock.
    """

    def __init__(
        self,
        specs: Iterable[MetricSpec],
        base: Mapping[str, str],
        bounds: Mapping[str, tuple[float, ...]],
        *,
        engines: Sequence[int] = (0,),
        clock: Callable[[], float] = time.time,
        hidden: frozenset[Condition] = frozenset(),
    ) -> None:
        self._clock = clock
        self.rows: list[CountedRow] = [
            _ROWS[_row_kind(spec)](spec, base, bounds.get(spec.family, ()), () if spec.condition in hidden else engines)
            for spec in specs
        ]
        self._by_source: dict[type, list[CountedRow]] = {}
        for row in self.rows:
            if not row.spec.is_zero:
                self._by_source.setdefault(row.spec.source, []).append(row)
        self._infos: dict[str, Family] = {}

    def add_info(self, spec: InfoSpec, labels: Mapping[str, str]) -> None:
        """Adds constant facts as labels; once for each of several engines."""
        new = Family(spec.full_name, "gauge", spec.help, tuple(labels), series=[])
        self._infos.setdefault(spec.full_name, new).series.append(Series(tuple(labels.values()), 1.0))

    def record_all(self, events: Sequence[object], engine_index: int = 0, time: float | None = None) -> None:
        """Counts events of one type, which happened at `time` if not now."""
        if events:
            time = self._clock() if time is None else time
            for row in self._by_source.get(type(events[0]), ()):
                row.record_all(events, engine_index, time)

    def snapshot(self) -> MetricsSnapshot:
        """Returns a copy of all counts."""
        return MetricsSnapshot([copy_family(family) for family in self.families()])

    def families(self) -> list[Family]:
        """Returns the counts without copying, to be read before anything else is counted."""
        return [family for row in self.rows if (family := row.family()) is not None] + self.infos

    @property
    def infos(self) -> list[Family]:
        """Families of constant facts."""
        return list(self._infos.values())


class CountedRow(ABC):
    """Series of one row."""

    def __init__(
        self, spec: MetricSpec, base: Mapping[str, str], bounds: tuple[float, ...], engines: Sequence[int]
    ) -> None:
        self.spec = spec
        self._bounds = bounds if any(bound % 1 for bound in bounds) else tuple(map(int, bounds))
        """Bounds that are whole numbers, as int: observations compare faster."""
        self._engines = engines if "engine" in spec.base_labels or not engines else (0,)
        self._is_hidden = not engines
        self._is_per_engine = "engine" in spec.base_labels
        self._base: dict[int, tuple[str, ...]] = {
            engine: tuple(str(engine) if name == "engine" else base[name] for name in spec.base_labels)
            for engine in {*engines, 0}
        }
        self.changes = 0
        """Grows whenever `family` may have changed."""
        self._known = set(spec.known) if spec.labels else {()}
        self._series: dict[tuple[int, tuple[str, ...]], Series] = {}
        self._family = Family(
            spec.full_name,
            spec.kind,
            spec.help,
            spec.base_labels + spec.labels,
            bounds if spec.kind == "histogram" else (),
        )
        for engine in self._engines:
            for labels in spec.known or (((),) if not spec.labels else ()):
                self.find(engine, labels)

    def find(self, engine_index: int, labels: tuple[str, ...]) -> Series:
        """Returns the series of one engine and these values of the row's own labels; makes it if there is none."""
        engine_index = engine_index if self._is_per_engine else 0
        series = self._series.get((engine_index, labels))
        if series is None:
            base = self._base.get(engine_index)
            if base is None:
                position = self.spec.base_labels.index("engine")
                base = (*self._base[0][:position], str(engine_index), *self._base[0][position + 1 :])
                self._base[engine_index] = base
            series = Series((*base, *labels), counts=[0] * self._num_buckets)
            if len(self._series) < MAX_SERIES:
                self._series[engine_index, labels] = series
        return series

    @property
    def _num_buckets(self) -> int:
        return {"histogram": len(self._bounds) + 1, "summary": 1}.get(self.spec.kind, 0)

    @abstractmethod
    def record_all(self, events: Sequence[object], engine_index: int, time: float) -> None:
        """Counts one or more events of the row's source; the last one happened at `time`."""

    def family(self) -> Family | None:
        """Returns the family without copying; None if the row is hidden and empty."""
        found = self._get_series()
        if self._is_hidden and not found:
            return None
        self._family.series = list(found)
        return self._family

    def _get_series(self) -> Collection[Series]:
        return self._series.values()

    def _read(self, event: object) -> Iterable[Sample]:
        spec = self.spec
        if spec.samples is not None:
            return spec.samples(event)
        if spec.value is not None:
            value = spec.value(event)
            return [] if value is None else [((), value)]
        assert spec.values is not None  # counted values are a histogram's
        return [((), value) for value in spec.values(event)]


class _CounterRow(CountedRow):
    """Adds the number of each event."""

    def record_all(self, events: Sequence[object], engine_index: int, time: float) -> None:
        read, read_labelled = self.spec.value, self.spec.samples or self._read
        if read is None:
            counts: dict[tuple[str, ...], float] = {}
            for event in events:
                for labels, value in read_labelled(event):
                    counts[labels] = counts.get(labels, 0) + value
        else:
            value = sum([read(event) or 0 for event in events])
            counts = {(): value} if value else {}
        for labels, value in counts.items():
            self.changes += 1
            self.find(engine_index, labels).value += value


class _FactRow(CountedRow):
    """Takes the numbers of the last event: a gauge, or a counter that is counted elsewhere."""

    _samples: list[tuple[int, list[Sample]]] | None = None

    def record_all(self, events: Sequence[object], engine_index: int, time: float) -> None:
        found = list(self._read(events[-1]))
        samples = [(engine, found) for engine in self._engines or (0,)]
        if samples == self._samples:
            return
        self._samples = samples
        self.changes += 1
        self._series = {key: series for key, series in self._series.items() if key[1] in self._known}
        for series in self._series.values():  # what the event does not name is not there
            series.value = 0.0
        for engine, values in samples:
            for labels, value in values:
                self.find(engine, labels).value = value


class _GaugeRow(CountedRow):
    """Takes the numbers of the last event, read when a snapshot is made: most events are never read.

    Series that do not exist from the start last as long as events name them.
    """

    @cached_property
    def _last(self) -> dict[int, tuple[object, float]]:
        """Last event and its time, by engine."""
        return {}

    def record_all(self, events: Sequence[object], engine_index: int, time: float) -> None:
        self.changes += 1
        self._last[engine_index] = events[-1], time

    def _get_series(self) -> Collection[Series]:
        if len(self._series) > len(self._engines) * len(self._known):
            self._series = {key: series for key, series in self._series.items() if key[1] in self._known}
        for engine_index, (event, stamp) in self._last.items():
            for labels, value in self._read(event):
                series = self.find(engine_index, labels)
                series.value, series.stamp = value, stamp
        return self._series.values()


class _HistogramRow(CountedRow):
    """Observes the values of each event, and keeps the owner of the latest observation of each bucket."""

    def record_all(self, events: Sequence[object], engine_index: int, time: float) -> None:
        spec = self.spec
        if spec.value is not None:
            if not self._is_hidden or any(spec.value(event) is not None for event in events):
                self._observe_each(events, spec.value, self.find(engine_index, ()), time)
        elif spec.counted is not None:
            for event in events:
                self._observe(self.find(engine_index, ()), spec.counted(event))
        elif spec.values is not None:
            for event in events:
                if values := spec.values(event):
                    self._observe(self.find(engine_index, ()), Counter(values))
        else:
            for event in events:
                for labels, value in self._read(event):
                    self._observe(self.find(engine_index, labels), {value: 1})

    def _observe(self, series: Series, values: Mapping[float, int]) -> None:
        for value, number in values.items():
            self.changes += 1
            series.counts[bisect_left(self._bounds, value)] += number
            series.value += value * number

    def _observe_each(self, events: Sequence[Any], read: Callable[[Any], Any], series: Series, time: float) -> None:
        """Observes events with one value each. A hundred requests may end in one step, most with similar values."""
        bounds, counts, has_owners = self._bounds, series.counts, self.spec.has_owners
        latest: dict[int, Any] = {}
        total, changed = 0.0, False
        bucket, above, up_to = 0, math.inf, -math.inf
        for event in events:
            value = read(event)
            if value is not None:
                if not above < value <= up_to:  # not the bucket of the event before
                    bucket = bisect_left(bounds, value)
                    above = bounds[bucket - 1] if bucket else -math.inf
                    up_to = bounds[bucket] if bucket < len(bounds) else math.inf
                counts[bucket] += 1
                total += value
                changed = True
                if has_owners and event.owner is not None:
                    latest[bucket] = event
        series.value += total
        self.changes += changed
        for bucket, event in latest.items():
            series.exemplars[bucket] = Exemplar(read(event), time, event.owner.labels)


_ROWS: dict[str, type[CountedRow]] = {
    "counter": _CounterRow,
    "fact": _FactRow,
    "gauge": _GaugeRow,
    "histogram": _HistogramRow,
    "summary": _HistogramRow,
}


def _row_kind(spec: MetricSpec) -> str:
    return "fact" if spec.source is FrontendFacts else spec.kind
