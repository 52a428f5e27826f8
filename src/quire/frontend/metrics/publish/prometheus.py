"""The Prometheus exporter: the rows of the catalog, counted in this process and written at a scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.errors import ServerError
from quire.frontend.metrics.catalog.quire_rows import BUILD_INFO, CACHE_CONFIG_INFO, METRICS
from quire.frontend.metrics.catalog.spec import LAZY, make_bounds
from quire.frontend.metrics.collect.events import ControlOperation, HttpExchange, IterationStats
from quire.frontend.metrics.collect.facts import FrontendFacts
from quire.frontend.metrics.publish.exposition import Exposition, Format, LiveExposition
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot, ProcessReport
from quire.frontend.metrics.publish.stat_loggers import StatLogger, StepReport
from quire.frontend.metrics.publish.store import MetricsStore
from quire.logger import init_logger
from quire.version import __version__
from quire.wire.stats import SchedulerStats, SpecDecodingStats

logger = init_logger(__name__)

HAS_FAILED = "the metrics exporter has failed and counts nothing any more; the log says why"


@dataclass(frozen=True, kw_only=True)
class MetricsSetup:
    """Settings of the exporter of one server."""

    model_name: str
    max_model_len: int = 1 << 20
    conditions: frozenset[str] = frozenset()
    """Conditions of the catalog that hold: features that are on."""
    cache_configs: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Labels of `vllm:cache_config_info`, by engine."""
    custom_buckets: Mapping[str, Any] | None = None
    engines: Sequence[int] = (0,)
    num_spec_tokens: int = 0
    """Most drafts of a request in a step: the series of their positions exist from the start."""


class PrometheusStatLogger(StatLogger):
    """Counts every row of the catalog. Belongs to the thread that records, and so does `snapshot`.

    `get_facts` returns the present state; without it the rows that read the state stay at 0.
    """

    is_patient = True

    def __init__(
        self,
        setup: MetricsSetup,
        get_facts: Callable[[], FrontendFacts] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._get_facts = get_facts
        self._clock = clock
        self.has_failed = False
        """Something could not be counted."""
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
        """Counts nothing: it turns the state of one process, or of all, into rows."""
        self._order = {spec.full_name: position for position, spec in enumerate(specs)}
        for engine, labels in setup.cache_configs.items():
            self._store.add_info(CACHE_CONFIG_INFO, {"engine": str(engine), **labels})
        self._store.add_info(BUILD_INFO, {"version": __version__, "model_name": setup.model_name})
        if setup.num_spec_tokens:
            nothing = SpecDecodingStats(setup.num_spec_tokens, num_accepted_tokens_per_pos=[0] * setup.num_spec_tokens)
            for engine in setup.engines:
                self._store.record_all((nothing,), engine)
        self._exposition = Exposition()
        rows = sorted(self._store.rows + self._facts.rows, key=lambda row: self._order[row.spec.full_name])
        self._live = LiveExposition(rows)

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """Counts a step, or a batch of its outputs. Raises ServerError for statistics that cannot be counted."""
        self.record_all((StepReport(scheduler_stats, iteration_stats, engine_index, self._clock()),))

    def record_all(self, reports: Sequence[StepReport]) -> None:
        try:
            for engine_index in {report.engine_index for report in reports}:
                of_engine = [report for report in reports if report.engine_index == engine_index]
                for events in _get_events(of_engine):
                    self._store.record_all(events, engine_index, of_engine[-1].time)
        except Exception as e:
            self.has_failed = True
            logger.exception("what the engine did cannot be counted")
            raise ServerError(HAS_FAILED) from e

    def _prepare(self) -> None:
        """Prepares for a read. Raises ServerError after a failure."""
        self.catch_up()
        if self.has_failed:
            raise ServerError(HAS_FAILED)

    def record_operation(self, operation: ControlOperation) -> None:
        self._store.record_all((operation,))

    def record_exchange(self, exchange: HttpExchange) -> None:
        """Counts an answered HTTP request."""
        self._store.record_all((exchange,))

    def snapshot(self) -> MetricsSnapshot:
        """Returns all metrics of this process at this moment."""
        self._prepare()
        return self._arrange(self._store.snapshot(), None if self._get_facts is None else self._get_facts())

    def exposition(self, format: Format = "text") -> str:
        """Returns the same as text, without OpenMetrics' end mark."""
        self._prepare()
        if self._get_facts is not None:
            self._facts.record_all((self._get_facts(),))
        return self._live.write(format) + self._exposition.write(self._store.infos, format)

    def report(self, process: MetricsSnapshot) -> ProcessReport:
        """Returns the same for merging with other processes; `process` is the snapshot of `ProcessMetrics`."""
        assert self._get_facts is not None  # FrontendStats gives them
        self._prepare()
        return ProcessReport(self._store.snapshot(), self._get_facts(), process)

    def write(self, report: ProcessReport, format: Format = "text") -> str:
        """Returns a report, of this process or merged, as text without OpenMetrics' end mark."""
        families = self._arrange(report.counted, report.facts).families + report.process.families
        return self._exposition.write(families, format)

    def read(self, report: ProcessReport) -> MetricsSnapshot:
        """Returns the metrics of the catalog in a report."""
        return self._arrange(report.counted, report.facts)

    def _arrange(self, counted: MetricsSnapshot, facts: FrontendFacts | None) -> MetricsSnapshot:
        """Returns counted rows and rows of the state, in the order of the catalog."""
        if facts is not None:
            self._facts.record_all((facts,))
        families = counted.families + self._facts.snapshot().families
        families.sort(key=lambda family: self._order.get(family.name, len(self._order)))
        return MetricsSnapshot(families)


def _get_events(reports: Sequence[StepReport]) -> tuple[Sequence[object], ...]:
    """Returns all events in the reports, by type."""
    steps = [report.scheduler_stats for report in reports if report.scheduler_stats is not None]
    batches = [report.iteration_stats for report in reports if report.iteration_stats is not None]
    return (
        steps,
        batches,
        [event for step in steps for event in step.kv_cache_eviction_events],
        [step.spec_decoding_stats for step in steps if step.spec_decoding_stats is not None],
        [step.adapters for step in steps if step.adapters is not None],
        [step.kv_transfer for step in steps if step.kv_transfer is not None],
        [batch.prompt_tokens for batch in batches if batch.num_prompt_tokens],
        [first for batch in batches for first in batch.first_tokens],
        [finished for batch in batches for finished in batch.finished_requests],
    )
