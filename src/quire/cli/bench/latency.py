"""`quire bench latency`: times one batch of equal requests at a time."""

from __future__ import annotations

from quire.cli.bench.throughput import COMMON_OPTIONS, run_benchmark
from quire.cli.bench.workloads import uniform_requests
from quire.cli.command_line import Arguments, CommandLine, Option
from quire.cli.option_groups import engine_options


def command_line() -> CommandLine:
    own = [
        Option(name="input_len", help="Prompt tokens.", parse=int, default=128),
        Option(name="output_len", help="Output tokens.", parse=int, default=128),
        Option(name="batch_size", help="Requests at once.", parse=int, default=1),
        *COMMON_OPTIONS,
    ]
    summary = "Time one request, or one batch of equal requests, from start to end."
    return CommandLine("quire bench latency", summary, [*own, *engine_options()])


def run(args: Arguments) -> int:
    lengths = args["input_len"], args["output_len"]
    return run_benchmark(args, "latency", lambda rep, ids: uniform_requests(rep, ids, args["batch_size"], *lengths, 1))
