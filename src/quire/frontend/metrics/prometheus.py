"""Statistics as Prometheus reads them: the rows of `catalog.METRICS` in a registry of one server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from quire.frontend.metrics.catalog import METRICS, MODEL_LABELS, PREFIX, MetricSpec
from quire.frontend.metrics.manager import StatLogger
from quire.frontend.metrics.stats import IterationStats
from quire.wire.stats import SchedulerStats

Metric = Counter | Gauge | Histogram
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusStatLogger(StatLogger):
    """Owns the registry. `model_name` and the engine's index label every sample."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._metrics = [(spec, _make(spec, self._registry)) for spec in METRICS]
        for spec, metric in self._metrics:
            if not spec.labels:
                metric.labels(model_name, "0")  # the series exists from the start

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """Set, add and observe what one step brought."""
        base = (self._model_name, str(engine_index))
        for spec, metric in self._metrics:
            if spec.of_scheduler is not None and scheduler_stats is not None:
                samples = spec.of_scheduler(scheduler_stats)
            elif spec.of_iteration is not None and iteration_stats is not None:
                samples = spec.of_iteration(iteration_stats)
            else:
                continue
            for labels, value in samples:
                _take(metric.labels(*base, *labels), value)

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


def _make(spec: MetricSpec, registry: CollectorRegistry) -> Metric:
    name, labels = PREFIX + spec.name, (*MODEL_LABELS, *spec.labels)
    if spec.kind == "gauge":
        return Gauge(name, spec.help, labels, registry=registry)
    if spec.kind == "counter":
        return Counter(name, spec.help, labels, registry=registry)
    return Histogram(name, spec.help, labels, registry=registry, buckets=spec.buckets)


def _take(metric: Metric, value: float) -> None:
    match metric:
        case Gauge():
            metric.set(value)
        case Counter():
            metric.inc(value)
        case Histogram():
            metric.observe(value)
