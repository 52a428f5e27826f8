"""One run of the comparison: its options, the available engines, and the report."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.versus.engine import Engine
from benchmarks.versus.figures import Row, Series, offline_rows, run_rounds
from benchmarks.versus.peers import DEFAULT_HOME, PEERS, Peer, Place
from benchmarks.versus.serving import (
    Server,
    measure_serving,
    measure_starts,
    serving_rows,
    start_engine,
    start_server,
    start_up_row,
)
from quire.cli.bench.workloads import WORKLOADS
from quire.cli.machine import cpu_facts
from quire.worker.host import available_cpu_memory

ALL_WORKLOADS = (*WORKLOADS, "W5", "W6")


def parse(words: Sequence[str], description: str | None) -> argparse.Namespace:
    """Returns the options; exits with a message for contradictions."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versus",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every_cpu = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    parser.add_argument("--peers", default="all", help=f"all, or some of {','.join(PEERS)}; quire is always measured")
    parser.add_argument("--model", default="tiny", help="tiny, half, oneb; several with commas")
    parser.add_argument("--workloads", default="W1,W2,W3,W4", help=f"all, or some of {','.join(ALL_WORKLOADS)}")
    parser.add_argument("--reps", type=int, default=3, help="measured repetitions of each workload")
    parser.add_argument(
        "--home",
        type=Path,
        default=DEFAULT_HOME,
        help="where benchmarks/peers/setup put everything: $PEERS_HOME, or %(default)s",
    )
    parser.add_argument(
        "--cpus",
        type=_cpu_list,
        default=sorted(every_cpu),
        help="such as 0-3 or 0,2: the cores everyone is given, a thread each",
    )
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="workers of each engine, which share the cores"
    )
    parser.add_argument("--kv-cache-gib", type=float, default=2.0, help="of each engine that can be told")
    parser.add_argument("--limit-s", type=float, default=150.0, help="of one repetition; what takes longer is given up")
    parser.add_argument("--load-limit-s", type=float, default=600.0, help="of a start")
    parser.add_argument("--serve-seconds", type=float, default=30.0, help="how long a load of W5 lasts, about")
    parser.add_argument(
        "--rates",
        type=_numbers,
        default=[],
        help="W5's requests per second; default: 50 and 90 %% of the slowest server's capacity",
    )
    parser.add_argument("--output-json", type=Path, default=Path("versus.json"))
    parser.add_argument("--update-docs", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--from-json", type=Path, nargs="+", help="measure nothing; the table of these files")
    options = parser.parse_args(words)
    options.shown = " ".join(_without_paths(words)) or "(no arguments)"
    options.model = options.model.split(",")
    options.workloads = _choose(parser, "--workloads", options.workloads, ALL_WORKLOADS)
    options.peers = list(dict.fromkeys(["quire", *_choose(parser, "--peers", options.peers, PEERS)]))
    if not 1 <= options.tensor_parallel_size <= len(options.cpus):
        parser.error(f"--tensor-parallel-size {options.tensor_parallel_size}: from 1 to {len(options.cpus)}, the cores")
    if options.reps < 1:
        parser.error(f"--reps {options.reps} is too small: at least 1")
    return options


def _choose(parser: argparse.ArgumentParser, flag: str, text: str, known: Collection[str]) -> list[str]:
    names = list(known) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{flag}: unknown {', '.join(unknown)}; known: all, {', '.join(known)}")
    return names


def _cpu_list(text: str) -> list[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return sorted(cpus)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _without_paths(words: Sequence[str]) -> list[str]:
    """Returns the arguments as the report shows them, without the paths of this machine."""
    shown: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in ("--home", "--output-json", "--update-docs")
        if not skipping:
            shown.append(word)
    return shown


ROOT = Path(__file__).resolve().parents[2]


class Comparison:
    """One run: the available engines and the growing report."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._place = Place(options.home, tuple(options.cpus), options.kv_cache_gib, options.tensor_parallel_size)
        self._logs: Path = options.home / "logs"
        self._rows: list[Row] = []
        self._missing: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        self._neighbours: list[float] = []

    def run(self) -> dict[str, Any]:
        """Measures what was asked for and returns the report. It leaves no process behind."""
        options = self._options
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, options.cpus)  # inherited by every process that is started here
        ceilings = _measure_ceilings()
        for model in options.model:
            peers = self._available(model)
            if not peers:
                raise SystemExit(f"{model}: no engine can be measured; " + "; ".join(self._missing.values()))
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
        """Returns True if all engines fit:

        weights twice (a copy in the engine's own layout), KV cache, and 1.5 GiB each.
        """
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
    """Returns the best of the ceilings measured before and after a run, as neighbours only ever lower them."""
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
    """Prints progress on standard error, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
