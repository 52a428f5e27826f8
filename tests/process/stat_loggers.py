"""A destination of statistics for servers of the tests; named by dotted string, so importable there."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.wire.stats import SchedulerStats


class NotedStats(StatLogger):
    """Appends its process id and the kind of each report to the file that NOTED_STATS names."""

    def __init__(self, config: EngineConfig) -> None:
        self._path = Path(os.environ["NOTED_STATS"])

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        assert gc.isenabled(), "the garbage collector rests for the start only"
        for part, name in ((scheduler_stats, "scheduler"), (iteration_stats, "requests")):
            if part is not None:
                with self._path.open("a") as file:
                    file.write(f"{os.getpid()} {name}\n")
