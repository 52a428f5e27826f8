"""The command line of the comparison."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.versus.peers import DEFAULT_HOME, PEERS
from quire.cli.bench.workloads import WORKLOADS

ALL_WORKLOADS = (*WORKLOADS, "W5", "W6")


def parse(words: Sequence[str], description: str | None) -> argparse.Namespace:
    """The options; exits with a message at what makes no sense."""
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
    """The arguments as the report shows them: where files lie on this machine is nobody's business."""
    shown: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in ("--home", "--output-json", "--update-docs")
        if not skipping:
            shown.append(word)
    return shown
