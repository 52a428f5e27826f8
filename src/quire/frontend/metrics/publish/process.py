"""Metrics of the server's process and of its Python, as prometheus_client makes them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from quire.frontend.metrics.catalog.spec import Kind
from quire.frontend.metrics.publish.exposition import Exposition, Format
from quire.frontend.metrics.publish.snapshot import Family, MetricsSnapshot, Series

END_MARK = "# EOF\n"
_KINDS: dict[str, Kind] = {"counter": "counter"}


class ProcessMetrics:
    """Memory, time, open files, garbage collections of this process, called `name` where there are several."""

    def __init__(self, name: str = "") -> None:
        self._labels = {"process": name} if name else {}
        self._exposition = Exposition()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def exposition(self, format: Format = "text") -> str:
        """All of it as text; with OpenMetrics' end mark, where that is the format."""
        return self._exposition.write(self.snapshot().families, format) + (END_MARK if format == "openmetrics" else "")

    def snapshot(self) -> MetricsSnapshot:
        """All of it, with the label `process` if it has a name: of several processes behind one port each has its own,
        and none seems to go back when another answers."""
        families, own = [], tuple(self._labels.values())
        for found in self._registry.collect():
            names = tuple(found.samples[0].labels) if found.samples else ()
            series = [
                Series((*own, *(sample.labels[name] for name in names)), sample.value) for sample in found.samples
            ]
            kind = _KINDS.get(found.type, "gauge")
            label_names = (*self._labels, *names)
            families.append(Family(found.name, kind, found.documentation, label_names, series=series))
        return MetricsSnapshot(families)
