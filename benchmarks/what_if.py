"""Measures the error of `quire replay`: `python -m benchmarks.what_if`, with Quire importable.

A server with 16 seats is loaded and recorded, and its behaviour with 48 is predicted from that. Then the same load is
sent to a server with 48: the difference is the error of the prediction. The load is also sent to a server with 16
again: two runs of one load differ by so much, and no prediction can be judged more finely. All are measured from their
own recordings, in several rounds, one after the other; nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = {
    "mean TTFT, ms": ("ttft_ms", "mean"),
    "median TTFT, ms": ("ttft_ms", "p50"),
    "mean TPOT, ms": ("tpot_ms", "mean"),
    "output tokens/s": ("output_tokens_per_s", None),
}


@dataclass(frozen=True)
class Load:
    """Flags of `quire bench serve` for a load."""

    name: str
    flags: tuple[str, ...]


LOADS = (
    Load("300 requests at once, 32 to 256 in, 16 to 96 out",
         ("--num-prompts", "300", "--input-len", "32-256", "--output-len", "16-96")),
    Load("75 a second, 32 to 96 in, 16 to 96 out",
         ("--num-prompts", "1500", "--request-rate", "75", "--input-len", "32-96", "--output-len", "16-96")),
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """One figure of one round."""

    recorded: float
    again: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Error of the prediction for other settings."""
        return self.predicted / self.measured - 1

    @property
    def spread(self) -> float:
        """Difference of two runs with the same settings."""
        return self.again / self.recorded - 1


def run_quire(*args: str) -> str:
    """Returns the standard output of a `quire` command."""
    command = [sys.executable, "-m", "quire", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def read(figures: dict[str, Any], name: str) -> float:
    """Returns one of `FIGURES`."""
    field, place = FIGURES[name]
    value: float = figures[field] if place is None else figures[field][place]
    return value


def serve(model: str, flags: Sequence[str], seats: int, path: Path) -> None:
    """Loads a server with `seats` seats and records it to `path`."""
    run_quire("bench", "serve", "--model", model, *flags, "--max-num-seqs", str(seats), "--record", str(path))


def replay(path: Path, *flags: str) -> dict[str, Any]:
    """Returns the report of `quire replay` on a recording."""
    found: dict[str, Any] = json.loads(run_quire("replay", str(path), *flags, "--json"))
    if not found["reproduced"]:
        raise SystemExit(f"a decision of the recording was not reproduced: {found['first_difference']}")
    return found


def run_round(model: str, flags: Sequence[str], seats: tuple[int, int]) -> dict[str, Round]:
    """Records a load, predicts another setting, and serves that."""
    few, many = seats
    with tempfile.TemporaryDirectory() as directory:
        first, again, other = (Path(directory) / name for name in ("first", "again", "other"))
        for path, num_seats in ((first, few), (other, many), (again, few)):
            serve(model, flags, num_seats, path)
        predicted = replay(first, "--max-num-seqs", str(many))
        columns = (
            predicted["recorded"],
            replay(again)["recorded"],
            predicted["what_if"],
            replay(other)["recorded"],
        )
    return {name: Round(*(read(figures, name) for figures in columns)) for name in FIGURES}


def make_row(load: Load, name: str, rounds: Sequence[Round]) -> str:
    """Returns a row of the table."""
    predicted = ", ".join(f"{r.predicted:.4g}" for r in rounds)
    measured = ", ".join(f"{r.measured:.4g}" for r in rounds)
    errors = ", ".join(f"{100 * r.error:+.0f}" for r in rounds)
    spreads = ", ".join(f"{100 * r.spread:+.0f}" for r in rounds)
    median = statistics.median(abs(r.error) for r in rounds)
    return f"| {load.name} | {name} | {predicted} | {measured} | {errors} % (median {median:.0%}) | {spreads} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seats", type=int, nargs=2, default=(16, 48), help="recorded with, predicted for")
    parser.add_argument("--num-prompts", type=int, help="requests of each load, instead of 300 and 1500")
    parser.add_argument("--load", default="", help="only loads whose name holds this")
    args = parser.parse_args()
    print("| load | | predicted | served again | error | same settings, served again |", flush=True)
    print("|---|---|---|---|---|---|")
    for load in LOADS:
        if args.load in load.name:
            count = () if args.num_prompts is None else ("--num-prompts", str(args.num_prompts))
            flags = (*load.flags, *count)
            rounds = [
                run_round(args.model, (*flags, "--seed", str(seed)), tuple(args.seats)) for seed in range(args.rounds)
            ]
            for name in FIGURES:
                print(make_row(load, name, [figures[name] for figures in rounds]), flush=True)


if __name__ == "__main__":
    main()
