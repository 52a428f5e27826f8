"""Measures the error of `quire plan`: `python -m benchmarks.plan [--engines 2] [--requests 400] [--rounds 3]`.

A load is served by one engine and recorded; from that a fleet is predicted. Then the fleet serves the same load, and
serves it again: two runs differ by so much, and no prediction can be judged more finely. The engines are processes
whose fake model sleeps for 4 ms a step and 0.1 ms a token, so that engines on one machine do not slow each other down.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from quire import EngineArgs, SamplingParams
from quire.cli.replay_report import read_recording
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.routing.policy import LeastWait
from quire.frontend.routing.router import Router
from quire.replay.figures import Figures, make_figures
from quire.replay.fleet import Fleet
from quire.replay.step_times import fit_step_times
from quire.testing.fake_executor import FakeExecutor

RATE_S = 60.0
"""Requests per second."""


class Paced(FakeExecutor):
    """A fake model whose steps take time."""

    available_bytes = 1 << 24
    step_time_s = 0.004
    token_time_s = 0.0001


def make_load(num_requests: int, seed: int) -> list[tuple[float, list[int], int]]:
    """Returns arrivals (seconds, prompt, output tokens): a third begins with one of four system prompts."""
    draw = random.Random(seed)
    systems = [[draw.randrange(256) for _ in range(128)] for _ in range(4)]
    load, now = [], 0.0
    for _ in range(num_requests):
        now += draw.expovariate(RATE_S)
        stem = draw.choice(systems) if draw.random() < 1 / 3 else []
        load.append((now, stem + [draw.randrange(256) for _ in range(draw.randint(16, 200))], draw.randint(8, 64)))
    return load


async def serve(load: list[tuple[float, list[int], int]], num_engines: int, path: Path) -> None:
    """Serves a load, and records it to `path`."""
    args = EngineArgs(
        model="demo",
        max_num_batched_tokens=512,
        max_num_seqs=32,
        data_parallel_size=num_engines,
        distributed_executor_backend="benchmarks.plan:Paced",
        record=str(path),
    )
    async with AsyncLLM.from_engine_config(args.create_engine_config("serving")) as llm:

        async def ask(number: int, at: float, prompt: list[int], num_tokens: int) -> None:
            await asyncio.sleep(at)
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            async for _ in llm.generate({"prompt_token_ids": prompt}, params, str(number)):
                pass

        async with asyncio.TaskGroup() as tasks:
            for number, request in enumerate(load):
                tasks.create_task(ask(number, *request))


def measure(path: Path, num_engines: int) -> Figures:
    """Returns the figures of a recorded fleet."""
    names = [path, *(path.with_name(f"{path.name}.engine{i}") for i in range(1, num_engines))]
    studies = [read_recording(str(name))[0] for name in names]
    requests = [request for study in studies for request in study.requests]
    return make_figures(requests, sum(s.num_steps for s in studies), sum(s.num_preemptions for s in studies))


def read_figures(figures: Figures) -> dict[str, float]:
    """Returns what is compared."""
    return {
        "TTFT p50, ms": figures.ttft_ms["p50"],
        "TTFT p99, ms": figures.ttft_ms["p99"],
        "TPOT p50, ms": figures.tpot_ms["p50"],
        "TPOT p99, ms": figures.tpot_ms["p99"],
        "cached tokens": float(figures.cached_tokens),
    }


def run_round(num_engines: int, num_requests: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Returns, by figure, what was predicted, measured, and measured again."""
    load = make_load(num_requests, seed)
    with tempfile.TemporaryDirectory(prefix="quire-plan-") as directory:
        paths = [Path(directory) / name for name in ("one", "fleet", "again")]
        asyncio.run(serve(load, 1, paths[0]))
        for path in paths[1:]:
            asyncio.run(serve(load, num_engines, path))
        study, _ = read_recording(str(paths[0]))
        times = fit_step_times(study.steps)
        assert study.difference is None
        assert times is not None
        fleet = Fleet(study, study.header, times, num_engines=num_engines, placement=Router(LeastWait()))
        columns: list[dict[str, Any]] = [read_figures(fleet.run())]
        columns += [read_figures(measure(path, num_engines)) for path in paths[1:]]
    return {name: (columns[0][name], columns[1][name], columns[2][name]) for name in columns[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds = [run_round(args.engines, args.requests, seed) for seed in range(args.rounds)]
    print("| | predicted | measured | error | two runs differ by |\n|---|--:|--:|--:|--:|")
    for name in rounds[0]:
        predicted, measured, _ = (statistics.median(column) for column in zip(*(r[name] for r in rounds), strict=True))
        error = statistics.median(r[name][0] / r[name][1] - 1 for r in rounds)
        spread = statistics.median(abs(r[name][2] / r[name][1] - 1) for r in rounds)
        print(f"| {name} | {predicted:.1f} | {measured:.1f} | {error:+.1%} | {spread:.1%} |")


if __name__ == "__main__":
    main()
