"""Where the knee is, and where `quire_saturation` says it is: `python -m benchmarks.saturation`, with src on the path.

For each shape of requests: first clients that each send the next request when one has ended, twice as many as there are
seats, which gives the most that is served so; then Poisson arrivals at shares of that. The knee is the most that is
served of those: more may be offered, and waits. The gauge should cross 0.9 within 10 % of it; with the rate its share
for compute predicts the knee. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass

from quire.config.engine_args import EngineArgs
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.metrics.collect.saturation import AT_THE_KNEE
from quire.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class Shape:
    """Requests of one kind; lengths vary by a half either way. Were they all the same, those that come together would
    end together, and the engine would serve prompts in batches that no other traffic has."""

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
    """What was seen at one rate. `predicted_rate` is that of the knee, from what the gauge shows."""

    offered_rate: float
    served_rate: float
    saturation: float
    compute: float
    predicted_rate: float
    error: float


CROSSING = 0.9
"""What the gauge shows when it is time for one more engine."""


def find_crossing(points: list[Point]) -> float | None:
    """The offered rate at which the gauge crosses CROSSING, between two points on a line; None if it never does."""
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

    async def request(self, shape: Shape) -> None:
        """One request, whose prompt nobody has seen before."""
        self._num_sent += 1
        prompt_len, output_len = map(self._vary, (shape.prompt_len, shape.output_len))
        prompt = [self._rng.randrange(100, 900) for _ in range(prompt_len)]
        params = SamplingParams(
            max_tokens=output_len, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        async for _ in self._llm.generate({"prompt_token_ids": prompt}, params, f"r{self._num_sent}"):
            pass

    async def capacity(self, shape: Shape, concurrency: int, duration_s: float) -> float:
        """Requests per second with all seats taken, the first and last few left aside."""
        ends: list[float] = []
        stop = time.monotonic() + duration_s

        async def client() -> None:
            while time.monotonic() < stop:
                await self.request(shape)
                ends.append(time.monotonic())

        await asyncio.gather(*(client() for _ in range(concurrency)))
        ends.sort()
        middle = [end for end in ends if stop - 0.8 * duration_s <= end <= stop]
        if len(middle) < 2:
            raise SystemExit(f"{len(middle)} requests have ended in {duration_s} s: give it more --duration-s")
        return (len(middle) - 1) / (middle[-1] - middle[0])

    async def load(self, shape: Shape, rate: float, duration_s: float) -> tuple[float, float, float]:
        """Poisson arrivals: (requests served per second, saturation, its share for compute) at the end of the time.

        Those served in the first third are left aside: the engine was empty, and its answers take time.
        """
        start = time.monotonic()
        due, tasks, ends = 0.0, [], list[float]()

        async def client() -> None:
            await self.request(shape)
            ends.append(time.monotonic() - start)

        while True:
            due += self._rng.expovariate(rate)
            if due > duration_s:
                break
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            tasks.append(asyncio.create_task(client()))
        await asyncio.sleep(max(0.0, start + duration_s - time.monotonic()))
        num_done = sum(end > duration_s / 3 for end in ends)
        metrics = self._llm.pipeline.stats.metrics
        assert metrics is not None
        snapshot = metrics.snapshot()
        await asyncio.gather(*tasks)
        return (
            num_done / (duration_s * 2 / 3),
            snapshot.value("quire_saturation"),
            snapshot.value("quire_saturation_by_resource", "compute"),
        )


async def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """All shapes."""
    report = []
    engine_args = EngineArgs(args.model, max_model_len=2048, max_num_seqs=args.max_num_seqs)
    async with AsyncLLM.from_engine_args(engine_args) as llm:
        sweep = Sweep(llm, args.seed)
        for shape in (shape for shape in SHAPES if args.shape in shape.name):
            await asyncio.gather(*(sweep.request(shape) for _ in range(args.max_num_seqs)))
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
    """Sweep and print, as JSON in the end."""
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
