"""The offline workloads: every engine in turn, repetition by repetition, so that a noisy neighbour meets all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.versus.engine import Engine, EngineError, Repetition
from quire.cli.bench.workloads import WARMUP_REP, WORKLOADS, IdRange

SHARED_PREFIX = {"W3": 512}
"""Tokens that all prompts of a workload begin with."""
WARMUP_REQUESTS = {"W2": 16, "W3": 16}
"""How many requests of a workload warm an engine up, where that is not all of them."""
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
    """Warm up each engine, then `reps` rounds, every other one backwards. An engine that fails leaves the workload."""
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
