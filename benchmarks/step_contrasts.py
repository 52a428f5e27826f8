"""The effect of statistics on the steps of an engine that has them for a few steps, then not for as many, and so on.

A machine that is slower for a second or two is so with statistics and without: neighbouring steps are compared. A step
that takes longer because of its place in the run, as every 16th does, has statistics in one run and none in the next:
runs are compared in pairs. Only steps in which every request gets a token count, not those where requests begin or end.
A short disturbance makes a contrast far off to either side: a quarter of them is left out at either end.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from benchmarks.switched_scheduler import BLOCK

LEFT_OUT = 0.25
"""Share of the contrasts that is left out at either end."""


@dataclass(frozen=True)
class Step:
    """One step of the core, as its outputs show it."""

    timestamp: float
    """End of the step in seconds."""
    has_statistics: bool
    num_outputs: int


@dataclass(frozen=True)
class RunContrast:
    """The full steps of a run, or of several, in seconds per step."""

    contrasts: Sequence[float]
    """For each block with neighbours: how much longer its steps take with statistics than without."""
    without: float
    """Time of a step without statistics."""

    def join(self, other: RunContrast) -> RunContrast:
        """Returns this run joined with one in which the other steps have statistics."""
        return RunContrast([*self.contrasts, *other.contrasts], (self.without + other.without) / 2)


def contrast_run(steps: Sequence[Step], num_requests: int) -> RunContrast | None:
    """Compares each block of steps with the mean of the two beside it, which are switched the other way.

    Returns None if there are too few. The first step of each block is left out: the frontend is not done with the step
    before it.
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
    return RunContrast(contrasts, without)


def trimmed_mean(values: Sequence[float], left_out: float = 0.1) -> float:
    """Returns the mean without a share of the values at either end."""
    num_left_out = int(left_out * len(values))
    return statistics.fmean(sorted(values)[num_left_out : len(values) - num_left_out])


def interval(clusters: Sequence[Sequence[float]], left_out: float = 0.1) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the trimmed mean of all values (bootstrap).

    Values of a cluster are not independent.
    """
    rng = random.Random(0)
    means = []
    for _ in range(2000):
        chosen = rng.choices(clusters, k=len(clusters))
        means.append(trimmed_mean([value for cluster in chosen for value in cluster], left_out))
    means.sort()
    return means[50], means[-51]


def summarize(pairs: Sequence[RunContrast]) -> dict[str, object]:
    """Returns the cost of statistics for a full step: the mean of the middle half of all contrasts.

    It is in microseconds, and a share of a step without. The interval is over pairs of runs, as neighbouring blocks
    share steps.
    """
    clusters = [pair.contrasts for pair in pairs]
    contrasts = [contrast for cluster in clusters for contrast in cluster]
    cost, without = trimmed_mean(contrasts, LEFT_OUT), statistics.fmean(pair.without for pair in pairs)
    low, high = interval(clusters, LEFT_OUT)
    return {
        "pairs_of_runs": len(pairs),
        "blocks": len(contrasts),
        "without_us_per_step": 1e6 * without,
        "cost_us_per_step": 1e6 * cost,
        "cost": cost / without,
        "cost_95_percent_interval": (low / without, high / without),
        "cost_of_all_blocks": statistics.fmean(contrasts) / without,
    }
