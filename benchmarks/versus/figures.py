"""From repetitions to figures: medians, spreads, ratios. Everything here is a pure function of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.versus.rounds import Series
from quire.cli.bench.workloads import WORKLOADS, IdRange

BASELINE = "quire"


@dataclass(frozen=True)
class Figure:
    """One cell: the value, how far its repetitions lie apart (half the range over the median), or why there is none."""

    value: float | None = None
    spread: float | None = None
    failure: str | None = None

    @staticmethod
    def of(values: Sequence[float], failure: str | None = None) -> Figure:
        """The median of `values`."""
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
        """How many times better Quire is than `peer`: above 1 it is ahead."""
        ours, theirs = (self.figures.get(name, Figure()).value for name in (BASELINE, peer))
        if not ours or not theirs:
            return None
        return ours / theirs if self.is_rate else theirs / ours

    def to_json(self) -> dict[str, Any]:
        """For the JSON beside the table."""
        ratios = {peer: self.ratio(peer) for peer in self.figures if peer != BASELINE}
        return {**asdict(self), "ratios": {peer: round(r, 3) for peer, r in ratios.items() if r is not None}}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Row:
        """What `to_json` gave."""
        figures = {peer: Figure(**figure) for peer, figure in row["figures"].items()}
        return Row(row["title"], figures, row["digits"], row["is_rate"])


def offline_rows(model: str, series: Sequence[Series]) -> list[Row]:
    """The rows of one workload: two for a single stream, tokens per second for W4, seconds for the others."""
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
