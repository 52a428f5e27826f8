"""Loads that the API processes of a server share, so that each routes by the requests of all.

A process writes the counts of its own requests at each engine, at every change, into its row of a shared page; none
waits for a message of an engine. The process that starts the engines, which gets the statistics of their steps, writes
the use of each cache and the costs of its steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from quire.frontend.metrics.collect.saturation import CostModel
from quire.wire.peers import SharedCounts

_NUM_COUNTS = 3
_NUM_COSTS = len(CostModel().coefficients)
_NUM_FACTS = 2
"""Use of the cache, and the number of the fit, which is 0 before the first one."""
_WIDTH = _NUM_COUNTS + _NUM_FACTS + _NUM_COSTS
"""Columns of an engine. A row has the counts of all engines, then the facts of all, then the costs of all, so that a
choice reads those of all engines at once."""
_UNIT = 1e-12
"""Costs are written as whole picoseconds, the use of a cache as whole 1e-12."""


class RequestCounts(NamedTuple):
    """Requests at an engine."""

    num_running: int = 0
    """Requests that have had a token."""
    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Prompt tokens of the waiting requests that are not expected to be cached."""


class LoadBoard:
    """The page, for one process. Engines are numbered from `first_engine`; of others nothing is known."""

    def __init__(self, page: SharedCounts, first_engine: int, num_engines: int) -> None:
        self._page = page
        self._engines = range(first_engine, first_engine + num_engines)
        self._fits: dict[int, int] = {}
        """Number of the fit of each engine that was written, or read, last."""

    @classmethod
    def create(cls, path: Path, num_processes: int, first_engine: int, num_engines: int) -> LoadBoard:
        """Makes a page for so many processes and the one that starts the engines, which is the caller."""
        return cls(SharedCounts.create(path, 1 + num_processes, num_engines * _WIDTH), first_engine, num_engines)

    @classmethod
    def attach(cls, path: Path, index: int, first_engine: int, num_engines: int) -> LoadBoard:
        """Opens the page for process `index`. Raises OSError or ValueError if it is missing or of another kind."""
        return cls(SharedCounts.attach(path, num_engines * _WIDTH, index), first_engine, num_engines)

    def _column(self, engine: int, num_before: int, width: int) -> int | None:
        """Returns the first column of an engine among columns of `width` per engine, before which each has others."""
        if engine not in self._engines:
            return None
        return len(self._engines) * num_before + self._engines.index(engine) * width

    def put_counts(self, engine: int, counts: RequestCounts) -> None:
        """Writes the requests of this process at an engine."""
        if (start := self._column(engine, 0, _NUM_COUNTS)) is not None:
            self._page.put(start, counts)

    def get_others(self) -> dict[int, tuple[int, int, int]]:
        """Returns the requests of the other processes at each engine, as plain `RequestCounts`."""
        sums = iter(self._page.sum_others(len(self._engines) * _NUM_COUNTS))
        return dict(zip(self._engines, zip(sums, sums, sums, strict=True), strict=True))

    def put_facts(self, engine: int, kv_usage: float, model: CostModel | None) -> None:
        """Writes what the statistics of an engine say. `model` is None if it has not changed."""
        facts = self._column(engine, _NUM_COUNTS, _NUM_FACTS)
        costs = self._column(engine, _NUM_COUNTS + _NUM_FACTS, _NUM_COSTS)
        if facts is None or costs is None:
            return
        if model is not None:
            self._page.put(costs, [round(cost / _UNIT) for cost in model.coefficients])
            self._fits[engine] = self._fits.get(engine, 0) + 1
        self._page.put(facts, (round(kv_usage / _UNIT), self._fits.get(engine, 0)))

    def get_facts(self) -> dict[int, tuple[float, CostModel | None]]:
        """Returns the use of each engine's cache, and the costs of its steps if they are new to this process; nothing
        in the process that writes them."""
        if self.writes_facts:
            return {}
        start, stop = (len(self._engines) * before for before in (_NUM_COUNTS, _NUM_COUNTS + _NUM_FACTS))
        words = iter(self._page.get(0, start, stop))
        return {
            engine: (usage * _UNIT, None if fit == self._fits.get(engine, 0) else self._read_costs(engine, fit))
            for engine, usage, fit in zip(self._engines, words, words, strict=True)
        }

    def _read_costs(self, engine: int, fit: int) -> CostModel:
        self._fits[engine] = fit
        start = self._column(engine, _NUM_COUNTS + _NUM_FACTS, _NUM_COSTS)
        assert start is not None  # it has facts
        return CostModel(tuple(cost * _UNIT for cost in self._page.get(0, start, start + _NUM_COSTS)))

    @property
    def writes_facts(self) -> bool:
        """True in the process that gets the statistics."""
        return self._page.row == 0

    def clear(self, index: int) -> None:
        """Clears the counts of process `index`, which has exited."""
        self._page.clear_row(index)
