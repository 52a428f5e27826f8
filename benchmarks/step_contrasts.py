"""What statistics do to the steps of an engine that has them for a few steps, then not for as many, and so on.

A machine that is slower for a second or two, as these are, is as slow with statistics as without: the steps that are
compared are neighbours. A step that takes longer because of its place in the run, as every 16th does, has statistics in
one run and none in the next: runs are compared in pairs. Only steps in which every request gets a token are; requests'
beginnings and ends are not.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from benchmarks.switched_scheduler import BLOCK


@dataclass(frozen=True)
class Step:
    """One of the core's, as its outputs tell of it."""

    timestamp: float
    """When it was over, in seconds."""
    has_statistics: bool
    num_outputs: int


@dataclass(frozen=True)
class RunContrast:
    """Of the full steps of a run, or of several, in seconds per step."""

    cost: float
    """How much longer a step takes with statistics than without."""
    without: float
    """What one takes without."""
    num_blocks: int

    def mean_with(self, other: RunContrast) -> RunContrast:
        """Of this run and one in whose stead the others of its steps have statistics."""
        return RunContrast(
            (self.cost + other.cost) / 2, (self.without + other.without) / 2, self.num_blocks + other.num_blocks
        )


def contrast_run(steps: Sequence[Step], num_requests: int) -> RunContrast | None:
    """Compare each block of steps with the mean of the two beside it, which have statistics if it has none. None if
    there are too few.

    Of each block the first step is left out: the frontend is not done with the step before it.
    """
    durations = [
        (step.has_statistics, step.timestamp - before.timestamp)
        for before, step in pairwise(steps)
        if before.num_outputs == step.num_outputs == num_requests
    ]
    blocks: list[tuple[bool, float]] = []
    for has_statistics, group in groupby(durations, key=lambda pair: pair[0]):
        block = [duration for _, duration in group]
        if len(block) == BLOCK:
            blocks.append((has_statistics, statistics.fmean(block[1:])))
    contrasts = [
        (time - (before + after) / 2) * (1 if has_statistics else -1)
        for (_, before), (has_statistics, time), (_, after) in zip(blocks, blocks[1:], blocks[2:], strict=False)
    ]
    if not contrasts:
        return None
    without = statistics.fmean(time for has_statistics, time in blocks if not has_statistics)
    return RunContrast(statistics.fmean(contrasts), without, len(contrasts))


def trimmed_mean(values: Sequence[float]) -> float:
    """Without the tenth at either end."""
    num_left_out = len(values) // 10
    return statistics.fmean(sorted(values)[num_left_out : len(values) - num_left_out])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The bounds of the 95 % confidence interval of their trimmed mean (bootstrap)."""
    rng = random.Random(0)
    means = sorted(trimmed_mean(rng.choices(values, k=len(values))) for _ in range(2000))
    return means[50], means[-51]


def summarize(pairs: Sequence[RunContrast]) -> dict[str, object]:
    """What statistics cost a full step, in microseconds and as a share of one without; the interval is one over pairs
    of runs, as neighbouring blocks are not independent."""
    costs = [pair.cost for pair in pairs]
    without = statistics.fmean(pair.without for pair in pairs)
    low, high = interval(costs)
    return {
        "pairs_of_runs": len(pairs),
        "blocks": sum(pair.num_blocks for pair in pairs),
        "without_us_per_step": 1e6 * without,
        "cost_us_per_step": 1e6 * trimmed_mean(costs),
        "cost": trimmed_mean(costs) / without,
        "cost_95_percent_interval": (low / without, high / without),
    }
