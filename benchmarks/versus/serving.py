"""W5 and W6 on servers: latencies under Poisson load, and the time from starting the process to the first token."""

from __future__ import annotations

import asyncio
import http.client
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.versus.engine import Engine, EngineError, ManagedProcess
from benchmarks.versus.figures import Figure, Row, Say
from benchmarks.versus.peers import Peer, Place
from quire.cli.bench.load import Endpoint, LoadRequest, LoadRun, Sender
from quire.cli.bench.outcomes import LoadResult, ServiceLevel
from quire.cli.bench.outcomes import figures as load_figures
from quire.cli.bench.workloads import ALL_AT_ONCE, BenchRequest, IdRange, arrival_times, mixed_requests
from quire.cli.remote.client import HttpClient
from quire.cli.remote.protocol import ServerAddress

CAPACITY_REQUESTS = 64
SHARES = (0.5, 0.9)
"""Shares of the capacity of the slowest server, so that all can bear the load."""
_FIRST_REP = 1000
"""First repetition of W2's lengths that the offline workloads never use."""


class Server:
    """A peer's server with a model: started by `start`, frozen in between. Raises EngineError where it says so."""

    def __init__(self, peer: Peer, place: Place, model: str, logs: Path, start_limit_s: float = 600.0) -> None:
        assert peer.server is not None
        self.peer = peer
        self.first_token_s: float | None = None
        """Seconds from the start of the process to the first token, at the last start."""
        self._place, self._model, self._start_limit_s = place, model, start_limit_s
        self._log = logs / f"{peer.name}-{model}-server.log"
        self._process: ManagedProcess | None = None
        self._port = 0

    def start(self) -> None:
        """Starts the process and waits for one token. Raises EngineError if it ends or takes too long."""
        assert self.peer.server is not None
        self._port = _free_port()
        command = self.peer.server(self._place, self._model, self._port)
        start = time.perf_counter()
        self._process = process = ManagedProcess(command, self.peer.full_environment(self._place), self._log)
        request = BenchRequest([IdRange().low] * 8, 1)
        while time.perf_counter() - start < self._start_limit_s:
            if not process.is_running:
                words = process.last_words()
                self.close()
                raise EngineError(f"failed: the server ended: {words}")
            if _listens(self._port):
                result = asyncio.run(self._run([request], ALL_AT_ONCE, 0))
                if not result.failed:
                    self.first_token_s = time.perf_counter() - start
                    process.pause()
                    return
                failure = result.failed[0].failure
                if failure is not None and failure.kind not in ("connection refused", "HTTP 503"):
                    self.close()
                    raise EngineError(f"failed: {failure.kind}: {failure.message}")
            time.sleep(0.02)
        self.close()
        raise EngineError(f"> {self._start_limit_s:.0f} s to start")

    def load(self, requests: Sequence[BenchRequest], rate: float, seed: int) -> LoadResult:
        """Sends a load. Raises EngineError if any request fails."""
        assert self._process is not None
        self._process.resume()
        try:
            result = asyncio.run(self._run(requests, rate, seed))
        finally:
            self._process.pause()
        if result.failed:
            raise EngineError(f"failed: {len(result.failed)} requests, {result.failed[0].failure}")
        return result

    async def _run(self, requests: Sequence[BenchRequest], rate: float, seed: int) -> LoadResult:
        client = HttpClient(ServerAddress.parse(f"http://127.0.0.1:{self._port}"))
        try:
            run = LoadRun(Sender(client, Endpoint.COMPLETIONS, self._model).send)
            return await run.run(
                [LoadRequest(r.prompt_token_ids, r.output_len) for r in requests],
                arrival_times(rate, len(requests), seed),
            )
        finally:
            await client.close()

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


@dataclass
class Served:
    """The results of one server: its capacity in requests per second, and per rate one summary for each repetition."""

    peer: str
    capacity: float | None = None
    failure: str | None = None
    loads: dict[float, list[dict[str, Any]]] = field(default_factory=dict)


def measure_serving(
    servers: Sequence[Server], reps: int, seconds: float, say: Say, rates: Sequence[float] = ()
) -> list[Served]:
    """Measures the capacity of each server (64 requests at once), then every rate on each in turn, `reps` times.

    A load lasts about `seconds`. Without `rates`, they are `SHARES` of the smallest capacity.
    """
    results = [Served(server.peer.name) for server in servers]
    pairs = list(zip(servers, results, strict=True))
    for server, own in pairs:
        _try(own, partial(_measure_capacity, server, own, reps))
        say(f"W5 {own.peer}: {own.failure or f'capacity {own.capacity:.2f} requests/s'}")
    capacities = [own.capacity for own in results if own.capacity is not None]
    for rate in rates or [_round_rate(share * min(capacities)) for share in SHARES if capacities]:
        for rep in range(reps):
            requests = mixed_requests(_FIRST_REP + 10 + rep, IdRange(), load_size(rate, seconds), 200, 128)
            for server, own in pairs if rep % 2 == 0 else reversed(pairs):
                if own.failure is None:
                    _try(own, partial(_measure_rate, server, own, requests, rate, rep))
                    say(f"W5 {own.peer} at {rate} requests/s {rep + 1}/{reps}: {own.failure or 'done'}")
    return results


def load_size(rate: float, seconds: float) -> int:
    """Returns the number of requests of a load: enough for `seconds`, and for percentiles to mean something."""
    return max(32, min(600, round(rate * seconds)))


def serving_rows(model: str, results: Sequence[Served]) -> list[Row]:
    """Returns the rows of W5: capacity, then TTFT and inter-token time at each rate."""
    capacity = {r.peer: Figure(r.capacity, failure=r.failure) for r in results}
    rows = [Row(f"{model} W5: served, 64 mixed requests at once, requests/s", capacity, is_rate=True)]
    rates = sorted({rate for r in results for rate in r.loads})
    for rate in rates:
        for key, name in (("ttft_ms", "first token"), ("itl_ms", "between tokens")):
            for quantile in ("p50", "p99"):
                title = f"{model} W5: served at {rate:g} requests/s, {name}, {quantile}, ms"
                rows.append(Row(title, {r.peer: _quantile(r, rate, key, quantile) for r in results}, digits=1))
    return rows


def _quantile(result: Served, rate: float, key: str, quantile: str) -> Figure:
    return Figure.of([load[key][quantile] for load in result.loads.get(rate, [])], result.failure)


def _measure_capacity(server: Server, own: Served, reps: int) -> None:
    server.start()
    server.load(mixed_requests(_FIRST_REP, IdRange(), 16, 200, 128), ALL_AT_ONCE, 0)  # warm-up
    rates = []
    for rep in range(reps):
        requests = mixed_requests(_FIRST_REP + 1 + rep, IdRange(), CAPACITY_REQUESTS, 200, 128)
        result = server.load(requests, ALL_AT_ONCE, rep)
        rates.append(len(result.answered) / result.wall_s)
    own.capacity = sorted(rates)[len(rates) // 2]


def _measure_rate(server: Server, own: Served, requests: Sequence[BenchRequest], rate: float, rep: int) -> None:
    own.loads.setdefault(rate, []).append(load_figures(server.load(requests, rate, rep), ServiceLevel({})))


def _try(own: Served, measure: Callable[[], None]) -> None:
    try:
        measure()
    except EngineError as e:
        own.failure = str(e)


def _round_rate(rate: float) -> float:
    return float(f"{rate:.2g}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.connect()
        return True
    except OSError:
        return False
    finally:
        connection.close()


@dataclass
class Starts:
    """The start-up times of one peer, or why there are none."""

    peer: str
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


def measure_starts(starters: Sequence[tuple[str, Callable[[], float]]], reps: int, what: str, say: Say) -> list[Starts]:
    """Runs each (peer, function that starts it, ends it and returns the seconds) in turn, `reps` times."""
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
    """Starts a driver, generates one token and ends it. Returns the seconds to the token."""
    start = time.perf_counter()
    try:
        engine.run([BenchRequest([IdRange().low] * 8, 1)], 0, limit_s)
        return time.perf_counter() - start
    finally:
        engine.close()


def start_server(server: Server) -> float:
    """Starts a server until its first token, and ends it. Returns the seconds."""
    try:
        server.start()
    finally:
        server.close()
    assert server.first_token_s is not None
    return server.first_token_s


def start_up_row(model: str, what: str, results: Sequence[Starts]) -> Row:
    """Returns the row of `what`, which is "engine" or "server"."""
    figures = {r.peer: Figure.of(r.seconds, r.failure) for r in results}
    return Row(f"{model} W6: {what}, start to first token, s", figures)
