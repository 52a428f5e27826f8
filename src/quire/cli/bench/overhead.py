"""`quire bench overhead`: microseconds per generated token and per step that are not the model's.

An `AsyncLLM` on a fake executor runs N requests, each read by a coroutine of its own as in a server. The CPU time of
the engine core and of the frontend is measured while all N are running, in one process and in two.
"""

from __future__ import annotations

import asyncio
from typing import Any

from quire.cli.bench.throughput import REPORT_OPTIONS, machine_facts, report
from quire.cli.command_line import Arguments, CommandLine, Option
from quire.errors import ConfigError
from quire.resolve import resolve

RUNS = "quire.cli.bench.overhead_runs:measure_transport"
"""Resolved by name, so that --help loads nothing heavy."""
TRANSPORTS = ("inproc", "zmq")
EDGE_TOKENS = 4
"""Tokens at both ends of a request that are not measured."""


def command_line() -> CommandLine:
    own = [
        Option(name="model", help="Model of the tokenizer and vocabulary; nothing is computed.", default="demo"),
        Option(name="concurrency", help="Numbers of requests running at once.", parse=_parse_numbers,
               default=[1, 64, 256]),
        Option(name="transport", help="Where the core is: in this process, or behind ZMQ.", default="both",
               choices=("both", *TRANSPORTS)),
        Option(name="output_len", help="Tokens per request.", parse=int, default=64),
        Option(name="step_ms", help="Milliseconds that a step of the fake model sleeps.", parse=float, default=20.0),
        Option(name="num_iters", alias="reps", help="Measured repetitions.", parse=int, default=3),
        *REPORT_OPTIONS,
    ]  # fmt: skip
    return CommandLine("quire bench overhead", "Measure what the engine costs beside the model.", own)


def _parse_numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise ConfigError(f"{text}: the numbers must be 1 or more")
    return numbers


def run(args: Arguments) -> int:
    if args["num_iters"] < 1 or args["output_len"] < 4 * EDGE_TOKENS:
        raise ConfigError(f"--num-iters must be 1 or more, --output-len {4 * EDGE_TOKENS} or more")
    transports = list(TRANSPORTS) if args["transport"] == "both" else [args["transport"]]
    measure = resolve(RUNS)
    rows = [row for transport in transports for row in asyncio.run(measure(args, transport))]
    figures = {
        "benchmark": "overhead",
        **machine_facts(),
        "output_len": args["output_len"],
        "step_ms": args["step_ms"],
        "reps": args["num_iters"],
        "results": rows,
    }
    report(figures, args, format_overhead)
    return 0


def format_overhead(figures: dict[str, Any]) -> str:
    """Formats the figures as a table."""
    lines = [
        f"overhead beside the model, CPU time, median of {figures['reps']}; {figures['cpu']}",
        f"{'':<8}{'requests':>9}{'core':>18}{'frontend':>18}   us per token (per step)",
    ]
    for row in figures["results"]:
        cells = "".join(
            f"{row[f'{side}_us_per_token']:>9.2f} ({row[f'{side}_us_per_step']:.0f})".rjust(18)
            for side in ("core", "frontend")
        )
        lines.append(f"{row['transport']:<8}{row['concurrency']:>9}{cells}")
        for side in ("core", "frontend", "share_of_process"):
            parts = [f"{key.split('.')[1]} {value:.2f}" for key, value in row.items() if key.startswith(f"{side}.")]
            lines.append(f"{'':<19}{side.replace('_', ' ')}: {', '.join(parts)}")
    return "\n".join(lines)
