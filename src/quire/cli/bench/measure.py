"""Running a workload through an engine with a stopwatch, and what the stopwatch says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.cli.bench.workloads import BenchRequest
from quire.cli.generation import Engine, RequestTiming
from quire.errors import GenerationError
from quire.sampling_params import RequestOutputKind, SamplingParams


@dataclass
class RunResult:
    """One repetition: wall time from the first request handed in to the last token out, and each request's times."""

    wall_s: float
    timings: list[RequestTiming] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(t.num_prompt_tokens for t in self.timings)

    @property
    def num_output_tokens(self) -> int:
        return sum(t.num_output_tokens for t in self.timings)

    @property
    def num_cached_tokens(self) -> int:
        return sum(t.num_cached_tokens for t in self.timings)


def run_requests(engine: Engine, requests: Sequence[BenchRequest]) -> RunResult:
    """Hand in all of `requests` at once and step the engine until it is idle. Greedy, end-of-sequence ignored."""
    timings: dict[str, RequestTiming] = {}
    start = time.perf_counter()
    for i, request in enumerate(requests):
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=request.output_len,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        timings[str(i)] = RequestTiming(added_s=time.perf_counter())
        engine.add_request(str(i), {"prompt_token_ids": request.prompt_token_ids}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timings[output.request_id].record(output, now)
            for o in output.outputs:
                if o.finish_reason == "error":
                    raise GenerationError(o.error_message or "the engine failed")
    return RunResult(time.perf_counter() - start, list(timings.values()))


def summarize(runs: Sequence[RunResult]) -> dict[str, Any]:
    """The figures of several repetitions: medians of wall time and rates, percentiles over all requests' times (ms)."""
    wall = statistics.median(run.wall_s for run in runs)
    prompt, output = runs[0].num_prompt_tokens, runs[0].num_output_tokens
    timings = [t for run in runs for t in run.timings]
    return {
        "num_requests": len(runs[0].timings),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": statistics.median(run.num_cached_tokens for run in runs),
        "reps": len(runs),
        "wall_s": round(wall, 4),
        "walls_s": [round(run.wall_s, 4) for run in runs],
        "output_tokens_per_s": round(output / wall, 1),
        "total_tokens_per_s": round((prompt + output) / wall, 1),
        "requests_per_s": round(len(runs[0].timings) / wall, 3),
        "ttft_ms": percentiles_ms([t.ttft_s for t in timings if t.ttft_s is not None]),
        "tpot_ms": percentiles_ms([t.tpot_s for t in timings if t.tpot_s is not None]),
        "itl_ms": percentiles_ms([gap for t in timings for gap in t.gaps_s]),
        "e2e_ms": percentiles_ms([t.last_token_s - t.added_s for t in timings if t.last_token_s is not None]),
    }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99 in milliseconds (linear interpolation); empty for no values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    figures = {"mean": statistics.fmean(ordered), **{f"p{q}": _percentile(ordered, q) for q in (50, 90, 99)}}
    return {name: round(value * 1e3, 3) for name, value in figures.items()}


def _percentile(ordered: Sequence[float], q: float) -> float:
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
