"""Compares the knee of the throughput with the gauge `quire_saturation`: `python -m benchmarks.saturation`.

For each shape of requests, a closed loop of twice as many clients as seats gives the largest rate that is served so;
then Poisson arrivals are offered at shares of that rate. The knee is the largest rate that is served of those: a higher
one may be offered, and waits. The gauge should cross 0.9 within 10 % of it; together with the rate, the gauge's share
for compute predicts the knee. Needs src on the path; nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from quire.cli.bench.load import LoadRequest, LoadRun
from quire.cli.bench.workloads import arrival_times
from quire.cli.generation import RequestTiming
from quire.config.engine_args import EngineArgs
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.metrics.collect.saturation import AT_THE_KNEE
from quire.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class Shape:
    """Requests of one kind; lengths vary by a half either way.

    With equal lengths, requests that arrive together would end together, in batches that no real traffic has.
    """

    name: str
    prompt_len: int
    output_len: int


SHAPES = (
    Shape("chat: 64 in, 64 out", 64, 64),
    Shape("long prompts: 768 in, 8 out", 768, 8),
    Shape("long answers: 16 in, 256 out", 16, 256),
)


@dataclass
class Point:
    """Measurements at one rate. `predicted_rate` is that of the knee, from what the gauge shows."""

    offered_rate: float
    served_rate: float
    saturation: float
    compute: float
    predicted_rate: float
    error: float


CROSSING = 0.9
"""Value of the gauge at which one more engine is needed."""


def find_crossing(points: list[Point]) -> float | None:
    """Returns the offered rate at which the gauge crosses CROSSING, between two points on a line;

    None if it never does.
    """
    before = Point(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for point in sorted(points, key=lambda point: point.offered_rate):
        if point.saturation >= CROSSING:
            part = (CROSSING - before.saturation) / (point.saturation - before.saturation)
            return before.offered_rate + part * (point.offered_rate - before.offered_rate)
        before = point
    return None


class Sweep:
    """One engine under load of one shape after the other."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self._llm = llm
        self._rng = random.Random(seed)
        self._num_sent = 0

    def _vary(self, length: int) -> int:
        return self._rng.randint(length // 2, length + (length + 1) // 2)

    def requests(self, shape: Shape, count: int) -> list[LoadRequest]:
        """Returns requests whose prompts occur in no other."""
        lengths = [(self._vary(shape.prompt_len), self._vary(shape.output_len)) for _ in range(count)]
        return [LoadRequest([self._rng.randrange(100, 900) for _ in range(p)], o) for p, o in lengths]

    async def send(self, request: LoadRequest, timing: RequestTiming) -> None:
        """Sends one request to the engine, for `LoadRun`."""
        self._num_sent += 1
        params = SamplingParams(
            max_tokens=request.output_len, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        prompt: Any = {"prompt_token_ids": request.prompt}
        async for output in self._llm.generate(prompt, params, f"r{self._num_sent}"):
            timing.record(output, time.perf_counter())

    async def capacity(self, shape: Shape, concurrency: int, duration_s: float) -> float:
        """Returns the requests per second that end with all seats taken, without those at both ends of the load."""
        closed = LoadRun(self.send, max_concurrency=concurrency)
        warm = await closed.run(self.requests(shape, 2 * concurrency), None)
        count = round(duration_s * len(warm.answered) / warm.wall_s)
        result = await closed.run(self.requests(shape, max(count, 4 * concurrency)), None)
        middle = sorted(o.end_s for o in result.answered)[concurrency:-concurrency]
        return (len(middle) - 1) / (middle[-1] - middle[0])

    async def load(self, shape: Shape, rate: float, duration_s: float) -> tuple[float, float, float]:
        """Offers Poisson arrivals. Returns (requests served per second, saturation, its share for compute).

        Those served in the first third are not counted: the engine was empty, and its answers take time.
        """
        arrivals = arrival_times(rate, round(rate * duration_s), self._rng.randrange(1 << 30))
        load = asyncio.create_task(LoadRun(self.send).run(self.requests(shape, len(arrivals)), arrivals))
        await asyncio.sleep(duration_s)
        metrics = self._llm.pipeline.stats.metrics
        assert metrics is not None
        snapshot = metrics.snapshot()
        result = await load
        ends = [o.end_s - result.start_s for o in result.answered]
        return (
            sum(duration_s / 3 < end <= duration_s for end in ends) / (duration_s * 2 / 3),
            snapshot.value("quire_saturation"),
            snapshot.value("quire_saturation_by_resource", "compute"),
        )


async def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measures all shapes."""
    report = []
    engine_args = EngineArgs(args.model, max_model_len=2048, max_num_seqs=args.max_num_seqs)
    async with AsyncLLM.from_engine_args(engine_args) as llm:
        sweep = Sweep(llm, args.seed)
        for shape in (shape for shape in SHAPES if args.shape in shape.name):
            most = await sweep.capacity(shape, 2 * args.max_num_seqs, args.duration_s)
            points = []
            for share in args.shares:
                served, saturation, compute = await sweep.load(shape, share * most, args.duration_s)
                predicted = AT_THE_KNEE * served / compute if compute else 0.0
                points.append(Point(share * most, served, saturation, compute, predicted, predicted / most - 1))
                print(
                    f"{shape.name}: {share:.0%} of {most:.1f}/s: served {served:.1f}/s, gauge {saturation:.2f}, "
                    f"compute {compute:.2f}, knee at {predicted:.1f}/s",
                    flush=True,
                )
            crossing = find_crossing(points)
            knee = max(point.served_rate for point in points)
            if crossing is not None:
                print(
                    f"{shape.name}: the gauge crosses {CROSSING} at {crossing:.1f}/s, {crossing / knee:.0%} of the "
                    f"knee at {knee:.1f}/s, {crossing / most:.0%} of what is served with all seats taken"
                )
            report.append(
                {
                    "shape": asdict(shape),
                    "most_per_s": most,
                    "knee_per_s": knee,
                    "crossing_per_s": crossing,
                    "points": [asdict(point) for point in points],
                }
            )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a checkpoint; default is the demo model")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--duration-s", type=float, default=30.0, help="of each point; the gauge averages over 15 s")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7, 0.85, 0.95, 1.1])
    parser.add_argument("--shape", default="", help="only shapes whose name holds this, to measure in pieces")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(run(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
