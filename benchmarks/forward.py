"""Measures a decode step of a whole model: from a plan, module by module, and the time to read its weights.

    python benchmarks/forward.py [--shapes tiny] [--reqs 1,16,64] [--length 256] [--threads N]

Weights are random. Times are the best and the median of several steps; the two ways take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from ceilings import Clock, ceilings
from models import SHAPES

from quire.cli.machine import cpu_facts
from quire.config.engine_args import EngineArgs
from quire.wire.kv_cache import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.worker.attention import native_backend
from quire.worker.attention.backend import AttentionBatch
from quire.worker.kernels.native import NativeKernels
from quire.worker.worker import Worker

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
PLANNED, BY_MODULES = native_backend.MAX_PLANNED_TOKENS, 0


def make_worker(shapes: str, dtype: str, num_blocks: int) -> Worker:
    """Returns a worker with random weights and a cache of `num_blocks` blocks."""
    shape = SHAPES[shapes]
    with tempfile.TemporaryDirectory() as directory:
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


def time_steps(worker: Worker, reqs: int, length: int, seconds: float) -> dict[int, list[float]]:
    """Returns seconds of decode steps of `reqs` requests with `length` tokens each, by the largest planned step."""
    runner = worker.runner
    size = runner.kv_cache.block_sizes[0]
    blocks = -(-length // size)
    table = torch.arange(1, reqs * blocks + 1, dtype=torch.int32).view(reqs, blocks)
    slots = (table[:, (length - 1) // size] * size + (length - 1) % size).long()
    ones = np.ones(reqs, np.int64)
    batch = AttentionBatch(ones, np.full(reqs, length), table, slots)
    ids, positions = torch.arange(reqs), torch.full((reqs,), length - 1)
    times: dict[int, list[float]] = {PLANNED: [], BY_MODULES: []}
    deadline = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < deadline or len(times[PLANNED]) < 5:
            for limit, taken in times.items():
                native_backend.MAX_PLANNED_TOKENS = limit
                start = Clock.now()
                hidden = runner._forward(ids, positions, ones, [batch] * len(runner.kv_cache.specs), runner.kv_cache)
                runner.model.compute_logits(hidden)
                taken.append(Clock.now() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--reqs", default="1,16,64")
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
