"""Saturation: how close the engine is to its limit, as one number for autoscalers that holds for any mix of requests.

KV-cache use or the number of running requests alone means little: short answers fill no cache, and a few long prompts
fill the token budget of a step. Time is what runs out. The meter therefore learns the cost of a step from the steps it
sees (`StepCosts`) and computes the share of time that the present traffic would take in steps that are as full as
possible. `AT_THE_KNEE` times that share is 0.95 when the engine does all it can for this mix of prompts and answers.
Seats, cache and queue are further shares, each 1 when full. The largest share is the saturation.

This module reads no clock: its callers pass time stamps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

AT_THE_KNEE = 0.95
"""Value of `compute` when the engine does all it can. An autoscaler with a threshold of 0.9 thus acts just before
requests begin to wait, which the other resources show."""
WINDOW_S = 15.0
"""Time constant of all averages."""
STEPS_REMEMBERED = 500.0
"""Number of steps of one size that count; older ones fade."""
SIZE_HALF_LIFE_S = 600.0
"""A step size that was not seen for this long counts half."""
REFIT_S = 1.0
"""Seconds for which a fit is used."""
_FEW = (4, 16, 64)
_TOLERANCE = 1e-9
RESOURCES = ("compute", "seats", "kv_cache", "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits that the engine was started with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_tokens: int | None = None


class Saturation(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Shares of each resource, all in [0, 1], and the rate at which compute would be used up."""

    by_resource: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    limit_tokens_per_s: float = 0.0
    """Prompt and output tokens per second in the present mix; 0 before anything was measured."""

    @property
    def value(self) -> float:
        """Returns the largest share."""
        return max(self.by_resource.values())

    @staticmethod
    def mean(of_engines: Sequence[Saturation]) -> Saturation:
        """Returns the saturation of several engines that share their requests; at least one."""
        count = len(of_engines)
        shares = {name: sum(one.by_resource[name] for one in of_engines) / count for name in RESOURCES}
        return Saturation(shares, sum(one.limit_tokens_per_s for one in of_engines))

    def or_more(self, other: Saturation) -> Saturation:
        """Returns the larger shares of two processes in front of one engine. Only one of them sees the steps, and the
        fuller queue counts."""
        shares = {name: max(self.by_resource[name], other.by_resource[name]) for name in RESOURCES}
        return Saturation(shares, max(self.limit_tokens_per_s, other.limit_tokens_per_s))


@dataclass(slots=True)
class _Size:
    """Fading sums over steps of about one size."""

    weight: float = 0.0
    outputs: float = 0.0
    prompt_tokens: float = 0.0
    duration_s: float = 0.0
    last_ts: float = 0.0


@lru_cache(maxsize=64)  # a step is mostly like the one before
def _parts(num_outputs: float, num_prompt_tokens: float) -> tuple[float, ...]:
    """Returns the terms whose sum is the time of a step. Rows occur in several terms: the first rows wait for the
    weights and may cost more than later ones; many rows may cost more than a few once the CPU caches are full."""
    first = [min(num_outputs, few) for few in _FEW]
    later = [max(num_outputs - few, 0.0) for few in _FEW]
    return (1.0, num_outputs, *first, *later, 1.0 if num_prompt_tokens else 0.0, num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per term of a step; none is negative."""

    coefficients: tuple[float, ...] = (0.0,) * len(_parts(0, 0))

    def decoding_step(self, num_outputs: float) -> float:
        """Returns the time of a step with this number of outputs and no prompt tokens."""
        return self.predict(_parts(num_outputs, 0.0))

    @property
    def prompt_step(self) -> float:
        """Returns the extra time of a step that computes any prompt tokens."""
        return self.coefficients[-2]

    @property
    def prompt_token(self) -> float:
        """Returns the extra time of each prompt token."""
        return self.coefficients[-1]

    def predict(self, parts: Sequence[float]) -> float:
        """Returns the time of steps with this sum of terms."""
        seconds: float = sum(map(operator.mul, self.coefficients, parts))
        return seconds


class StepCosts:
    """Cost of steps: non-negative least squares of relative errors over the step sizes seen.

    Sizes are powers of two, and each is kept separately: an engine that was full once knows for a long time what a full
    step costs. A term that never varies cannot be separated from the fixed cost, which then includes it.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._now = 0.0

    def add(self, timestamp: float, num_outputs: int, num_prompt_tokens: int, duration_s: float) -> None:
        """Adds a step that ended at `timestamp`."""
        key = num_outputs.bit_length(), num_prompt_tokens.bit_length()
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size()
        keep = 1.0 - 1.0 / STEPS_REMEMBERED
        size.weight = size.weight * keep + 1.0
        size.outputs = size.outputs * keep + num_outputs
        size.prompt_tokens = size.prompt_tokens * keep + num_prompt_tokens
        size.duration_s = size.duration_s * keep + duration_s
        size.last_ts = self._now = timestamp

    def fit(self) -> CostModel:
        """Fits the model to all steps seen; all zeros without any."""
        count = len(CostModel().coefficients)
        matrix, vector = [[0.0] * count for _ in range(count)], [0.0] * count
        for size in self._sizes.values():
            duration_s = size.duration_s / size.weight
            weight = size.weight * 2.0 ** ((size.last_ts - self._now) / SIZE_HALF_LIFE_S) / max(duration_s, 1e-9) ** 2
            row = _parts(size.outputs / size.weight, size.prompt_tokens / size.weight)
            for i in range(count):
                vector[i] += weight * row[i] * duration_s
                for j in range(count):
                    matrix[i][j] += weight * row[i] * row[j]
        return CostModel(tuple(_solve(matrix, vector)))

    @property
    def num_prompt_steps(self) -> float:
        """Number of steps with prompt tokens; those of one size fade."""
        return sum(size.weight for (_, prompt), size in self._sizes.items() if prompt)

    def fit_by_token(self) -> CostModel:
        """Fits the model, and adds to the time of a prompt token its share of the extra time of a step with some: where
        prompts are about equally long, the two cannot be separated, and the latter gets all."""
        *others, extra_s, token_s = self.fit().coefficients
        num_tokens = sum(size.prompt_tokens for size in self._sizes.values())
        share_s = extra_s * self.num_prompt_steps / num_tokens if num_tokens else 0.0
        return CostModel((*others, 0.0, token_s + share_s))


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Returns the x >= 0 of least squares from the normal equations: Lawson and Hanson, "Solving Least Squares
    Problems" (1974), 23. Of terms that cannot be separated the first gets all."""
    size = len(vector)
    x, free = [0.0] * size, list[int]()
    for _ in range(3 * size):
        gains = {
            i: (vector[i] - sum(map(operator.mul, matrix[i], x))) / math.sqrt(matrix[i][i])
            for i in range(size)
            if i not in free and matrix[i][i] > 0
        }
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or gains[best] <= _TOLERANCE * abs(vector[0]) / math.sqrt(matrix[0][0]):
            break
        free.append(best)
        while free:
            found = dict(zip(free, _solve_free(matrix, vector, free), strict=True))
            bad = [i for i in free if found[i] <= 0]
            step = min((x[i] / (x[i] - found[i]) for i in bad if x[i] > found[i]), default=0.0) if bad else 1.0
            for i in free:
                x[i] += step * (found[i] - x[i])
            if not bad:
                break
            gone = [i for i in bad if x[i] <= 1e-15] or bad[-1:]
            for i in gone:
                x[i] = 0.0
                free.remove(i)
    return x


def _solve_free(matrix: list[list[float]], vector: list[float], terms: list[int]) -> list[float]:
    """Solves the normal equations of these terms by Gaussian elimination, with a small weight on all terms but the
    fixed cost."""
    size = len(terms)
    rows = [[matrix[i][j] for j in terms] + [vector[i]] for i in terms]
    for k, term in enumerate(terms):
        rows[k][k] += (1e-9 if term else 0.0) * matrix[term][term]
    for k in range(size):
        pivot = max(range(k, size), key=lambda r: abs(rows[r][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for r in range(size):
            if r != k:
                factor = rows[r][k] / rows[k][k]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[k], strict=True)]
    return [rows[k][size] / rows[k][k] for k in range(size)]


class SaturationMeter:
    """Receives each step with `add_step`; `read` returns the saturation."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._costs = StepCosts()
        self._model = CostModel()
        self._fitted_ts = -math.inf
        self._last_ts: float | None = None
        self._was_busy = False
        self._elapsed_s = self._outputs = self._prompt_tokens = self._prompt_steps = 0.0
        """Fading sums of time and of the work done in it."""
        self._seats = self._kv_usage = 0.0
        """Fading sums weighted with time."""
        self._busy_s = 0.0
        self._parts = [0.0] * len(_parts(0.0, 0.0))
        """Fading sums of the terms of the steps whose time is known."""

    def add_step(
        self,
        timestamp: float,
        *,
        num_outputs: int,
        num_prompt_tokens: int,
        num_running: int,
        kv_usage: float,
        has_work_left: bool,
    ) -> None:
        """Adds a step that ended at `timestamp`."""
        elapsed_s = 0.0 if self._last_ts is None else max(0.0, timestamp - self._last_ts)
        keep = math.exp(-elapsed_s / WINDOW_S)
        if self._was_busy and elapsed_s and (num_outputs or num_prompt_tokens):
            self._costs.add(timestamp, num_outputs, num_prompt_tokens, elapsed_s)
            parts = _parts(num_outputs, num_prompt_tokens)
            self._busy_s = self._busy_s * keep + elapsed_s
            self._parts = [before * keep + part for before, part in zip(self._parts, parts, strict=True)]
        gained_s = WINDOW_S * (1.0 - keep)
        self._elapsed_s = self._elapsed_s * keep + gained_s
        self._outputs = self._outputs * keep + num_outputs
        self._prompt_tokens = self._prompt_tokens * keep + num_prompt_tokens
        self._prompt_steps = self._prompt_steps * keep + bool(num_prompt_tokens)
        self._seats = self._seats * keep + gained_s * (num_running if self._was_busy else 0)
        self._kv_usage = self._kv_usage * keep + gained_s * (kv_usage if self._was_busy else 0.0)
        self._last_ts, self._was_busy = timestamp, has_work_left

    def read(self, now: float, num_queued_tokens: int = 0) -> Saturation:
        """Returns the saturation at `now`, on the clock of the steps."""
        idle_s = 0.0 if self._last_ts is None or self._was_busy else max(0.0, now - self._last_ts)
        keep = math.exp(-idle_s / WINDOW_S)
        elapsed_s = self._elapsed_s * keep + WINDOW_S * (1.0 - keep)
        limit = self._limits.max_num_queued_tokens
        shares = dict.fromkeys(RESOURCES, 0.0)
        shares["queue"] = min(1.0, num_queued_tokens / limit) if limit else 0.0
        if elapsed_s <= 0:
            return Saturation(shares)
        seats, kv_usage = self._seats * keep / elapsed_s, self._kv_usage * keep / elapsed_s
        shares["seats"] = min(1.0, seats / self._limits.max_num_seqs)
        shares["kv_cache"] = min(1.0, kv_usage)
        most_running = float(self._limits.max_num_seqs)
        if kv_usage > 0 and seats > 0:
            most_running = max(1.0, min(most_running, seats / kv_usage))
        scale = keep / elapsed_s
        compute = self._compute_share(self._outputs * scale, self._prompt_tokens * scale, most_running)
        shares["compute"] = AT_THE_KNEE * min(1.0, compute)
        tokens_per_s = (self._outputs + self._prompt_tokens) * scale
        return Saturation(shares, tokens_per_s / compute if compute > 0 else 0.0)

    def _compute_share(self, outputs_per_s: float, prompt_per_s: float, most_running: float) -> float:
        """Returns the share of each second that this traffic takes in steps that are as full as possible, corrected by
        how much recent steps differed from the model."""
        if self._last_ts is not None and self._last_ts >= self._fitted_ts + REFIT_S:
            self._model, self._fitted_ts = self._costs.fit(), self._last_ts
        tokens_per_s = outputs_per_s + prompt_per_s
        steps_per_s = max(outputs_per_s / most_running, tokens_per_s / self._limits.max_num_batched_tokens)
        if not steps_per_s:
            return 0.0
        prompts_per_step = self._prompt_tokens / max(1.0, self._prompt_steps)
        prompt_steps_per_s = min(steps_per_s, prompt_per_s / max(1.0, prompts_per_step))
        expected = (
            steps_per_s * self._model.decoding_step(outputs_per_s / steps_per_s)
            + prompt_steps_per_s * self._model.prompt_step
            + prompt_per_s * self._model.prompt_token
        )
        recent_s = self._model.predict(self._parts)
        return expected * self._busy_s / recent_s if recent_s else expected
