"""`quire bench throughput`: many requests at once, all handed in at the start."""

from __future__ import annotations

from quire.cli.bench.offline import COMMON_OPTIONS, run_benchmark
from quire.cli.bench.workloads import WORKLOADS, BenchRequest, IdRange, mixed_requests, uniform_requests
from quire.cli.command_line import Arguments, CommandLine, Option
from quire.cli.option_groups import engine_options


def command_line() -> CommandLine:
    """The arguments of `quire bench throughput`."""
    named = "; ".join(f"{w.name}: {w.description}" for w in WORKLOADS.values())
    own = [
        Option(name="workload", help=f"{named}; mixed: log-normal lengths; uniform: equal lengths.",
               choices=(*WORKLOADS, "mixed", "uniform"), default="mixed"),
        Option(name="num_prompts", help="Requests; the named workloads have their own number.", parse=int),
        Option(name="input_len", help="Prompt tokens (mixed: their mean).", parse=int, default=200),
        Option(name="output_len", help="Output tokens (mixed: their mean).", parse=int, default=128),
        *COMMON_OPTIONS,
    ]  # fmt: skip
    summary = "Time many requests that are handed in at once."
    return CommandLine("quire bench throughput", summary, [*own, *engine_options()])


def run(args: Arguments) -> int:
    """Measure and report."""
    return run_benchmark(args, f"throughput {args['workload']}", lambda rep, ids: _make_requests(args, rep, ids))


def _make_requests(args: Arguments, rep: int, ids: IdRange) -> list[BenchRequest]:
    count = args["num_prompts"]
    workload = WORKLOADS.get(args["workload"])
    if workload is not None:
        return workload.make(rep, ids, count)
    make = mixed_requests if args["workload"] == "mixed" else uniform_requests
    return make(rep, ids, count or 64, args["input_len"], args["output_len"])
