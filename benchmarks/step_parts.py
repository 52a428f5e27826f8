"""Measures the CPU time of a step by part: many short requests (W4), core and frontend in one process.

    python benchmarks/step_parts.py [--model tiny] [--requests 512]

Prints microseconds per generated token, of the thread that runs the loop and of the whole process: kernels work on all
threads, everything else on one. `host` is everything except the model.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "0"  # before the engine is imported

from models import CACHE, SHAPES, find_checkpoint

from quire import LLM, SamplingParams
from quire.cli.bench.workloads import WORKLOADS, IdRange
from quire.cli.machine import cpu_facts
from quire.engine.core import EngineCore
from quire.engine.sched.scheduler import Scheduler
from quire.frontend.output_processor import OutputProcessor
from quire.worker.model_runner import ModelRunner

PARTS: list[tuple[type, str]] = [
    (Scheduler, "schedule"),
    (ModelRunner, "execute_model"),
    (ModelRunner, "_forward"),
    (ModelRunner, "_compute_logits"),
    (ModelRunner, "sample_tokens"),
    (Scheduler, "update_from_output"),
    (EngineCore, "step"),
    (OutputProcessor, "process_outputs"),
]
MODEL = ("_forward", "_compute_logits")


class Stopwatch:
    """CPU seconds by name: of the calling thread, of the process."""

    def __init__(self) -> None:
        self.thread: defaultdict[str, float] = defaultdict(float)
        self.process: defaultdict[str, float] = defaultdict(float)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call`, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            thread, process = time.thread_time(), time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.thread[name] += time.thread_time() - thread
                self.process[name] += time.process_time() - process

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SHAPES)}, or a checkpoint directory")
    parser.add_argument("--models-dir", type=Path, default=CACHE)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    path = find_checkpoint(args.model, args.models_dir)
    watch = Stopwatch()
    for owner, name in PARTS:
        setattr(owner, name, watch.around(name, getattr(owner, name)))
    llm = LLM(str(path), dtype="bfloat16", max_num_seqs=256, kv_cache_memory_bytes=1 << 30)

    def generate(rep: int, num_requests: int) -> int:
        requests = WORKLOADS["W4"].make(rep, IdRange(300, 8100), num_requests)
        params = SamplingParams(temperature=args.temperature, max_tokens=64, ignore_eos=True, detokenize=False, seed=1)
        llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)
        return 64 * num_requests

    generate(1000, 32)
    watch.thread.clear()
    watch.process.clear()
    num_tokens = watch.around("all", generate)(0, args.requests)
    print(f"{cpu_facts()['cpu']}, {args.requests} requests of 32 + 64 tokens; us per token")
    print(f"{'part':<20} {'thread':>8} {'process':>8}")
    for name in [*(name for _, name in PARTS), "all"]:
        thread, process = (seconds[name] / num_tokens * 1e6 for seconds in (watch.thread, watch.process))
        print(f"{name:<20} {thread:>8.2f} {process:>8.2f}")
    host = watch.thread["all"] - sum(watch.thread[name] for name in MODEL)
    print(f"{'host':<20} {host / num_tokens * 1e6:>8.2f}")


if __name__ == "__main__":
    main()
