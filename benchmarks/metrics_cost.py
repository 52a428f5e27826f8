"""What metrics cost: `python -m benchmarks.metrics_cost`, with src on the path.

Two numbers. How long a scrape takes, 20 times a second, beside 256 running requests whose outputs are processed all the
while (goal: p99 within 10 ms). And how much longer the frontend works on the outputs of a step with statistics than
without, as a share of what a step takes (goal: 1 %). With --model also what statistics cost many short requests
(W4): the CPU time of core and frontend on one thread, in pairs of short runs with and without (goal: 1 %), with the
model, which is most of it and of the noise, and without: the same work of the engine around a fake one; and, by the
clock, of two processes, which is how it is run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "0"  # before the engine is imported

from benchmarks.models import SHAPES, make_checkpoint
from quire import LLM
from quire.cli.bench.workloads import WORKLOADS, IdRange
from quire.config.engine_args import EngineArgs
from quire.frontend.metrics.process import ProcessMetrics
from quire.frontend.request_pipeline import RequestPipeline
from quire.sampling_params import SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.wire.engine_core import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
)
from quire.wire.stats import PrefillStats, SchedulerStats

READY = EngineCoreReadyResponse(4096, 2000, 16, 31984, 7.8, ("generate",))
PROMPT = list(range(64))


class Frontend:
    """A request pipeline without a core: `step` is one that gives each request a token."""

    def __init__(self, num_requests: int, *, log_stats: bool) -> None:
        config = EngineArgs("demo", skip_tokenizer_init=True, max_model_len=4096).create_engine_config("serving")
        self.pipeline = RequestPipeline(config, None, READY, log_stats=log_stats)
        self.ids = [f"request-{number}" for number in range(num_requests)]
        self.num_steps = 0
        for request_id in self.ids:
            params = SamplingParams(max_tokens=4000, ignore_eos=True)
            request = EngineCoreRequest(request_id, PROMPT, params, None, time.time(), external_req_id=request_id)
            receipt = self.pipeline.ledger.receive()
            self.pipeline.output_processor.add_request(request, None)
            receipt.accept_one()

    def make_outputs(self) -> EngineCoreOutputs:
        """What the core would send after its next step."""
        self.num_steps += 1
        is_first = self.num_steps == 1
        events = [EngineCoreEvent(kind, 1.0) for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)]
        outputs = [
            EngineCoreOutput(
                request_id,
                [self.num_steps % 250],
                events=events if is_first else None,
                prefill_stats=PrefillStats(64, 64) if is_first else None,
            )
            for request_id in self.ids
        ]
        stats = SchedulerStats(num_running_reqs=len(self.ids), kv_cache_usage=0.5, num_scheduled_tokens=len(self.ids))
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=1.0 + 0.02 * self.num_steps)

    def step(self, outputs: EngineCoreOutputs) -> None:
        """As `LLMEngine.step` does it."""
        books = self.pipeline.open_step(outputs)
        stats = books.open_batch()
        self.pipeline.output_processor.process_outputs(outputs.outputs, outputs.timestamp, stats)
        books.close_batch(stats)


def measure_steps(num_requests: int, num_steps: int) -> tuple[float, float]:
    """Microseconds of the frontend per step, with statistics and without: the fastest quarter of alternating ones."""
    frontends = {True: Frontend(num_requests, log_stats=True), False: Frontend(num_requests, log_stats=False)}
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(num_steps):
        for log_stats, frontend in frontends.items():
            outputs = frontend.make_outputs()
            start = time.thread_time()
            frontend.step(outputs)
            times[log_stats].append(time.thread_time() - start)
    fastest = {key: statistics.mean(sorted(values)[: num_steps // 4]) for key, values in times.items()}
    return 1e6 * fastest[True], 1e6 * fastest[False]


def measure_scrapes(num_requests: int, num_scrapes: int) -> dict[str, float]:
    """Milliseconds of a scrape, by the clock and of CPU time, which is what counts on a busy machine.

    The outputs of `num_requests` requests are processed in between.
    """
    frontend, process, rng = Frontend(num_requests, log_stats=True), ProcessMetrics(), random.Random(0)
    metrics = frontend.pipeline.stats.metrics
    assert metrics is not None
    times, cpu_times, num_bytes = [], [], 0
    for _ in range(num_scrapes):
        for _ in range(rng.randint(1, 3)):
            frontend.step(frontend.make_outputs())
        start, cpu_start = time.perf_counter(), time.thread_time()
        num_bytes = len(metrics.exposition() + process.exposition())
        cpu_times.append(1e3 * (time.thread_time() - cpu_start))
        times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    cpu_times.sort()
    return {
        "median_ms": times[len(times) // 2],
        "p99_ms": times[int(0.99 * len(times))],
        "cpu_p99_ms": cpu_times[int(0.99 * len(times))],
        "cpu_share_at_20_hz": 20 * statistics.mean(cpu_times) / 1e3,
        "bytes": num_bytes,
    }


class QuickExecutor(FakeExecutor):
    """A fake model with room for all requests of W4 at once."""

    available_bytes: ClassVar[int] = 1 << 24
    vocab_size: ClassVar[int] = 3000

    def _forward_request(self, req_id: str, num_tokens: int) -> int | None:
        """Any token will do: none is looked up in the memory."""
        request = self._requests[req_id]
        request.num_computed += num_tokens
        return request.num_computed if request.num_computed == len(request.tokens) else None


@dataclass(frozen=True)
class Costs:
    """CPU microseconds per token, in pairs of runs with statistics and without."""

    with_statistics: list[float]
    without: list[float]

    @property
    def differences(self) -> list[float]:
        """Of each pair."""
        return [a - b for a, b in zip(self.with_statistics, self.without, strict=True)]

    def summary(self, whole: float) -> dict[str, object]:
        """The median of the pairs' differences, with the bounds of its 95 % confidence interval (bootstrap), in
        microseconds per token and as a share of `whole`, what a token costs."""
        rng = random.Random(0)
        differences = self.differences
        medians = sorted(statistics.median(rng.choices(differences, k=len(differences))) for _ in range(2000))
        return {
            "pairs": len(differences),
            "with_statistics_us": statistics.median(self.with_statistics),
            "without_us": statistics.median(self.without),
            "cost_us": statistics.median(differences),
            "cost": statistics.median(differences) / whole,
            "cost_95_percent_interval": (medians[50] / whole, medians[-51] / whole),
        }


def measure_throughput(
    num_requests: int, num_pairs: int, clock: Callable[[], float] = time.thread_time, **engine_args: Any
) -> Costs:
    """What W4 costs: of its own time the thread that runs core and frontend, or by another clock.

    Many short runs, each beside one of the other kind: with the same prompts, the order changing from pair to pair, so
    that what disturbs the machine for longer than a second falls on both.
    """
    engines = {
        log_stats: LLM(**engine_args, max_num_seqs=256, disable_log_stats=not log_stats) for log_stats in (False, True)
    }
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    times: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(-1, num_pairs):
        requests = WORKLOADS["W4"].make(pair + 1, IdRange(300, 3000), num_requests)
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        for log_stats in (False, True) if pair % 2 else (True, False):
            gc.collect()
            start = clock()
            engines[log_stats].generate(prompts, params, use_tqdm=False)
            if pair >= 0:
                times[log_stats].append((clock() - start) / (64 * num_requests) * 1e6)
    for engine in engines.values():
        engine.shutdown()
    return Costs(times[True], times[False])


def measure_both(model: str, num_requests: int, num_pairs: int, num_clock_pairs: int) -> dict[str, object]:
    """W4 with the model, the engine's work on it alone, as shares of what W4 costs with the model, and W4 as users run
    it, in two processes, by the clock on the wall."""
    path = make_checkpoint(model, Path.home() / ".cache" / "quire-benchmarks") if model in SHAPES else Path(model)
    engine_args = {"model": str(path), "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 29}
    whole = measure_throughput(num_requests, num_pairs, **engine_args)
    executor = f"{QuickExecutor.__module__}:{QuickExecutor.__name__}"
    alone = measure_throughput(
        num_requests, num_pairs, model="demo", distributed_executor_backend=executor, skip_tokenizer_init=True
    )
    os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "1"
    by_the_clock = measure_throughput(num_requests, num_clock_pairs, time.perf_counter, **engine_args)
    per_token = statistics.median(whole.without)
    return {
        "throughput": whole.summary(per_token),
        "engine_alone": alone.summary(per_token),
        "two_processes_by_the_clock": by_the_clock.summary(statistics.median(by_the_clock.without)),
    }


def main() -> None:
    """Measure and print, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256, help="running requests")
    parser.add_argument("--scrapes", type=int, default=400)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step of so many requests takes the core")
    parser.add_argument("--model", default=None, help=f"{', '.join(SHAPES)}, or a checkpoint directory")
    parser.add_argument("--throughput-requests", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument(
        "--clock-pairs", type=int, default=None, help="of those by the clock, which need many more (default: --pairs)"
    )
    args = parser.parse_args()
    with_stats_us, without_us = measure_steps(args.requests, args.steps)
    cost: dict[str, object] = {
        "requests": args.requests,
        "frontend_us_per_step": {"with_statistics": with_stats_us, "without": without_us},
        "share_of_a_step": (with_stats_us - without_us) / (1e3 * args.step_ms),
        "scrape": measure_scrapes(args.requests, args.scrapes),
    }
    if args.model:
        cost |= measure_both(args.model, args.throughput_requests, args.pairs, args.clock_pairs or args.pairs)
    print(json.dumps(cost, indent=2))


if __name__ == "__main__":
    main()
