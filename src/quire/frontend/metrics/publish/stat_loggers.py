"""Where statistics go: a list of loggers. A new exporter is a class with `record`, named by --stat-loggers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.failpoints import failpoint
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.collect.exchange import HttpExchange
from quire.frontend.metrics.collect.operations import ControlOperation
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.stats import SchedulerStats

logger = init_logger(__name__)

MAX_REPORTS_KEPT = 128
"""For patient loggers."""
MAX_PATIENCE_S = 1.0
"""What they are told is not older, while there are steps."""


class StepReport(msgspec.Struct, frozen=True, gc=False):
    """What the loggers are told of a batch of a step's outputs, at `time` by the wall clock."""

    scheduler_stats: SchedulerStats | None
    iteration_stats: IterationStats | None
    engine_index: int
    time: float


class StatLogger(ABC):
    """Takes the statistics of every step. Must be quick; one that raises is dropped.

    One that --stat-loggers names is made with the engine's configuration as its one argument.
    """

    is_patient: ClassVar[bool] = False
    """May be told of many steps together: a step of the model empties the caches, and telling of one step then takes as
    long as telling of ten more. Whoever reads such a logger has it `catch_up` first."""
    catch_up: Callable[[], None] = staticmethod(lambda: None)
    """Has it told of everything that has happened."""

    def record_all(self, reports: Sequence[StepReport]) -> None:
        """Several of them, oldest first."""
        for report in reports:
            self.record(report.scheduler_stats, report.iteration_stats, report.engine_index)

    @abstractmethod
    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """A snapshot of the scheduler after a step, and what a batch of outputs delivered (checklist S0-ST-013)."""

    def record_operation(self, operation: ControlOperation) -> None:  # noqa: B027 - most exporters have no use for it
        """A control operation has ended."""

    def record_exchange(self, exchange: HttpExchange) -> None:  # noqa: B027 - as above
        """An HTTP request was answered."""

    def log(self) -> None:  # noqa: B027 - an exporter that is only ever scraped has nothing to do here
        """Write out what was recorded since the last time, if this logger writes at all."""


class StatLoggerManager:
    """Passes statistics to every logger. A logger that raises is reported once and dropped: it may not cost a token.

    `clock` is the wall clock.
    """

    def __init__(self, loggers: Sequence[StatLogger] = (), clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._reports: list[StepReport] = []
        """That patient loggers have not been told."""
        self.loggers: list[StatLogger] = []
        self._hurried: list[StatLogger] = []
        """Those that are not patient."""
        for stat_logger in loggers:
            self.add(stat_logger)

    def add(self, stat_logger: StatLogger) -> None:
        """One more. Where statistics are off it is never told of anything."""
        self.catch_up()  # what was before is not for it
        self.loggers.append(stat_logger)
        if stat_logger.is_patient:
            stat_logger.catch_up = self.catch_up
        else:
            self._hurried.append(stat_logger)

    def drop(self, kind: type[StatLogger]) -> None:
        """Do without the loggers of this kind: another process has one for all."""
        for stat_logger in list(self.loggers):
            if isinstance(stat_logger, kind):
                self._remove(stat_logger)

    def _remove(self, stat_logger: StatLogger) -> None:
        self.loggers.remove(stat_logger)
        if not stat_logger.is_patient:
            self._hurried.remove(stat_logger)

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """Tell every logger of a batch of outputs: now, or the patient ones before they are read."""
        now = self._clock()
        report = StepReport(scheduler_stats, iteration_stats, engine_index, now)
        if self._hurried:
            self._tell(self._hurried, (report,))
        reports = self._reports
        reports.append(report)
        if len(reports) >= MAX_REPORTS_KEPT or not 0 <= now - reports[0].time < MAX_PATIENCE_S:
            self.catch_up()

    def _tell(self, loggers: Sequence[StatLogger], reports: Sequence[StepReport]) -> None:
        self._each(lambda stat_logger: stat_logger.record_all(reports), loggers)

    def catch_up(self) -> None:
        """Tell patient loggers what they have not been told."""
        reports, self._reports = self._reports, []
        if reports:
            self._tell([stat_logger for stat_logger in self.loggers if stat_logger.is_patient], reports)

    def record_operation(self, operation: ControlOperation) -> None:
        """Tell every logger of a control operation."""
        self._each(lambda stat_logger: stat_logger.record_operation(operation))

    def record_exchange(self, exchange: HttpExchange) -> None:
        """Tell every logger of an HTTP request."""
        self._each(lambda stat_logger: stat_logger.record_exchange(exchange))

    def log(self) -> None:
        """Let every logger write now."""
        self.catch_up()
        self._each(lambda stat_logger: stat_logger.log())

    def _each(self, call: Callable[[StatLogger], None], loggers: Sequence[StatLogger] | None = None) -> None:
        for stat_logger in list(self.loggers if loggers is None else loggers):
            try:
                failpoint("frontend.stats.record")
                call(stat_logger)
            except Exception:
                logger.exception("statistics logger %s failed and is dropped", type(stat_logger).__name__)
                self._remove(stat_logger)


def load_stat_logger(name: str, config: EngineConfig) -> StatLogger:
    """The logger that `name` ("package.module:Class") names, made for this engine. Raises ConfigError."""
    factory = resolve(name)
    stat_logger = factory(config)
    if not isinstance(stat_logger, StatLogger):
        raise ConfigError(
            f"--stat-loggers {name} makes a {type(stat_logger).__name__}, which is no StatLogger "
            "(quire.frontend.metrics.publish.stat_loggers)"
        )
    return stat_logger
