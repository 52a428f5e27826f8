"""What the two benchmarks share: their common flags, the engine they measure, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire import __version__
from quire.cli.bench.measure import run_requests, summarize
from quire.cli.bench.workloads import WARMUP_REP, BenchRequest, IdRange
from quire.cli.engine_options import engine_args
from quire.cli.generation import make_engine
from quire.cli.machine import cpu_facts
from quire.cli.options import Arguments, Option
from quire.config.model import resolve_dtype_name
from quire.errors import ConfigError

COMMON_OPTIONS = (
    Option(name="num_iters", alias="reps", help="Measured repetitions.", parse=int, default=3),
    Option(name="num_iters_warmup", help="Repetitions before those.", parse=int, default=1),
    Option(name="output_json", help="Also write the figures to this file.", metavar="FILE"),
    Option(name="json", help="Print one JSON object instead of a table.", is_switch=True, default=False),
)

MakeRequests = Callable[[int, IdRange], list[BenchRequest]]


def run_benchmark(args: Arguments, name: str, make_requests: MakeRequests) -> int:
    """Warm up, repeat, report. `make_requests(rep, ids)` gives the requests of one repetition."""
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
        **_machine(),
    }
    report({**facts, **summarize(runs)}, args)
    return 0


def report(figures: dict[str, Any], args: Arguments, format: Callable[[dict[str, Any]], str] | None = None) -> None:
    """Print `figures`, in the words of `format` or as --json says, and write --output-json."""
    if args["output_json"] is not None:
        path = Path(args["output_json"])
        try:
            path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"--output-json {path}: {e.strerror or e}") from None
    print(json.dumps(figures) if args["json"] else (format or format_table)(figures))


def format_table(figures: dict[str, Any]) -> str:
    """The figures as people read them."""
    lines = [
        f"{figures['benchmark']} of {figures['model']}: {figures['num_requests']} requests, "
        f"{figures['prompt_tokens']} prompt + {figures['output_tokens']} output tokens, median of {figures['reps']}",
        f"  {'wall':<22}{figures['wall_s']:>12.3f} s   ({', '.join(f'{w:.3f}' for w in figures['walls_s'])})",
        f"  {'output':<22}{figures['output_tokens_per_s']:>12.1f} tok/s",
        f"  {'prompt + output':<22}{figures['total_tokens_per_s']:>12.1f} tok/s",
        f"  {'requests':<22}{figures['requests_per_s']:>12.2f} /s",
        f"  {'prompt tokens cached':<22}{figures['cached_tokens']:>12.0f}",
        "",
        f"  {'ms':<22}" + "".join(f"{column:>12}" for column in ("mean", "p50", "p90", "p99")),
    ]
    rows = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms"))
    for title, key in rows:
        if figures[key]:
            lines.append(f"  {title:<22}" + "".join(f"{value:>12.2f}" for value in figures[key].values()))
    return "\n".join(lines)


def _machine() -> dict[str, Any]:
    facts = cpu_facts()
    return {"quire": __version__, "cpu": facts["cpu"], "cores": facts["usable_cores"]}
