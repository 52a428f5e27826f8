"""Measures several workers of one engine beside one worker with as many threads: steps, calls of workers, barriers.

    python benchmarks/parallel.py [--shapes half] [--workers 2] [--rounds 5]

Each engine is started as `quire serve` starts it, without the frontend: a core's executor in this process. The two take
turns, with random weights. A decode step has 8 requests with 200 tokens each; a prefill step 512 tokens of one request.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import SHAPES

from quire.config.engine_args import EngineArgs
from quire.engine.executor.abstract import Executor
from quire.engine.kv_cache.sizing import initialize_kv_caches
from quire.resolve import resolve
from quire.sampling_params import SamplingParams
from quire.wire.execution import CachedRequestData, NewRequestData, SchedulerOutput

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NUM_REQS, CONTEXT, PREFILL, STEPS = 8, 200, 512, 12
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Steps:
    """An executor with loaded workers, and steps for it."""

    def __init__(self, directory: str, num_workers: int) -> None:
        args = EngineArgs(
            directory, load_format="dummy", dtype="bfloat16", device="cpu", skip_tokenizer_init=True,
            tensor_parallel_size=num_workers, max_model_len=1024, max_num_seqs=NUM_REQS, num_gpu_blocks_override=600,
        )  # fmt: skip
        config = args.create_engine_config()
        self.executor: Executor = resolve(config.parallel_config.executor_class)(config)
        initialize_kv_caches(config, self.executor)
        self._number, self._finished = 0, set[str]()

    def _run(self, output: SchedulerOutput) -> float:
        start = time.perf_counter()
        self.executor.execute_model(output)
        self.executor.sample_tokens(None)
        return time.perf_counter() - start

    def _begin(self, lens: list[int]) -> tuple[list[str], float]:
        """Runs the prompts of new requests, which take the place of the former ones."""
        self._number += 1
        ids, start, new = [f"{self._number}.{i}" for i in range(len(lens))], 1, list[NewRequestData]()
        for name, n in zip(ids, lens, strict=True):
            count = -(-(n + STEPS + 1) // 16)
            new.append(NewRequestData(name, list(range(5, 5 + n)), (list(range(start, start + count)),), 0, GREEDY))
            start += count
        step = SchedulerOutput(
            new, num_scheduled_tokens=dict(zip(ids, lens, strict=True)), total_num_scheduled_tokens=sum(lens),
            finished_req_ids=self._finished,
        )  # fmt: skip
        self._finished = set(ids)
        return ids, self._run(step)

    def decode(self) -> float:
        """Returns the median time of a decode step."""
        ids, _ = self._begin([CONTEXT] * NUM_REQS)
        times = []
        for number in range(STEPS):
            cached = CachedRequestData(ids, [None] * len(ids), [CONTEXT + number] * len(ids))
            steps = dict.fromkeys(ids, 1)
            times.append(
                self._run(SchedulerOutput([], cached, num_scheduled_tokens=steps, total_num_scheduled_tokens=8))
            )
        return statistics.median(times)

    def prefill(self) -> float:
        """Returns the time of a prefill step."""
        return self._begin([PREFILL])[1]


def round_trip(executor: Executor, num_bytes: int, count: int = 2000) -> list[float]:
    """Returns the times of calls that do nothing, with an argument of `num_bytes`, sorted."""
    times, text = [], "x" * num_bytes
    for _ in range(count):
        start = time.perf_counter()
        executor.collective_rpc(operator.is_, args=(text,))  # does next to nothing
        times.append(time.perf_counter() - start)
    return sorted(times)


def time_barriers(worker: Any, count: int) -> list[float]:
    """Returns the times of barriers with nothing else to do, sorted. Runs in every worker."""
    ready, times = worker._collectives.ready, list[float]()
    for _ in range(count):
        start = time.perf_counter()
        ready()
        times.append(time.perf_counter() - start)
    return sorted(times)


def show(name: str, times: list[float]) -> None:
    """Prints the median and the 99th percentile of sorted times."""
    median, high = times[len(times) // 2] * 1e6, times[len(times) * 99 // 100] * 1e6
    print(f"{name:32} p50 {median:8.1f} us   p99 {high:8.1f} us")


def main() -> None:
    """Runs the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="half")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shape: dict[str, Any] = SHAPES[options.shapes]
    with tempfile.TemporaryDirectory() as directory:
        config = {**shape, "architectures": [ARCHITECTURES[shape["model_type"]]], "tie_word_embeddings": True}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        one, several = Steps(directory, 1), Steps(directory, options.workers)
    kinds: dict[str, Callable[[Steps], float]] = {"decode": Steps.decode, "prefill": Steps.prefill}
    for kind, measure in kinds.items():
        measure(one), measure(several)
        pairs = [(measure(one), measure(several)) for _ in range(options.rounds)]
        single, many = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{kind:10} one worker {single * 1e3:8.2f} ms   {options.workers} workers {many * 1e3:8.2f} ms   "
            f"speed {single / many:.3f} of one worker's"
        )
    show("a call of all workers, 10 KB", round_trip(several.executor, 10_000))
    show(
        "a barrier", several.executor.collective_rpc("call_function", args=("parallel:time_barriers", [20_000], {}))[0]
    )
    one.executor.shutdown()
    several.executor.shutdown()


if __name__ == "__main__":
    main()
