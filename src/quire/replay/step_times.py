"""A model of how long a step takes, fitted to recorded steps.

The time is a sum of non-negative parts of the step's work. Tokens count several times, up to 4, 16, 64 and without a
limit, because the first ones of a step, which wait for the weights, cost more than the later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.wire.execution import SchedulerOutput

Floats = npt.NDArray[np.float64]

MIN_STEPS = 20
"""Fewest steps for a fit."""
MOMENT_S = 0.25
"""Seconds for which a machine's speed is taken to be constant."""
_FEW = (4, 16, 64)


class StepWork(NamedTuple):
    """Work of a step, as far as its time depends on it."""

    num_tokens: int
    num_rows: int
    num_decoded_context: int
    """Tokens that the rows of one token attend to, all together."""
    num_prompt_context: int
    """The same for chunks: per token of a chunk, half of the chunk and all that was computed before."""

    @classmethod
    def of(cls, output: SchedulerOutput) -> StepWork:
        """Returns the work of a scheduled step."""
        counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        starts = list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts += [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        decoded = sum(start + 1 for request_id, start in starts if counts[request_id] == 1)
        chunks = [(start, counts[request_id]) for request_id, start in starts if counts[request_id] != 1]
        prompt = sum(count * start + count * (count + 1) // 2 for start, count in chunks)
        return cls(output.total_num_scheduled_tokens, len(counts), decoded, prompt)

    def parts(self) -> list[float]:
        """Returns the values that the coefficients are for."""
        tokens = self.num_tokens
        return [
            1.0 if tokens else 0.0,
            float(tokens),
            *(float(min(tokens, few)) for few in _FEW),
            float(self.num_rows),
            float(self.num_decoded_context),
            float(self.num_prompt_context),
        ]


PART_NAMES = (
    "step",
    "token",
    *(f"token up to {few}" for few in _FEW),
    "row",
    "token of context, decoding",
    "token of context, prompts",
)


class StepTimes(NamedTuple):
    """A fitted model, and its errors on steps it has seen and not seen."""

    coefficients: tuple[float, ...]
    """Seconds, in the order of PART_NAMES."""
    num_steps: int
    error: float
    """Mean of |predicted / real - 1| over the steps it was fitted to."""
    held_out_error: float
    """The same for every second step, from a fit to the others."""
    bias: float
    """Predicted / real - 1 of all steps together."""

    def predict(self, work: StepWork) -> float:
        """Returns the seconds that a step is predicted to take."""
        return sum(c * part for c, part in zip(self.coefficients, work.parts(), strict=True))


def fit_step_times(steps: Sequence[tuple[StepWork, float]]) -> StepTimes | None:
    """Returns the model of `steps` (work, seconds); None if there are too few.

    Steps far off (a page fault, another process) are left out of the fit, and stay in the errors.
    """
    steps = [(work, seconds) for work, seconds in steps if work.num_tokens and seconds > 0]
    if len(steps) < MIN_STEPS:
        return None
    parts = np.array([work.parts() for work, _ in steps])
    seconds = np.array([seconds for _, seconds in steps])
    coefficients = _fit(parts, seconds)
    half = _fit(parts[::2], seconds[::2])
    return StepTimes(
        tuple(float(c) for c in coefficients),
        len(steps),
        _error(parts @ coefficients, seconds),
        _error(parts[1::2] @ half, seconds[1::2]),
        float((parts @ coefficients).sum() / seconds.sum() - 1),
    )


class Pace:
    """Ratio of real to predicted durations: over the time of a recording (the first steps of an engine, other work on
    the machine), and from step to step (chance).

    An arrival falls into a long step more often than into a short one, so that without it waiting is predicted too
    short.
    """

    def __init__(self, times: StepTimes, steps: Sequence[tuple[StepWork, float]], ends_s: Sequence[float]) -> None:
        """`ends_s` are the end times of `steps`."""
        rows = [
            (int(end_s / MOMENT_S), seconds, expected_s)
            for (work, seconds), end_s in zip(steps, ends_s, strict=True)
            if seconds > 0 and (expected_s := times.predict(work)) > 0
        ]
        sums: dict[int, tuple[float, float]] = {}
        for moment, seconds, expected_s in rows:
            before = sums.get(moment, (0.0, 0.0))
            sums[moment] = before[0] + seconds, before[1] + expected_s
        self._by_moment = {moment: seconds / expected_s for moment, (seconds, expected_s) in sums.items()}
        self._chances = [seconds / expected_s / self._by_moment[moment] for moment, seconds, expected_s in rows]

    def of(self, number: int, moment_s: float) -> float:
        """Returns the ratio of the step with this number, which begins at this time."""
        chance = self._chances[number % len(self._chances)] if self._chances else 1.0
        return chance * self._by_moment.get(int(moment_s / MOMENT_S), 1.0)


def _error(predicted: Floats, seconds: Floats) -> float:
    return float(np.mean(np.abs(predicted / seconds - 1)))


def _fit(parts: Floats, seconds: Floats) -> Floats:
    """Fits, weighted by the expected time so that long steps do not dominate, and without outliers."""
    weights, near = np.ones(len(seconds)), np.ones(len(seconds), dtype=bool)
    for _ in range(3):
        coefficients = solve_nnls((parts * weights[:, None])[near], (seconds * weights)[near])
        expected = np.maximum(parts @ coefficients, 1e-6)
        weights = 1 / np.sqrt(expected)
        off = np.abs(np.log(expected / seconds))
        near = off <= max(5 * float(np.median(off)), 0.7)
    return coefficients


def solve_nnls(matrix: Floats, target: Floats) -> Floats:
    """Returns the x >= 0 with the least |matrix @ x - target|: Lawson and Hanson, "Solving Least Squares Problems"
    (1974), 23.

    Columns are scaled to one length first, so that one tolerance serves them all.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    matrix = matrix / lengths
    size = matrix.shape[1]
    x, free = np.zeros(size), np.zeros(size, dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(matrix.T @ target).max(initial=0.0)), 1e-300)
    for _ in range(10 * size):
        gain = matrix.T @ (target - matrix @ x)
        gain[free] = -np.inf
        best = int(np.argmax(gain))
        if gain[best] <= tolerance:
            break
        free[best] = True
        while True:
            solution = np.zeros(size)
            solution[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            bad = free & (solution <= 0)
            if not bad.any():
                break
            step = float(np.min(x[bad] / np.maximum(x[bad] - solution[bad], 1e-300)))
            x = x + step * (solution - x)
            free &= x > 1e-14
            x[~free] = 0.0
            if not free.any():
                solution = x
                break
        x = solution
    scaled: Floats = x / lengths
    return scaled
