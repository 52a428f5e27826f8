"""Where statistics go: a list of loggers. A new exporter is a class with `record`, named by --stat-loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.failpoints import failpoint
from quire.frontend.metrics.exchange import HttpExchange
from quire.frontend.metrics.operations import ControlOperation
from quire.frontend.metrics.stats import IterationStats
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.stats import SchedulerStats

logger = init_logger(__name__)


class StatLogger(ABC):
    """Takes the statistics of every step. Must be quick; one that raises is dropped.

    One that --stat-loggers names is made with the engine's configuration as its one argument.
    """

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
    """Passes statistics to every logger. A logger that raises is reported once and dropped: it may not cost a token."""

    def __init__(self, loggers: Sequence[StatLogger] = ()) -> None:
        self.loggers: list[StatLogger] = list(loggers)

    def add(self, stat_logger: StatLogger) -> None:
        """One more. Where statistics are off it is never told of anything."""
        self.loggers.append(stat_logger)

    def drop(self, kind: type[StatLogger]) -> None:
        """Do without the loggers of this kind: another process has one for all."""
        self.loggers = [stat_logger for stat_logger in self.loggers if not isinstance(stat_logger, kind)]

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        """Give one batch's statistics to every logger."""
        self._each(lambda stat_logger: stat_logger.record(scheduler_stats, iteration_stats, engine_index))

    def record_operation(self, operation: ControlOperation) -> None:
        """Tell every logger of a control operation."""
        self._each(lambda stat_logger: stat_logger.record_operation(operation))

    def record_exchange(self, exchange: HttpExchange) -> None:
        """Tell every logger of an HTTP request."""
        self._each(lambda stat_logger: stat_logger.record_exchange(exchange))

    def log(self) -> None:
        """Let every logger write now."""
        self._each(lambda stat_logger: stat_logger.log())

    def _each(self, call: Callable[[StatLogger], None]) -> None:
        for stat_logger in list(self.loggers):
            try:
                failpoint("frontend.stats.record")
                call(stat_logger)
            except Exception:
                logger.exception("statistics logger %s failed and is dropped", type(stat_logger).__name__)
                self.loggers.remove(stat_logger)


def load_stat_logger(name: str, config: EngineConfig) -> StatLogger:
    """The logger that `name` ("package.module:Class") names, made for this engine. Raises ConfigError."""
    factory = resolve(name)
    stat_logger = factory(config)
    if not isinstance(stat_logger, StatLogger):
        raise ConfigError(
            f"--stat-loggers {name} makes a {type(stat_logger).__name__}, which is no StatLogger "
            "(quire.frontend.metrics.manager)"
        )
    return stat_logger
