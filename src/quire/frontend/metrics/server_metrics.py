"""What `/metrics` of a server process says: of itself, or of all processes of the server where there are several."""

from __future__ import annotations

from quire.errors import NotFoundError, ServerError
from quire.frontend.metrics.frontend_stats import FrontendStats
from quire.frontend.metrics.publish.exposition import Format
from quire.frontend.metrics.publish.process import END_MARK, ProcessMetrics
from quire.frontend.metrics.publish.prometheus import HAS_FAILED, PrometheusStatLogger
from quire.frontend.metrics.publish.report import ProcessReport, ReportSource


class ServerMetrics:
    """Reads `stats`, and the operating system; belongs to the thread of `stats`. `process` is the label of this process
    among several."""

    def __init__(self, stats: FrontendStats, process: str = "") -> None:
        self._stats = stats
        self._process_metrics = ProcessMetrics(process)
        self.source: ReportSource | None = None
        """Who knows the reports of all processes; None where there is one process."""

    def take(self) -> ProcessReport:
        """This process alone, for a `ReportSource`. Raises as `write`."""
        return self._get_exporter().report(self._process_metrics.snapshot())

    async def write(self, format: Format = "text") -> str:
        """All of it. Raises NotFoundError where statistics are off, ServerError if they cannot be had."""
        exporter = self._get_exporter()
        if self.source is None:
            return exporter.exposition(format) + self._process_metrics.exposition(format)
        report = await self.source.gather()
        return exporter.write(report, format) + (END_MARK if format == "openmetrics" else "")

    def _get_exporter(self) -> PrometheusStatLogger:
        if self._stats.metrics is None:
            raise NotFoundError("there are no metrics: the server was started with --disable-log-stats")
        if self._stats.exporter_failed:
            raise ServerError(HAS_FAILED)
        return self._stats.metrics
