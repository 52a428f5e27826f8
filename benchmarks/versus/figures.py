"""Repetitions of the offline workloads, and their figures: medians, spreads, ratios.

All engines run in turn, repetition by repetition, so that a noisy neighbour disturbs all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.versus.engine import Engine, EngineError, Repetition
from quire.cli.bench.workloads import WARMUP_REP, WORKLOADS, IdRange

SHARED_PREFIX = {"W3": 512}
"""Number of tokens with which all prompts of a workload begin."""
WARMUP_REQUESTS = {"W2": 16, "W3": 16}
"""Number of requests that warm an engine up, where that is not all of a workload."""
IDS = IdRange()

Say = Callable[[str], None]


@dataclass
class Series:
    """The repetitions of one engine on one workload, or why there are none."""

    workload: str
    peer: str
    repetitions: list[Repetition] = field(default_factory=list)
    failure: str | None = None


def run_rounds(engines: Sequence[Engine], workload: str, reps: int, limit_s: float, say: Say) -> list[Series]:
    """Warms up each engine, then runs `reps` rounds, every other one backwards.

    An engine that fails leaves the workload.
    """
    series = [Series(workload, engine.peer.name) for engine in engines]
    pairs = list(zip(engines, series, strict=True))
    for engine, own in pairs:
        _run_one(engine, own, WARMUP_REP, WARMUP_REQUESTS.get(workload), limit_s)
        own.repetitions.clear()
        say(f"{workload} {engine.peer.name}: {own.failure or 'warm'}")
    for rep in range(reps):
        for engine, own in pairs if rep % 2 == 0 else reversed(pairs):
            if own.failure is None:
                _run_one(engine, own, rep, None, limit_s)
                last = own.failure or f"{own.repetitions[-1].wall_s:.3f} s"
                say(f"{workload} {engine.peer.name} {rep + 1}/{reps}: {last}")
    return series


def _run_one(engine: Engine, own: Series, rep: int, count: int | None, limit_s: float) -> None:
    requests = WORKLOADS[own.workload].make(rep, IDS, count)
    try:
        own.repetitions.append(engine.run(requests, SHARED_PREFIX.get(own.workload, 0), limit_s))
    except EngineError as e:
        own.failure = str(e)


BASELINE = "quire"


@dataclass(frozen=True)
class Figure:
    """One cell: the value, how far its repetitions lie apart (half the range over the median), or why there is none."""

    value: float | None = None
    spread: float | None = None
    failure: str | None = None

    @staticmethod
    def of(values: Sequence[float], failure: str | None = None) -> Figure:
        """Returns the figure of the median of `values`."""
        if failure is not None or not values:
            return Figure(failure=failure or "not measured")
        median = statistics.median(values)
        return Figure(median, (max(values) - min(values)) / 2 / median if median else 0.0)


@dataclass(frozen=True)
class Row:
    """One line of the table. `digits` after the point; `is_rate`: more is better."""

    title: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    digits: int = 2
    is_rate: bool = False

    def ratio(self, peer: str) -> float | None:
        """Returns how many times better Quire is than `peer`: above 1 it is ahead."""
        ours, theirs = (self.figures.get(name, Figure()).value for name in (BASELINE, peer))
        if not ours or not theirs:
            return None
        return ours / theirs if self.is_rate else theirs / ours

    def to_json(self) -> dict[str, Any]:
        """Returns the row for the JSON beside the table."""
        ratios = {peer: self.ratio(peer) for peer in self.figures if peer != BASELINE}
        return {**asdict(self), "ratios": {peer: round(r, 3) for peer, r in ratios.items() if r is not None}}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Row:
        """Returns the row of a result of `to_json`."""
        figures = {peer: Figure(**figure) for peer, figure in row["figures"].items()}
        return Row(row["title"], figures, row["digits"], row["is_rate"])


def offline_rows(model: str, series: Sequence[Series]) -> list[Row]:
    """Returns the rows of one workload: two for a single stream, tokens per second for W4, seconds for the others."""
    name = series[0].workload
    if name == "W1":
        return [
            _row(f"{model} W1: one stream, first token, ms", series, lambda r: (r.ttft_s or 0.0) * 1e3),
            _row(f"{model} W1: one stream, ms per token", series, lambda r: (r.tpot_s or 0.0) * 1e3),
        ]
    if name == "W4":
        tokens = sum(r.output_len for r in WORKLOADS[name].make(0, IdRange(), None))
        title = f"{model} W4: {WORKLOADS[name].description}, tokens/s"
        return [_row(title, series, lambda r: tokens / r.wall_s, digits=0, is_rate=True)]
    return [_row(f"{model} {name}: {WORKLOADS[name].description}, s", series, lambda r: r.wall_s)]


def _row(title: str, series: Sequence[Series], value: Any, **kind: Any) -> Row:
    return Row(title, {s.peer: Figure.of([value(r) for r in s.repetitions], s.failure) for s in series}, **kind)
