"""The metrics of a server process: its own, or those of all processes of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from quire.errors import NotFoundError, ServerError
from quire.frontend.metrics.catalog.spec import Kind
from quire.frontend.metrics.frontend_stats import FrontendStats
from quire.frontend.metrics.publish.exposition import Exposition, Format
from quire.frontend.metrics.publish.prometheus import HAS_FAILED, PrometheusStatLogger
from quire.frontend.metrics.publish.snapshot import Family, MetricsSnapshot, ProcessReport, Series

END_MARK = "# EOF\n"
_KINDS: dict[str, Kind] = {"counter": "counter"}


class ProcessMetrics:
    """Memory, CPU time, open files and garbage collections of this process, called `name` if there are several.

    prometheus_client stays a dependency for these 25 lines: names, units and the differences between systems are its
    work, it is pure Python without dependencies of its own, and reading /proc and the garbage collector here would take
    more lines.
    """

    def __init__(self, name: str = "") -> None:
        self._labels = {"process": name} if name else {}
        self._exposition = Exposition()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def exposition(self, format: Format = "text") -> str:
        """Returns all of it as text, with the end mark of OpenMetrics in that format."""
        return self._exposition.write(self.snapshot().families, format) + (END_MARK if format == "openmetrics" else "")

    def snapshot(self) -> MetricsSnapshot:
        """Returns all of it, with the label `process` if it has a name. Several processes answer behind one port;
        without the label their numbers would seem to go back."""
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


class ServerMetrics:
    """Reads `stats` and the operating system. Belongs to the thread of `stats`. `process` labels this process among
    several."""

    def __init__(self, stats: FrontendStats, process: str = "") -> None:
        self._stats = stats
        self._process_metrics = ProcessMetrics(process)
        self.gather: Callable[[], Awaitable[ProcessReport]] | None = None
        """Returns the merged report of all processes of the server; None where there is one process."""

    def take(self) -> ProcessReport:
        """Returns the report of this process, to be merged with others. Raises as `write`."""
        return self._get_exporter().report(self._process_metrics.snapshot())

    async def write(self, format: Format = "text") -> str:
        """Returns all metrics as text. Raises NotFoundError where statistics are off, ServerError if they cannot be
        read."""
        exporter = self._get_exporter()
        if self.gather is None:
            return exporter.exposition(format) + self._process_metrics.exposition(format)
        report = await self.gather()
        return exporter.write(report, format) + (END_MARK if format == "openmetrics" else "")

    def _get_exporter(self) -> PrometheusStatLogger:
        if self._stats.metrics is None:
            raise NotFoundError("there are no metrics: the server was started with --disable-log-stats")
        if self._stats.exporter_failed:
            raise ServerError(HAS_FAILED)
        return self._stats.metrics
