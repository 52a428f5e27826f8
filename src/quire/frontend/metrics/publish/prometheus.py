"""Statistics as Prometheus reads them: the rows of the catalog, counted in this process and written when it asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.errors import ServerError
from quire.frontend.metrics.catalog.spec import LAZY, make_bounds
from quire.frontend.metrics.catalog.table import BUILD_INFO, CACHE_CONFIG_INFO, METRICS
from quire.frontend.metrics.collect.events import ControlOperation, HttpExchange, IterationStats
from quire.frontend.metrics.collect.facts import FrontendFacts
from quire.frontend.metrics.publish.exposition import Exposition, Format, LiveExposition
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot, ProcessReport
from quire.frontend.metrics.publish.stat_loggers import StatLogger, StepReport
from quire.frontend.metrics.publish.store import MetricsStore
from quire.logger import init_logger
from quire.version import __version__
from quire.wire.stats import SchedulerStats

logger = init_logger(__name__)

HAS_FAILED = "the metrics exporter has failed and counts nothing any more; the log says why"


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
        """Something was told that could not be counted."""
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
        """Count what a step, or a batch of its outputs, brought. Raises ServerError for what cannot be counted."""
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

    def _look(self) -> None:
        """Before anybody does."""
        self.catch_up()
        if self.has_failed:
            raise ServerError(HAS_FAILED)

    def record_operation(self, operation: ControlOperation) -> None:
        self._store.record(operation)

    def record_exchange(self, exchange: HttpExchange) -> None:
        """An HTTP request was answered."""
        self._store.record(exchange)

    def snapshot(self) -> MetricsSnapshot:
        """All metrics of this process at this moment."""
        self._look()
        return self._arrange(self._store.snapshot(), None if self._get_facts is None else self._get_facts())

    def exposition(self, format: Format = "text") -> str:
        """The same as text, without OpenMetrics' end mark."""
        self._look()
        if self._get_facts is not None:
            self._facts.record(self._get_facts())
        return self._live.write(format) + self._exposition.write(self._store.infos, format)

    def report(self, process: MetricsSnapshot) -> ProcessReport:
        """The same for others to merge with theirs; `process` is what `ProcessMetrics` say."""
        assert self._get_facts is not None  # FrontendStats gives them
        self._look()
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


def _get_events(reports: Sequence[StepReport]) -> tuple[Sequence[object], ...]:
    """All there is to count, by kind."""
    steps = [report.scheduler_stats for report in reports if report.scheduler_stats is not None]
    batches = [report.iteration_stats for report in reports if report.iteration_stats is not None]
    return (
        steps,
        batches,
        [event for step in steps for event in step.kv_cache_eviction_events],
        [step.spec_decoding_stats for step in steps if step.spec_decoding_stats is not None],
        [batch.prompt_tokens for batch in batches if batch.num_prompt_tokens],
        [first for batch in batches for first in batch.first_tokens],
        [finished for batch in batches for finished in batch.finished_requests],
    )
