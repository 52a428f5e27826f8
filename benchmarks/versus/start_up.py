"""W6: seconds from starting a process to its first token, without and with a server. Caches of earlier runs stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.versus.engine import Engine, EngineError
from benchmarks.versus.figures import Figure, Row
from benchmarks.versus.rounds import Say
from benchmarks.versus.serving import Server
from quire.cli.bench.workloads import BenchRequest, IdRange


@dataclass
class Starts:
    """The start-up times of one peer, or why there are none."""

    peer: str
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


def measure_starts(starters: Sequence[tuple[str, Callable[[], float]]], reps: int, what: str, say: Say) -> list[Starts]:
    """Each of (peer, function that starts it, ends it and tells the seconds) in turn, `reps` times."""
    results = [Starts(peer) for peer, _ in starters]
    for rep in range(reps):
        for (peer, start), own in zip(starters, results, strict=True):
            if own.failure is None:
                try:
                    own.seconds.append(start())
                except EngineError as e:
                    own.failure = str(e)
                say(f"W6 {what} {peer} {rep + 1}/{reps}: {own.failure or f'{own.seconds[-1]:.2f} s'}")
    return results


def start_engine(engine: Engine, limit_s: float = 60.0) -> float:
    """Start a driver, generate one token, end it; seconds to the token."""
    start = time.perf_counter()
    try:
        engine.run([BenchRequest([IdRange().low] * 8, 1)], 0, limit_s)
        return time.perf_counter() - start
    finally:
        engine.close()


def start_server(server: Server) -> float:
    """Start a server until its first token, end it."""
    try:
        server.start()
    finally:
        server.close()
    assert server.first_token_s is not None
    return server.first_token_s


def start_up_row(model: str, what: str, results: Sequence[Starts]) -> Row:
    """The row of `what`, which is "engine" or "server"."""
    figures = {r.peer: Figure.of(r.seconds, r.failure) for r in results}
    return Row(f"{model} W6: {what}, start to first token, s", figures)
