"""Quire and transformers on the same checkpoint, the same token ids and the same threads, in one run.

    python benchmarks/versus_transformers.py --model tiny --workloads W1,W2,W3 --reps 3

Repetitions are interleaved (quire, transformers, transformers, quire, ...), so that a noisy neighbour meets both. The
ratio is transformers' median time over Quire's: above 1, Quire is faster. transformers runs `generate` on left-padded
batches of requests sorted by output length, which is the kindest order for it; every output has its full length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from models import SHAPES, make_checkpoint
from transformers import AutoModelForCausalLM

from quire import EngineArgs, __version__
from quire.cli.bench.measure import RunResult, run_requests, summarize
from quire.cli.bench.workloads import WARMUP_REP, WORKLOADS, BenchRequest, IdRange
from quire.cli.generation import RequestTiming, make_engine
from quire.cli.machine import cpu_facts


class _Stopwatch:
    """A transformers streamer that keeps only when tokens came. The first call brings the prompt."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: Any) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass


class TransformersRunner:
    """The peer."""

    def __init__(self, checkpoint: Path, dtype: str, batch_size: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
        self._batch_size = batch_size

    def run(self, requests: list[BenchRequest]) -> RunResult:
        """All of `requests`, in batches. A single request is timed token by token."""
        ordered = sorted(requests, key=lambda r: (r.output_len, len(r.prompt_token_ids)))
        stopwatch = _Stopwatch() if len(requests) == 1 else None
        start = time.perf_counter()
        for i in range(0, len(ordered), self._batch_size):
            self._generate(ordered[i : i + self._batch_size], stopwatch)
        result = RunResult(time.perf_counter() - start)
        for request in ordered:
            timing = RequestTiming(start, None, None, len(request.prompt_token_ids), 0, request.output_len)
            if stopwatch is not None:
                stamps = stopwatch.stamps[1:]
                timing.first_token_s, timing.last_token_s = stamps[0], stamps[-1]
                timing.gaps_s = [b - a for a, b in itertools.pairwise(stamps)]
            result.timings.append(timing)
        return result

    def _generate(self, requests: list[BenchRequest], stopwatch: _Stopwatch | None) -> None:
        width = max(len(r.prompt_token_ids) for r in requests)
        longest = max(r.output_len for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[row, width - len(request.prompt_token_ids) :] = 1
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, min_new_tokens=longest,
                eos_token_id=None, pad_token_id=0, streamer=stopwatch,
            )  # fmt: skip


def compare(workload: str, quire: Any, peer: TransformersRunner, ids: IdRange, reps: int) -> dict[str, Any]:
    """Both on one workload: their figures, and the ratio of their median wall times."""
    make = WORKLOADS[workload].make
    runners = {"quire": lambda requests: run_requests(quire, requests), "transformers": peer.run}
    for run in runners.values():
        run(make(WARMUP_REP, ids, None if workload == "W1" else 8))
    runs: dict[str, list[RunResult]] = {name: [] for name in runners}
    for rep in range(reps):
        requests = make(rep, ids, None)
        for name in runners if rep % 2 == 0 else reversed(runners):
            runs[name].append(runners[name](requests))
    figures = {name: summarize(results) for name, results in runs.items()}
    ratio = figures["transformers"]["wall_s"] / figures["quire"]["wall_s"]
    return {"workload": workload, "ratio": round(ratio, 2), **figures}


def format_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    cells = [f"{row['workload']:<4}"]
    for name in ("quire", "transformers"):
        figures = row[name]
        times = "".join(f"{figures[key].get('p50', float('nan')):>9.1f}" for key in ("ttft_ms", "tpot_ms"))
        cells.append(f"{figures['wall_s']:>9.3f}{figures['output_tokens_per_s']:>10.0f}{times}")
    return " |".join(cells) + f" |{row['ratio']:>8.2f}x"


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SHAPES)}, or a checkpoint directory")
    parser.add_argument("--models-dir", type=Path, default=Path.home() / ".cache" / "quire-benchmarks")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch-size", type=int, default=16, help="of transformers")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    checkpoint = make_checkpoint(args.model, args.models_dir) if args.model in SHAPES else Path(args.model)
    flags = EngineArgs(
        str(checkpoint), dtype=args.dtype, device="cpu", skip_tokenizer_init=True, disable_log_stats=True
    )
    quire, peer = make_engine(flags), TransformersRunner(checkpoint, args.dtype, args.batch_size)
    ids = IdRange.of_vocabulary(quire.model_config.hf_config.vocab_size)
    names = f"quire {__version__}", f"transformers {transformers.__version__}, batches of {args.batch_size}"
    print(f"{args.model}, {args.dtype}, {args.threads} threads, {cpu_facts()['cpu']}; times are medians")
    print(f"    |{names[0]:^37} |{names[1]:^37} |")
    print("    |" + "   wall s     tok/s  TTFT ms  TPOT ms |" * 2 + "   ratio", flush=True)
    rows = []
    for workload in args.workloads.split(","):
        rows.append(compare(workload, quire, peer, ids, args.reps))
        print(format_row(rows[-1]), flush=True)
    if args.output_json is not None:
        facts = {"model": args.model, "dtype": args.dtype, "threads": args.threads, "peers": names, **cpu_facts()}
        args.output_json.write_text(json.dumps({**facts, "workloads": rows}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
