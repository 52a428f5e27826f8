"""Measures several workers of one engine beside one worker with as many threads: steps, calls of workers, barriers.

    python benchmarks/parallel.py [--shapes half] [--workers 2] [--stages 1] [--rounds 5]

Each engine is started as `quire serve` starts it, without the frontend: a core's executor in this process. The two take
turns, with random weights. Decoding has 8 requests with 200 tokens each, in as many steps as there are stages; a
prefill step 512 tokens of one request. `--workers 1 --stages 2` measures a pipeline.
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

    def __init__(self, directory: str, num_workers: int, num_stages: int = 1) -> None:
        args = EngineArgs(
            directory, load_format="dummy", dtype="bfloat16", device="cpu", skip_tokenizer_init=True,
            tensor_parallel_size=num_workers, pipeline_parallel_size=num_stages, max_model_len=1024,
            max_num_seqs=NUM_REQS, num_gpu_blocks_override=600,
        )  # fmt: skip
        config = args.create_engine_config()
        self.executor: Executor = resolve(config.parallel_config.executor_class)(config)
        initialize_kv_caches(config, self.executor)
        self._number, self._finished, self._num_stages = 0, set[str](), num_stages
        self._tokens = dict[str, list[int]]()
        """The last token of each request."""

    def _send(self, output: SchedulerOutput) -> Callable[[], None]:
        """Submits a step. Returns a function that waits for it."""
        self.executor.execute_model(output, non_block=True)
        sampled: Any = self.executor.sample_tokens(None, non_block=True)

        def wait() -> None:
            result = sampled.result()
            self._tokens.update(zip(result.req_ids, result.sampled_token_ids, strict=True))

        return wait

    def _run(self, output: SchedulerOutput) -> float:
        start = time.perf_counter()
        self._send(output)()
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
        """Returns the median time in which every request gets a token. Each stage has a part of the requests."""
        ids, _ = self._begin([CONTEXT] * NUM_REQS)
        parts = [ids[i :: self._num_stages] for i in range(self._num_stages)]
        waits, times = list[Callable[[], None]](), list[float]()
        for number in range(STEPS + 1):
            start = time.perf_counter()
            for part in parts:
                if len(waits) == len(parts):
                    waits.pop(0)()
                done, tokens = [CONTEXT + number] * len(part), {i: self._tokens[i] for i in part}
                cached = CachedRequestData(part, [None] * len(part), done, tokens)
                step = SchedulerOutput(
                    [], cached, num_scheduled_tokens=dict.fromkeys(part, 1), total_num_scheduled_tokens=len(part)
                )
                waits.append(self._send(step))
            times.append(time.perf_counter() - start)
        for wait in waits:
            wait()
        return statistics.median(times[1:])

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


def step_round_trip(executor: Executor, num_bytes: int, count: int = 2000) -> list[float]:
    """Returns the times of steps without tokens, of `num_bytes`, sorted: one worker answers."""
    times, output = [], SchedulerOutput([], finished_req_ids={"x" * num_bytes})
    for _ in range(count):
        start = time.perf_counter()
        executor.execute_model(output)
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
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shape: dict[str, Any] = SHAPES[options.shapes]
    with tempfile.TemporaryDirectory() as directory:
        config = {**shape, "architectures": [ARCHITECTURES[shape["model_type"]]], "tie_word_embeddings": True}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        one, several = Steps(directory, 1), Steps(directory, options.workers, options.stages)
    kinds: dict[str, Callable[[Steps], float]] = {"decode": Steps.decode, "prefill": Steps.prefill}
    for kind, measure in kinds.items():
        measure(one), measure(several)
        pairs = [(measure(one), measure(several)) for _ in range(options.rounds)]
        single, many = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{kind:10} one worker {single * 1e3:8.2f} ms   {options.stages} x {options.workers} workers "
            f"{many * 1e3:8.2f} ms   "
            f"speed {single / many:.3f} of one worker's"
        )
    show("a call of all workers, 10 KB", round_trip(several.executor, 10_000))
    show("a step without tokens, 10 KB", step_round_trip(several.executor, 10_000))
    if options.workers > 1:
        barriers = several.executor.collective_rpc("call_function", args=("parallel:time_barriers", [20_000], {}))
        show("a barrier", barriers[0])
    one.executor.shutdown()
    several.executor.shutdown()


if __name__ == "__main__":
    main()
