"""Measures the CPU time of a step by part: many short requests (W4), core and frontend in one process.

    python benchmarks/step_parts.py [--model tiny] [--requests 512]

Prints microseconds per generated token, of the thread that runs the loop and of the whole process: kernels work on all
threads, everything else on one. `host` is everything except the model.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "0"  # before the engine is imported

from models import CACHE, SHAPES, find_checkpoint

from quire import LLM, SamplingParams
from quire.cli.bench.overhead_runs import PhaseMeter
from quire.cli.bench.workloads import WORKLOADS, IdRange
from quire.cli.machine import cpu_facts

PARTS = {
    "schedule": ("quire.engine.sched.scheduler:Scheduler", "schedule"),
    "execute_model": ("quire.worker.model_runner:ModelRunner", "execute_model"),
    "_forward": ("quire.worker.model_runner:ModelRunner", "_forward"),
    "_compute_logits": ("quire.worker.model_runner:ModelRunner", "_compute_logits"),
    "sample_tokens": ("quire.worker.model_runner:ModelRunner", "sample_tokens"),
    "update_from_output": ("quire.engine.sched.scheduler:Scheduler", "update_from_output"),
    "step": ("quire.engine.core:EngineCore", "step"),
    "process_outputs": ("quire.frontend.output_processor:OutputProcessor", "process_outputs"),
}
MODEL = ("_forward", "_compute_logits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SHAPES)}, or a checkpoint directory")
    parser.add_argument("--models-dir", type=Path, default=CACHE)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    path = find_checkpoint(args.model, args.models_dir)
    meters = PhaseMeter(time.thread_time_ns), PhaseMeter(time.process_time_ns)
    with meters[0].installed(PARTS), meters[1].installed(PARTS):
        num_tokens = run(str(path), args.requests, args.temperature, meters)
    print(f"{cpu_facts()['cpu']}, {args.requests} requests of 32 + 64 tokens; us per token")
    print(f"{'part':<20} {'thread':>8} {'process':>8}")
    for name in (*PARTS, "all"):
        thread, process = (meter.spent_ns[name] / num_tokens / 1e3 for meter in meters)
        print(f"{name:<20} {thread:>8.2f} {process:>8.2f}")
    host = meters[0].spent_ns["all"] - sum(meters[0].spent_ns[name] for name in MODEL)
    print(f"{'host':<20} {host / num_tokens / 1e3:>8.2f}")


def run(model: str, num_requests: int, temperature: float, meters: Sequence[PhaseMeter]) -> int:
    """Warms up and runs the workload. Returns the number of tokens."""
    llm = LLM(model, dtype="bfloat16", max_num_seqs=256, kv_cache_memory_bytes=1 << 30)
    params = SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True, detokenize=False, seed=1)

    def generate(rep: int, count: int) -> None:
        requests = WORKLOADS["W4"].make(rep, IdRange(300, 8100), count)
        llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)

    generate(1000, 32)
    for meter in meters:
        meter.spent_ns.update(dict.fromkeys(meter.spent_ns, 0))
        generate = meter.wrap("all", generate)
    generate(0, num_requests)
    llm.shutdown()
    return 64 * num_requests


if __name__ == "__main__":
    main()
