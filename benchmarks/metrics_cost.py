"""Measures the cost of metrics: `python -m benchmarks.metrics_cost`, with src on the path.

| figure | goal |
|---|---|
| time of a scrape, 20 times a second, beside 256 running requests whose outputs are processed | p99 within 10 ms |
| additional time of the frontend for the outputs of a step, as a share of a step | 1 % |
| with --model: the cost of statistics for many short requests (W4) | 1 % |

The last is measured in pairs of short runs with and without statistics: CPU time of core and frontend on one thread
without the model's, and of the frontend in two processes, as it is run. There it is also measured by the clock, in runs
with statistics for some steps and not for the next. Ctrl-C ends the part that is under way and prints its results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "0"  # before the engine is imported

from tqdm import tqdm

from benchmarks.models import SHAPES, find_checkpoint
from benchmarks.step_contrasts import RunContrast, Step, contrast_run, interval, summarize, trimmed_mean
from benchmarks.switched_scheduler import STATISTICS, Order, SwitchedScheduler
from benchmarks.timed_executor import TimedExecutor, time_beside_the_model
from quire import LLM
from quire.cli.bench.workloads import WORKLOADS, IdRange
from quire.config.engine_args import EngineArgs
from quire.frontend.metrics.server_metrics import ProcessMetrics
from quire.frontend.output_processor import OutputProcessorOutput
from quire.frontend.request_pipeline import RequestPipeline
from quire.sampling_params import SamplingParams
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
        overrides = {"max_position_embeddings": 4096}
        args = EngineArgs("demo", skip_tokenizer_init=True, max_model_len=4096, hf_overrides=overrides)
        config = args.create_engine_config("serving")
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
        """Returns what the core would send after its next step."""
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
        """Processes outputs like `LLMEngine.step`."""
        for _ in self.pipeline.process(outputs):
            pass


def measure_steps(num_requests: int, num_steps: int) -> tuple[float, float]:
    """Returns microseconds of the frontend per step, with statistics and without:

    the fastest quarter of alternating ones.
    """
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
    """Returns the milliseconds of a scrape, by the clock and of CPU time, which matters on a busy machine.

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


CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "process": time.process_time,
    "beside the model": time_beside_the_model,
}


@dataclass(frozen=True)
class Costs:
    """Microseconds per token, in pairs of runs with statistics and without."""

    with_statistics: list[float]
    without: list[float]

    @property
    def per_token(self) -> float:
        """The cost without statistics."""
        return statistics.median(self.without)

    def summary(self, whole: float) -> dict[str, object]:
        """Returns the trimmed mean of the pairs' differences with its 95 % confidence interval (bootstrap).

        Values are microseconds per token, and a share of `whole`, the cost of a token.
        """
        differences = [a - b for a, b in zip(self.with_statistics, self.without, strict=True)]
        low, high = interval([[difference] for difference in differences])
        return {
            "pairs": len(differences),
            "with_statistics_us": statistics.median(self.with_statistics),
            "without_us": self.per_token,
            "cost_us": trimmed_mean(differences),
            "cost": trimmed_mean(differences) / whole,
            "cost_95_percent_interval": (low / whole, high / whole),
        }


@contextmanager
def until_interrupted(found: Sequence[object]) -> Iterator[None]:
    """Lets Ctrl-C end the part of the measurement that is under way; what was `found` counts.

    With nothing found, it ends the program.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not found:
            raise


class SwitchedEngine:
    """Runs W4 with statistics or without, on one engine: two engines differ by more than statistics cost."""

    def __init__(self, num_requests: int, **engine_args: Any) -> None:
        scheduler = f"{SwitchedScheduler.__module__}:{SwitchedScheduler.__name__}"
        self._llm = LLM(**engine_args, max_num_seqs=256, disable_log_stats=False, scheduler_cls=scheduler)
        self._pipeline = self._llm.llm_engine.pipeline
        self._num_requests = num_requests
        self._num_runs = 0

    def _generate(self, statistics: bool | Order) -> list[float]:
        """Returns the time of a run by each of CLOCKS, in microseconds per token. No two runs have the same prompts."""
        self._num_runs += 1
        requests = WORKLOADS["W4"].make(self._num_runs, IdRange(300, 3000), self._num_requests)
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        params = SamplingParams(
            temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False, extra_args={STATISTICS: statistics}
        )
        self._pipeline.stats.log_stats = self._pipeline.output_processor.log_stats = bool(statistics)
        gc.collect()
        starts = [clock() for clock in CLOCKS.values()]
        self._llm.generate(prompts, params, use_tqdm=False)
        ends = [clock() for clock in CLOCKS.values()]
        return [(end - start) / (64 * self._num_requests) * 1e6 for start, end in zip(starts, ends, strict=True)]

    def measure(self, num_pairs: int, *, control: bool) -> dict[str, Costs]:
        """Returns the cost of statistics by each clock, in pairs of runs whose order changes.

        A disturbance of more than a second falls on both runs of a pair. As a `control` there are no statistics in
        either.
        """
        pairs: list[dict[bool, list[float]]] = []
        with until_interrupted(pairs):
            for pair in tqdm(range(-1, num_pairs), desc="pairs", disable=None):
                order = (False, True) if pair % 2 else (True, False)
                times = {log_stats: self._generate(log_stats and not control) for log_stats in order}
                if pair >= 0:
                    pairs.append(times)
        return {
            name: Costs([pair[True][i] for pair in pairs], [pair[False][i] for pair in pairs])
            for i, name in enumerate(CLOCKS)
        }

    def contrast(self, num_pairs: int, *, control: bool) -> list[RunContrast]:
        """Returns pairs of runs with statistics for some steps and not for the next, and the other way round.

        As a `control` there are none at any time, and the steps that would have had them are compared.
        """
        steps: list[Step] = []
        turns, process, stats = Order.ON_FIRST, self._pipeline.process, self._pipeline.stats

        def process_switched(outputs: EngineCoreOutputs, *args: int) -> Iterator[OutputProcessorOutput]:
            stats.log_stats = outputs.scheduler_stats is not None
            is_marked = turns.are_on(len(steps)) if control else stats.log_stats
            steps.append(Step(outputs.timestamp, is_marked, len(outputs.outputs)))
            return process(outputs, *args)

        self._pipeline.process = process_switched  # type: ignore[method-assign]
        pairs: list[RunContrast] = []
        with until_interrupted(pairs):
            for number in tqdm(range(-1, num_pairs), desc="pairs in turns", disable=None):
                runs = []
                for turns in Order if number % 2 else reversed(Order):
                    steps.clear()
                    self._generate(turns if not control else False)
                    runs.append(contrast_run(steps, self._num_requests))
                first, second = runs
                if number >= 0 and first is not None and second is not None:
                    pairs.append(first.join(second))
        return pairs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.shutdown()


def measure_w4(
    model: str, num_requests: int, num_pairs: int, num_pairs_in_turns: int, *, control: bool
) -> dict[str, object]:
    """Measures W4 with core, frontend and model on one thread, and in two processes, as users run it."""
    engine_args = {"model": str(find_checkpoint(model)), "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 29}
    executor = f"{TimedExecutor.__module__}:{TimedExecutor.__name__}"
    with SwitchedEngine(num_requests, **engine_args, distributed_executor_backend=executor) as engine:
        together = engine.measure(num_pairs, control=control)
    os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "1"
    with SwitchedEngine(num_requests, **engine_args) as engine:
        apart = engine.measure(num_pairs, control=control)
        steps = engine.contrast(num_pairs_in_turns, control=control)
    return {
        "one_thread_cpu_beside_the_model": together["beside the model"].summary(together["wall"].per_token),
        "two_processes_frontend_cpu": apart["process"].summary(apart["wall"].per_token),
        "two_processes_steps_by_the_clock": summarize(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256, help="running requests")
    parser.add_argument("--scrapes", type=int, default=400)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step of so many requests takes the core")
    parser.add_argument("--model", default=None, help=f"{', '.join(SHAPES)}, or a checkpoint directory")
    parser.add_argument("--throughput-requests", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=40, help="of runs with and without")
    parser.add_argument("--pairs-in-turns", type=int, default=150, help="of runs switched every few steps")
    parser.add_argument("--control", action="store_true", help="no statistics at any time: what is found is noise")
    args = parser.parse_args()
    with_stats_us, without_us = measure_steps(args.requests, args.steps)
    cost: dict[str, object] = {
        "requests": args.requests,
        "frontend_us_per_step": {"with_statistics": with_stats_us, "without": without_us},
        "share_of_a_step": (with_stats_us - without_us) / (1e3 * args.step_ms),
        "scrape": measure_scrapes(args.requests, args.scrapes),
    }
    if args.model:
        cost |= measure_w4(args.model, args.throughput_requests, args.pairs, args.pairs_in_turns, control=args.control)
    print(json.dumps(cost, indent=2))


if __name__ == "__main__":
    main()
