"""One run of the comparison: which engines there are, what is done with them, and the report of it."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.versus.engine import Engine
from benchmarks.versus.figures import Row, offline_rows
from benchmarks.versus.peers import PEERS, Peer, Place
from benchmarks.versus.rounds import Series, run_rounds
from benchmarks.versus.serving import Server, measure_serving, serving_rows
from benchmarks.versus.start_up import measure_starts, start_engine, start_server, start_up_row
from quire.cli.bench.workloads import WORKLOADS
from quire.cli.machine import cpu_facts
from quire.worker.host import available_cpu_memory

ROOT = Path(__file__).resolve().parents[2]


class Comparison:
    """One run: the engines that can be had, and the report that grows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._place = Place(options.home, tuple(options.cpus), options.kv_cache_gib)
        self._logs: Path = options.home / "logs"
        self._rows: list[Row] = []
        self._missing: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        self._neighbours: list[float] = []

    def run(self) -> dict[str, Any]:
        """Everything that was asked for; the report. Whatever happens, no process is left."""
        options = self._options
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, options.cpus)  # and with it of every process that is started here
        ceilings = _measure_ceilings()
        for model in options.model:
            peers = self._available(model)
            self._run_offline(model, peers)
            if "W5" in options.workloads:
                self._run_serving(model, peers)
            if "W6" in options.workloads:
                self._run_starts(model, peers)
        return {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": "python -m benchmarks.versus " + options.shown,
            "machine": {**cpu_facts(), "ceilings": better_ceilings(ceilings, _measure_ceilings())},
            "cpus": options.cpus,
            "reps": options.reps,
            "versions": self._versions,
            "missing": self._missing,
            "neighbours": max(self._neighbours, default=None),
            "rows": [row.to_json() for row in self._rows],
        }

    def _available(self, model: str) -> list[Peer]:
        found = []
        for name in self._options.peers:
            why = PEERS[name].missing(self._place, model)
            if why is None:
                found.append(PEERS[name])
            else:
                self._missing[name] = why
                say(f"without {name}: {why}")
        return found

    def _engine(self, peer: Peer, model: str, stack: ExitStack) -> Engine:
        engine = Engine(peer, self._place, model, self._logs, self._options.load_limit_s)
        stack.callback(engine.close)
        return engine

    def _run_offline(self, model: str, peers: Sequence[Peer]) -> None:
        workloads = [name for name in self._options.workloads if name in WORKLOADS]
        if not workloads:
            return
        together = self._fits_in_memory(model, peers)
        if not together:
            say(f"{model}: not enough memory for {len(peers)} engines at once, so one after another, not interleaved")
        series: dict[str, list[Series]] = {name: [] for name in workloads}
        for group in [list(peers)] if together else [[peer] for peer in peers]:
            with ExitStack() as stack:
                engines = [self._engine(peer, model, stack) for peer in group]
                for name in workloads:
                    series[name] += run_rounds(engines, name, self._options.reps, self._options.limit_s, say)
                self._versions.update({e.peer.name: e.version for e in engines if e.version is not None})
        for name in workloads:
            self._rows += offline_rows(model, series[name])
            self._neighbours += [r.neighbours for own in series[name] for r in own.repetitions]

    def _fits_in_memory(self, model: str, peers: Sequence[Peer]) -> bool:
        """Weights (twice: a copy in a layout of one's own), KV cache, and 1.5 GiB for the rest, each."""
        weights = sum(f.stat().st_size for f in (self._place.home / "models" / model).glob("*.safetensors"))
        need = len(peers) * (2 * weights + (self._place.kv_cache_gib + 1.5) * 2**30)
        return need <= available_cpu_memory()

    def _run_serving(self, model: str, peers: Sequence[Peer]) -> None:
        with ExitStack() as stack:
            servers = []
            for peer in peers:
                if peer.server is not None:
                    servers.append(Server(peer, self._place, model, self._logs, self._options.load_limit_s))
                    stack.callback(servers[-1].close)
            reps, seconds = self._options.reps, self._options.serve_seconds
            self._rows += serving_rows(model, measure_serving(servers, reps, seconds, say, self._options.rates))

    def _run_starts(self, model: str, peers: Sequence[Peer]) -> None:
        limit_s, reps = self._options.load_limit_s, self._options.reps
        with ExitStack() as stack:
            engines = [(peer.name, self._engine(peer, model, stack)) for peer in peers]
            starts = [(name, partial(start_engine, engine)) for name, engine in engines]
            self._rows.append(start_up_row(model, "engine", measure_starts(starts, reps, "engine", say)))
            self._versions.update({name: engine.version for name, engine in engines if engine.version is not None})
            servers = [
                (peer.name, Server(peer, self._place, model, self._logs, limit_s))
                for peer in peers
                if peer.server is not None
            ]
            for _, server in servers:
                stack.callback(server.close)
            starts = [(name, partial(start_server, server)) for name, server in servers]
            self._rows.append(start_up_row(model, "server", measure_starts(starts, reps, "server", say)))


def better_ceilings(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """The best of those measured before and after a run, as neighbours only ever lower them."""
    if first is None or second is None:
        return first or second
    best: dict[str, Any] = {}
    for key, values in first.items():
        best[key] = {k: max(v, second[key][k]) for k, v in values.items()} if isinstance(values, dict) else values
    return best


def _measure_ceilings() -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.ceilings"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120).stdout
    ceilings: dict[str, Any] | None = json.loads(output)
    return ceilings


def say(text: str) -> None:
    """Progress, on standard error, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
