"""Metrics of the server's process and of its Python, as prometheus_client makes them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from quire.frontend.metrics.exposition import Format

END_MARK = "# EOF\n"


class ProcessMetrics:
    """Memory, time, open files, garbage collections of this process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def exposition(self, format: Format = "text") -> str:
        """All of it as text; with OpenMetrics' end mark, where that is the format."""
        write = generate_openmetrics if format == "openmetrics" else generate_latest
        return write(self._registry).decode()
