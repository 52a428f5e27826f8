"""`quire bench throughput` and `bench latency`: time many requests at once, or one batch at a time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire import __version__
from quire.cli.bench.outcomes import LATENCIES, latency_lines, percentiles_ms
from quire.cli.bench.workloads import WARMUP_REP, WORKLOADS, BenchRequest, IdRange, mixed_requests, uniform_requests
from quire.cli.command_line import Arguments, CommandLine, Option
from quire.cli.generation import Engine, RequestTiming, make_engine
from quire.cli.machine import cpu_facts
from quire.cli.option_groups import engine_args, engine_options
from quire.cli.terminal import write_file
from quire.config.model import resolve_dtype_name
from quire.errors import ConfigError, GenerationError
from quire.sampling_params import RequestOutputKind, SamplingParams

REPORT_OPTIONS = (
    Option(name="output_json", help="Also write the figures to this file.", metavar="FILE"),
    Option(name="json", help="Print one JSON object instead of a table.", is_switch=True, default=False),
)
COMMON_OPTIONS = (
    Option(name="num_iters", alias="reps", help="Measured repetitions.", parse=int, default=3),
    Option(name="num_iters_warmup", help="Repetitions before the measured ones.", parse=int, default=1),
    *REPORT_OPTIONS,
)

MakeRequests = Callable[[int, IdRange], list[BenchRequest]]


def run_benchmark(args: Arguments, name: str, make_requests: MakeRequests) -> int:
    """Warms up, repeats and reports. `make_requests(rep, ids)` returns the requests of one repetition."""
    for option in ("num_iters", "num_iters_warmup"):
        if args[option] < (1 if option == "num_iters" else 0):
            raise ConfigError(f"--{option.replace('_', '-')} {args[option]} is too small")
    flags = engine_args(args, skip_tokenizer_init=True, disable_log_stats=True)
    config = flags.create_engine_config()
    model = config.model_config
    ids = IdRange.of_vocabulary(model.hf_config.vocab_size)
    engine = make_engine(flags)
    for i in range(args["num_iters_warmup"]):
        run_requests(engine, make_requests(WARMUP_REP + i, ids))
    runs = [run_requests(engine, make_requests(rep, ids)) for rep in range(args["num_iters"])]
    facts = {
        "benchmark": name,
        "model": model.name,
        "dtype": resolve_dtype_name(model, config.device_config.device),
        **machine_facts(),
    }
    report({**facts, **summarize(runs)}, args)
    return 0


def report(figures: dict[str, Any], args: Arguments, format: Callable[[dict[str, Any]], str] | None = None) -> None:
    """Prints `figures` through `format` or as --json asks, and writes --output-json."""
    if args["output_json"] is not None:
        write_file(args["output_json"], json.dumps(figures, indent=2) + "\n", "--output-json")
    print(json.dumps(figures) if args["json"] else (format or format_table)(figures))


def format_table(figures: dict[str, Any]) -> str:
    """Formats the figures as a table."""
    lines = [
        f"{figures['benchmark']} of {figures['model']}: {figures['num_requests']} requests, "
        f"{figures['prompt_tokens']} prompt + {figures['output_tokens']} output tokens, median of {figures['reps']}",
        f"  {'wall':<22}{figures['wall_s']:>12.3f} s   ({', '.join(f'{w:.3f}' for w in figures['walls_s'])})",
        f"  {'output':<22}{figures['output_tokens_per_s']:>12.1f} tok/s",
        f"  {'prompt + output':<22}{figures['total_tokens_per_s']:>12.1f} tok/s",
        f"  {'requests':<22}{figures['requests_per_s']:>12.2f} /s",
        f"  {'prompt tokens cached':<22}{figures['cached_tokens']:>12.0f}",
        "",
        *latency_lines(figures, LATENCIES),
    ]
    return "\n".join(lines)


def machine_facts() -> dict[str, Any]:
    facts = cpu_facts()
    return {"quire": __version__, "cpu": facts["cpu"], "cores": facts["usable_cores"]}


@dataclass
class RunResult:
    """One repetition: wall time from the first request to the last token, and each request's times."""

    wall_s: float
    timings: list[RequestTiming] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(t.num_prompt_tokens for t in self.timings)

    @property
    def num_output_tokens(self) -> int:
        return sum(t.num_output_tokens for t in self.timings)

    @property
    def num_cached_tokens(self) -> int:
        return sum(t.num_cached_tokens for t in self.timings)


def run_requests(engine: Engine, requests: Sequence[BenchRequest]) -> RunResult:
    """Hands in all of `requests` at once and steps the engine until it is idle. Greedy, end-of-sequence ignored."""
    timings: dict[str, RequestTiming] = {}
    start = time.perf_counter()
    for i, request in enumerate(requests):
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=request.output_len,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        timings[str(i)] = RequestTiming(added_s=time.perf_counter())
        engine.add_request(str(i), {"prompt_token_ids": request.prompt_token_ids}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timings[output.request_id].record(output, now)
            for o in output.outputs:
                if o.finish_reason == "error":
                    raise GenerationError(o.error_message or "the engine failed")
    return RunResult(time.perf_counter() - start, list(timings.values()))


def summarize(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Returns the figures of several repetitions: medians of wall time and rates, percentiles over all requests."""
    wall = statistics.median(run.wall_s for run in runs)
    prompt, output = runs[0].num_prompt_tokens, runs[0].num_output_tokens
    timings = [t for run in runs for t in run.timings]
    return {
        "num_requests": len(runs[0].timings),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": statistics.median(run.num_cached_tokens for run in runs),
        "reps": len(runs),
        "wall_s": round(wall, 4),
        "walls_s": [round(run.wall_s, 4) for run in runs],
        "output_tokens_per_s": round(output / wall, 1),
        "total_tokens_per_s": round((prompt + output) / wall, 1),
        "requests_per_s": round(len(runs[0].timings) / wall, 3),
        "ttft_ms": percentiles_ms([t.ttft_s for t in timings if t.ttft_s is not None]),
        "tpot_ms": percentiles_ms([t.tpot_s for t in timings if t.tpot_s is not None]),
        "itl_ms": percentiles_ms([gap for t in timings for gap in t.gaps_s]),
        "e2e_ms": percentiles_ms([t.last_token_s - t.added_s for t in timings if t.last_token_s is not None]),
    }


def command_line() -> CommandLine:
    named = "; ".join(f"{w.name}: {w.description}" for w in WORKLOADS.values())
    own = [
        Option(name="workload", help=f"{named}; mixed: log-normal lengths; uniform: equal lengths.",
               choices=(*WORKLOADS, "mixed", "uniform"), default="mixed"),
        Option(name="num_prompts", help="Number of requests; the named workloads have their own.", parse=int),
        Option(name="input_len", help="Prompt tokens (mixed: their mean).", parse=int, default=200),
        Option(name="output_len", help="Output tokens (mixed: their mean).", parse=int, default=128),
        *COMMON_OPTIONS,
    ]  # fmt: skip
    summary = "Time many requests that are handed in at once."
    return CommandLine("quire bench throughput", summary, [*own, *engine_options()])


def run(args: Arguments) -> int:
    return run_benchmark(args, f"throughput {args['workload']}", lambda rep, ids: _make_requests(args, rep, ids))


def _make_requests(args: Arguments, rep: int, ids: IdRange) -> list[BenchRequest]:
    count = args["num_prompts"]
    workload = WORKLOADS.get(args["workload"])
    if workload is not None:
        return workload.make(rep, ids, count)
    make = mixed_requests if args["workload"] == "mixed" else uniform_requests
    return make(rep, ids, count or 64, args["input_len"], args["output_len"])


def latency_command_line() -> CommandLine:
    own = [
        Option(name="input_len", help="Prompt tokens.", parse=int, default=128),
        Option(name="output_len", help="Output tokens.", parse=int, default=128),
        Option(name="batch_size", help="Requests at once.", parse=int, default=1),
        *COMMON_OPTIONS,
    ]
    summary = "Time one request, or one batch of equal requests, from start to end."
    return CommandLine("quire bench latency", summary, [*own, *engine_options()])


def latency_run(args: Arguments) -> int:
    lengths = args["input_len"], args["output_len"]
    return run_benchmark(args, "latency", lambda rep, ids: uniform_requests(rep, ids, args["batch_size"], *lengths, 1))
