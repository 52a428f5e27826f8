"""Measures a decode step of a whole model: from a plan, module by module, and the time to read its weights.

    python benchmarks/forward.py [--shapes tiny] [--reqs 1,16,64] [--length 256] [--threads N]
    python benchmarks/forward.py [--shapes half] --rows 1,2,3,5,9,17

The second way measures steps of several rows of one request, as speculation verifies drafts, with the logits of each
row. Weights are random but those of `demo`. Times are the best and the median of several steps; what is compared takes
turns in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from ceilings import Clock, ceilings
from models import SHAPES

from quire.cli.machine import cpu_facts
from quire.config.engine_args import EngineArgs
from quire.config.model import DEMO_MODEL
from quire.wire.kv_cache import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.worker.attention import native_backend
from quire.worker.attention.backend import AttentionBatch
from quire.worker.kernels.native import NativeKernels
from quire.worker.worker import Worker

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
PLANNED, BY_MODULES = native_backend.MAX_PLANNED_TOKENS, 0


def make_worker(shapes: str, dtype: str, num_blocks: int) -> Worker:
    """Returns a worker with random weights, or the demo's, and a cache of `num_blocks` blocks."""
    with tempfile.TemporaryDirectory() as directory:
        if shapes == DEMO_MODEL:
            args = EngineArgs(DEMO_MODEL, dtype=dtype, device="cpu")
        else:
            shape = SHAPES[shapes]
            config = {**shape, "architectures": [ARCHITECTURES[shape["model_type"]]], "tie_word_embeddings": True}
            (Path(directory) / "config.json").write_text(json.dumps(config))
            args = EngineArgs(directory, load_format="dummy", dtype=dtype, device="cpu", skip_tokenizer_init=True)
        worker = Worker(args.create_engine_config())
        worker.init_device()
        specs = worker.get_kv_cache_spec()
    kinds = list(dict.fromkeys(specs.values()))
    groups = [KVCacheGroupSpec([n for n, s in specs.items() if s == kind], kind) for kind in kinds]
    tensors = [KVCacheTensor(num_blocks * spec.page_size_bytes, [name]) for name, spec in specs.items()]
    worker.initialize_from_config(KVCacheConfig(num_blocks, tensors, groups))
    return worker


def weight_bytes(worker: Worker) -> int:
    """Returns the bytes of weights that a step of one token reads, all experts included."""
    return sum(p.numel() * p.element_size() for p in worker.get_model().parameters())


def make_step(worker: Worker, reqs: int, rows: int, length: int) -> Callable[[], object]:
    """Returns a step of the last `rows` tokens of `reqs` requests with `length` tokens each, logits of all included."""
    runner = worker.runner
    size = runner.kv_cache.block_sizes[0]
    blocks = -(-length // size)
    table = torch.arange(1, reqs * blocks + 1, dtype=torch.int32).view(reqs, blocks)
    positions = torch.arange(length - rows, length)
    slots = (table[:, positions // size] * size + positions % size).long().reshape(-1)
    query_lens = np.full(reqs, rows)
    batch = AttentionBatch(query_lens, np.full(reqs, length), table, slots)
    ids = torch.arange(reqs * rows)

    def step() -> None:
        attention = [batch] * len(runner.kv_cache.specs)
        hidden, *_ = runner._forward(ids, positions.repeat(reqs), query_lens, attention, runner.kv_cache)
        runner.model.compute_logits(hidden)

    return step


def time_steps(worker: Worker, reqs: int, length: int, seconds: float) -> dict[int, list[float]]:
    """Returns seconds of decode steps of `reqs` requests with `length` tokens each, by the largest planned step."""
    step = make_step(worker, reqs, 1, length)
    times: dict[int, list[float]] = {PLANNED: [], BY_MODULES: []}
    deadline = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < deadline or len(times[PLANNED]) < 5:
            for limit, taken in times.items():
                native_backend.MAX_PLANNED_TOKENS = limit
                start = Clock.now()
                step()
                taken.append(Clock.now() - start)
    return times


def time_rows(worker: Worker, rows: list[int], length: int, seconds: float) -> list[list[float]]:
    """Returns seconds of steps of so many rows of one request with `length` tokens."""
    steps = [make_step(worker, 1, n, length) for n in rows]
    times: list[list[float]] = [[] for _ in rows]
    deadline = time.perf_counter() + seconds * len(rows)
    with torch.inference_mode():
        for step in steps:
            step()
        while time.perf_counter() < deadline or len(times[0]) < 5:
            for step, taken in zip(steps, times, strict=True):
                start = Clock.now()
                step()
                taken.append(Clock.now() - start)
    return times


def print_rows(worker: Worker, rows: list[int], length: int, seconds: float) -> None:
    """Prints the times of steps by rows, beside the first."""
    times = time_rows(worker, rows, length, seconds)
    print("rows |  best, median ms | of the first: best, median | a row more: best, median %")
    best, median = [min(t) for t in times], [statistics.median(t) for t in times]
    for n, b, m in zip(rows, best, median, strict=True):
        more = max(1, n - rows[0])
        ratios = b / best[0], m / median[0]
        shares = " ".join(f"{100 * (r - 1) / more:>12.1f}" for r in ratios)
        print(f"{n:>4} | {b * 1e3:>8.3f} {m * 1e3:>8.3f} | {ratios[0]:>12.3f} {ratios[1]:>12.3f} | {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tiny", choices=[*sorted(SHAPES), DEMO_MODEL])
    parser.add_argument("--reqs", default="1,16,64")
    parser.add_argument("--rows", help="measure steps of so many rows of one request instead")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, with --threads 1")
    args = parser.parse_args()
    if args.cpu_time:
        Clock.count_processor_time()
    torch.set_num_threads(args.threads)
    reqs = [int(n) for n in args.reqs.split(",")]
    worker = make_worker(args.shapes, args.dtype, max(reqs) * -(-args.length // 16) + 1)
    assert isinstance(worker.kernels, NativeKernels), "the native library is not built: scripts/setup"
    context = worker.kernels.context
    bandwidth, _ = ceilings(context)
    limit = weight_bytes(worker) / bandwidth
    print(
        f"{cpu_facts()['cpu']}, {context.num_threads} threads, {context.instruction_set}, {args.dtype}, {args.shapes}"
    )
    print(f"{bandwidth / 1e9:.1f} GB/s read; at that rate the weights take {limit * 1e3:.3f} ms\n")
    if args.rows:
        print_rows(worker, [int(n) for n in args.rows.split(",")], args.length, args.seconds)
        return
    print("requests |  planned: best, median ms |  by modules: best, median ms |  ratio of medians")
    for n in reqs:
        times = time_steps(worker, n, args.length, args.seconds)
        (best, median), (slow_best, slow_median) = (
            (min(taken) * 1e3, statistics.median(taken) * 1e3) for taken in times.values()
        )
        print(
            f"{n:>8} | {best:>12.3f} {median:>12.3f} | {slow_best:>15.3f} {slow_median:>12.3f} |"
            f" {slow_median / median:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
