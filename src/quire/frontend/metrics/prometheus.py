"""Statistics as Prometheus reads them: the rows of the catalog, counted in this process and written when it asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.frontend.metrics.buckets import make_bounds
from quire.frontend.metrics.catalog import BUILD_INFO, CACHE_CONFIG_INFO, METRICS
from quire.frontend.metrics.exchange import HttpExchange
from quire.frontend.metrics.exposition import Exposition, Format, LiveExposition
from quire.frontend.metrics.facts import FrontendFacts
from quire.frontend.metrics.manager import StatLogger
from quire.frontend.metrics.operations import ControlOperation
from quire.frontend.metrics.report import ProcessReport
from quire.frontend.metrics.snapshot import MetricsSnapshot
from quire.frontend.metrics.spec import LAZY
from quire.frontend.metrics.stats import IterationStats
from quire.frontend.metrics.store import MetricsStore
from quire.version import __version__
from quire.wire.stats import SchedulerStats


@dataclass(frozen=True, kw_only=True)
class MetricsSetup:
    """What one server exports."""

    model_name: str
    max_model_len: int = 1 << 20
    conditions: frozenset[str] = frozenset()
    """Of the catalog's, those that hold: features that are on."""
    cache_config: Mapping[str, str] = field(default_factory=dict)
    """Labels of `vllm:cache_config_info`."""
    custom_buckets: Mapping[str, Any] | None = None
    engines: Sequence[int] = (0,)


class PrometheusStatLogger(StatLogger):
    """Counts everything in the catalog. Belongs to the thread that records; `snapshot` is to be called there, too.

    `get_facts` says what is true now; without it the metrics that are read from there stay at 0.
    """

    def __init__(
        self,
        setup: MetricsSetup,
        get_facts: Callable[[], FrontendFacts] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._get_facts = get_facts
        hidden = LAZY - setup.conditions
        specs = [spec for spec in METRICS if not spec.condition or spec.condition in setup.conditions | hidden]
        make_store = partial(
            MetricsStore,
            base={"model_name": setup.model_name},
            bounds=make_bounds(setup.max_model_len, setup.custom_buckets),
            engines=setup.engines,
            clock=clock,
            hidden=hidden,
        )
        self._store = make_store(spec for spec in specs if spec.source is not FrontendFacts)
        self._facts = make_store(spec for spec in specs if spec.source is FrontendFacts)
        """Counts nothing: it puts facts, of one process or of all, into the catalog's words."""
        self._order = {spec.full_name: position for position, spec in enumerate(specs)}
        if setup.cache_config:
            for engine in setup.engines:
                self._store.add_info(CACHE_CONFIG_INFO, {"engine": str(engine), **setup.cache_config})
        self._store.add_info(BUILD_INFO, {"version": __version__, "model_name": setup.model_name})
        self._exposition = Exposition()
        rows = sorted(self._store.rows + self._facts.rows, key=lambda row: self._order[row.spec.full_name])
        self._live = LiveExposition(rows)

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """Count what a step, or a batch of its outputs, brought."""
        store = self._store
        if scheduler_stats is not None:
            store.record(scheduler_stats, engine_index)
            store.record_all(scheduler_stats.kv_cache_eviction_events, engine_index)
            if scheduler_stats.spec_decoding_stats is not None:
                store.record(scheduler_stats.spec_decoding_stats, engine_index)
        if iteration_stats is not None:
            store.record(iteration_stats, engine_index)
            store.record_all(iteration_stats.first_tokens, engine_index)
            store.record_all(iteration_stats.finished_requests, engine_index)
            if iteration_stats.num_prompt_tokens:
                store.record(iteration_stats.prompt_tokens, engine_index)

    def record_operation(self, operation: ControlOperation) -> None:
        self._store.record(operation)

    def record_exchange(self, exchange: HttpExchange) -> None:
        """An HTTP request was answered."""
        self._store.record(exchange)

    def snapshot(self) -> MetricsSnapshot:
        """All metrics of this process at this moment."""
        return self._arrange(self._store.snapshot(), None if self._get_facts is None else self._get_facts())

    def exposition(self, format: Format = "text") -> str:
        """The same as text, without OpenMetrics' end mark."""
        if self._get_facts is not None:
            self._facts.record(self._get_facts())
        return self._live.write(format) + self._exposition.write(self._store.infos, format)

    def report(self, process: MetricsSnapshot) -> ProcessReport:
        """The same for others to merge with theirs; `process` is what `ProcessMetrics` say."""
        assert self._get_facts is not None  # FrontendStats gives them
        return ProcessReport(self._store.snapshot(), self._get_facts(), process)

    def write(self, report: ProcessReport, format: Format = "text") -> str:
        """A report, of this process or of several, as text without OpenMetrics' end mark."""
        families = self._arrange(report.counted, report.facts).families + report.process.families
        return self._exposition.write(families, format)

    def read(self, report: ProcessReport) -> MetricsSnapshot:
        """The metrics of the catalog in a report."""
        return self._arrange(report.counted, report.facts)

    def _arrange(self, counted: MetricsSnapshot, facts: FrontendFacts | None) -> MetricsSnapshot:
        """What was counted and what is true, in the order of the catalog."""
        if facts is not None:
            self._facts.record(facts)
        families = counted.families + self._facts.snapshot().families
        families.sort(key=lambda family: self._order.get(family.name, len(self._order)))
        return MetricsSnapshot(families)
