"""How near the engine is to the most it can do: one number that an autoscaler can be given, whatever the requests are.

Use of the KV cache, or the number of running requests, says little by itself: short answers fill no cache, long prompts
fill the step's budget with few requests. What ends up binding is time. So the meter learns what a step costs,

    step time = fixed + per_output * outputs decoded + per_prompt_token * prompt tokens computed,

from the steps it sees, and says which share of the time the present traffic would take if steps were as full as they
can be: that share is 1 at the most the engine can do, for this mix of prompts and answers. Beside it stand the seats,
the cache and the queue; the largest of them is the saturation.

Knows no clock: whoever tells it of a step says when that was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WINDOW_S = 15.0
"""Time constant of all averages."""
STEPS_REMEMBERED = 2000.0
"""How many steps the costs are learned from, older ones fading."""
RESOURCES = ("compute", "seats", "kv_cache", "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine was started with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Saturation:
    """Shares of what there is, each in [0, 1], and the rate at which compute would be used up."""

    by_resource: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    limit_tokens_per_s: float = 0.0
    """Prompt and output tokens per second, in the present mix; 0 before anything was measured."""

    @property
    def value(self) -> float:
        """The largest share."""
        return max(self.by_resource.values())


class StepCosts:
    """The three costs of a step, by least squares over the last steps; none is below 0.

    While a term never varies it cannot be told from the fixed cost, which then gets all of it.
    """

    def __init__(self) -> None:
        self._matrix = [[0.0] * 3 for _ in range(3)]
        self._vector = [0.0] * 3

    def add(self, num_outputs: float, num_prompt_tokens: float, duration_s: float) -> None:
        """One more step."""
        row = (1.0, num_outputs, num_prompt_tokens)
        fade = 1.0 - 1.0 / STEPS_REMEMBERED
        for i, matrix_row in enumerate(self._matrix):
            for j in range(3):
                matrix_row[j] = matrix_row[j] * fade + row[i] * row[j]
            self._vector[i] = self._vector[i] * fade + row[i] * duration_s

    def solve(self) -> tuple[float, float, float]:
        """(fixed, per output, per prompt token), in seconds."""
        terms = [0, 1, 2]
        while terms:
            found = self._solve(terms)
            worst = min(range(len(terms)), key=lambda k: found[k] * self._scale(terms[k]))
            if found[worst] >= 0:
                costs = [0.0, 0.0, 0.0]
                for term, cost in zip(terms, found, strict=True):
                    costs[term] = cost
                return costs[0], costs[1], costs[2]
            terms.pop(worst)
        return 0.0, 0.0, 0.0

    def _scale(self, term: int) -> float:
        return math.sqrt(self._matrix[term][term])

    def _solve(self, terms: list[int]) -> list[float]:
        """Gauss on the normal equations of these terms, held together by a little weight on all but the fixed cost."""
        size = len(terms)
        rows = [[self._matrix[i][j] for j in terms] + [self._vector[i]] for i in terms]
        for k, term in enumerate(terms):
            rows[k][k] += (1e-6 if term else 1e-12) * self._matrix[term][term] + 1e-12
        for k in range(size):
            pivot = max(range(k, size), key=lambda r: abs(rows[r][k]))
            rows[k], rows[pivot] = rows[pivot], rows[k]
            for r in range(size):
                if r != k:
                    factor = rows[r][k] / rows[k][k]
                    rows[r] = [a - factor * b for a, b in zip(rows[r], rows[k], strict=True)]
        return [rows[k][size] / rows[k][k] for k in range(size)]


class SaturationMeter:
    """Takes in each step; `read` says how saturated the engine is. A few additions per step."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._costs = StepCosts()
        self._last_ts: float | None = None
        self._was_busy = False
        self._elapsed_s = self._outputs = self._prompt_tokens = self._seats = self._kv_usage = 0.0
        """Fading sums: of time, and of what happened in it; the last two weighted with time."""

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
        """A step that ended at `timestamp` decoded so many outputs and computed so many prompt tokens."""
        elapsed_s = 0.0 if self._last_ts is None else max(0.0, timestamp - self._last_ts)
        if self._was_busy and elapsed_s and (num_outputs or num_prompt_tokens):
            self._costs.add(num_outputs, num_prompt_tokens, elapsed_s)
        keep = math.exp(-elapsed_s / WINDOW_S)
        gained_s = WINDOW_S * (1.0 - keep)
        self._elapsed_s = self._elapsed_s * keep + gained_s
        self._outputs = self._outputs * keep + num_outputs
        self._prompt_tokens = self._prompt_tokens * keep + num_prompt_tokens
        self._seats = self._seats * keep + gained_s * (num_running if self._was_busy else 0)
        self._kv_usage = self._kv_usage * keep + gained_s * (kv_usage if self._was_busy else 0.0)
        self._last_ts, self._was_busy = timestamp, has_work_left

    def read(self, now: float, num_queued_tokens: int = 0) -> Saturation:
        """At `now`, on the clock of the steps."""
        idle_s = 0.0 if self._last_ts is None or self._was_busy else max(0.0, now - self._last_ts)
        keep = math.exp(-idle_s / WINDOW_S)
        elapsed_s = self._elapsed_s * keep + WINDOW_S * (1.0 - keep)
        limit = self._limits.max_num_queued_tokens
        shares = dict.fromkeys(RESOURCES, 0.0)
        shares["queue"] = min(1.0, num_queued_tokens / limit) if limit else 0.0
        if elapsed_s <= 0:
            return Saturation(shares)
        seats, kv_usage = self._seats * keep / elapsed_s, self._kv_usage * keep / elapsed_s
        outputs_per_s, prompt_per_s = self._outputs * keep / elapsed_s, self._prompt_tokens * keep / elapsed_s
        shares["seats"] = min(1.0, seats / self._limits.max_num_seqs)
        shares["kv_cache"] = min(1.0, kv_usage)
        most_running = float(self._limits.max_num_seqs)
        if kv_usage > 0 and seats > 0:
            most_running = max(1.0, min(most_running, seats / kv_usage))
        fixed, per_output, per_prompt_token = self._costs.solve()
        tokens_per_s = outputs_per_s + prompt_per_s
        steps_per_s = max(outputs_per_s / most_running, tokens_per_s / self._limits.max_num_batched_tokens)
        compute = fixed * steps_per_s + per_output * outputs_per_s + per_prompt_token * prompt_per_s
        shares["compute"] = min(1.0, compute)
        return Saturation(shares, tokens_per_s / compute if compute > 0 else 0.0)
