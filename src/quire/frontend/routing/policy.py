"""Policies that choose the engine of a request. A further one is a class and a row of `ROUTING_POLICIES`.

A policy sees the load of each engine that may be chosen (`EngineLoad`) and one request (`Routed`), and returns an
engine and the reason. It is pure but for what it remembers itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

from quire.frontend.metrics.collect.saturation import CostModel, StepCosts
from quire.frontend.routing.load_board import RequestCounts
from quire.wire.stats import SchedulerStats

Reason = Literal["wait", "prefix", "bound", "turn", "session", "rank"]
"""Why an engine was chosen: the least wait; its cached prefix; the load of a better one; its turn; it has answered the
session so far; the request names it."""
REASONS: tuple[Reason, ...] = ("wait", "prefix", "bound", "turn", "session", "rank")

PROMPT_TOKEN_S = 5e-5
STEP_S = 1e-3
ROW_S = 1e-4
"""Costs of a prompt token, of a step and of each row in it, until an engine's own are known."""
MIN_STEPS = 512
"""Steps before costs are fitted: a few, all of one size, show no cost per row, and equal engines would seem unlike."""
REFIT_INTERVAL_S = 10.0
NO_ROOM_S = 1.0
"""Wait that is expected where the blocks of the prompt do not fit beside those in use."""
LOAD_FACTOR = 1.25
"""No engine gets a request if it then has more than this times the mean, plus 1."""
TIE_S = 0.002
TIE_SHARE = 0.25
"""Waits are equal if they differ by less than `TIE_S`, and by less than this share of the shorter one."""


class EngineLoad:
    """Load of one engine: the requests it has, of this client and of others, and the cost of its steps, learnt from its
    statistics."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_running = 0
        """Requests of this client that have had a token."""
        self.num_waiting = 0
        """Its others."""
        self.num_queued_tokens = 0
        """Prompt tokens of the waiting ones that are not expected to be cached."""
        self.others = RequestCounts()
        """Requests of other clients, as of the last choice."""
        self.kv_usage = 0.0
        self.num_tokens_of_cache = 0
        """Tokens that fit into the KV cache; 0 if unknown."""
        self._costs = StepCosts()
        self.model: CostModel | None = None
        """Costs of its steps; None if unknown."""
        self._num_steps = 0
        self._last_ts = self._fitted_ts = 0.0
        self._was_busy = False

    @property
    def own_counts(self) -> RequestCounts:
        """Requests of this client at the engine."""
        return RequestCounts(self.num_running, self.num_waiting, self.num_queued_tokens)

    @property
    def num_own_requests(self) -> int:
        """Their number."""
        return self.num_running + self.num_waiting

    @property
    def num_all_waiting(self) -> int:
        """Requests at the engine that have had no token."""
        return self.num_waiting + self.others.num_waiting

    @property
    def num_requests(self) -> int:
        """Requests at the engine."""
        return self.num_running + self.others.num_running + self.num_all_waiting

    def note_step(self, timestamp: float, stats: SchedulerStats) -> bool:
        """Learns from the statistics of a step, which ended at `timestamp` on the engine's clock. Returns whether the
        costs were fitted again."""
        self.kv_usage = stats.kv_cache_usage
        num_prompt = max(0, stats.num_scheduled_tokens - stats.num_decoded_reqs)
        if self._was_busy and timestamp > self._last_ts and (num_prompt or stats.num_decoded_reqs):
            self._costs.add(timestamp, stats.num_decoded_reqs, num_prompt, timestamp - self._last_ts)
            self._num_steps += 1
        self._last_ts = timestamp
        self._was_busy = bool(stats.num_running_reqs or stats.num_waiting_reqs)
        if self._num_steps >= MIN_STEPS and timestamp > self._fitted_ts + REFIT_INTERVAL_S:
            self.model, self._fitted_ts = self._costs.fit(), timestamp
            return True
        return False

    @property
    def prompt_token_s(self) -> float:
        """Seconds of each prompt token."""
        return PROMPT_TOKEN_S if self.model is None else self.model.prompt_token

    def predict_wait(self, num_tokens: int, num_cached: int) -> float:
        """Returns the seconds until the first token of a further request of `num_tokens` tokens."""
        num_prompt = self.num_queued_tokens + self.others.num_queued_tokens + num_tokens - num_cached
        num_rows = self.num_requests + 1
        step_s = STEP_S + num_rows * ROW_S if self.model is None else self.model.decoding_step(num_rows)
        wait = num_prompt * self.prompt_token_s + step_s
        room = self.num_tokens_of_cache * (1.0 - self.kv_usage)
        return wait + NO_ROOM_S if self.num_tokens_of_cache and num_tokens - num_cached > room else wait


class Routed(NamedTuple):
    """One request to be placed."""

    num_tokens: int
    key: int
    """Hash of its first block, or of a shorter prompt: equal for prompts that begin alike."""
    num_cached: Sequence[int]
    """Tokens each of the engines probably has in its prefix cache, in the order of the loads."""


class RoutingPolicy(ABC):
    """Chooses among at least one engine."""

    reads_prefixes = False
    """True if `Routed.num_cached` is used: prompts are hashed only then."""

    @abstractmethod
    def choose(self, request: Routed, loads: Sequence[EngineLoad]) -> tuple[int, Reason]:
        """Returns the position of an engine in `loads`, and the reason."""


class LeastWait(RoutingPolicy):
    """The engine with the shortest predicted wait for the first token, in seconds: queued prompt tokens and those of
    this prompt that are not cached there, at the measured cost of each, and a step with all its rows. The latter tokens
    count twice: this request waits for them, and so do those that come to the engine after it.

    An engine with more than `LOAD_FACTOR` times the mean number of requests, plus 1, is left out. So a prefix that many
    requests share spreads over more engines as soon as the queue before it costs more than the prefix. Among equal
    waits the longest cached prefix decides, then the fewest requests, then the first block by rendezvous hashing: after
    a restart the same prompts meet at the same engine.
    """

    reads_prefixes = True

    def choose(self, request: Routed, loads: Sequence[EngineLoad]) -> tuple[int, Reason]:
        counts = [load.num_requests for load in loads]
        limit = LOAD_FACTOR * (sum(counts) + 1) / len(counts) + 1
        allowed = [i for i, count in enumerate(counts) if count + 1 <= limit]
        waits = [
            load.predict_wait(request.num_tokens, cached) + load.prompt_token_s * (request.num_tokens - cached)
            for load, cached in zip(loads, request.num_cached, strict=True)
        ]
        least = min(waits[i] for i in allowed)
        margin = min(TIE_S, TIE_SHARE * least)
        tied = [i for i in allowed if waits[i] <= least + margin]
        best = tied[0]
        if len(tied) > 1:
            best = max(tied, key=lambda i: (request.num_cached[i], -counts[i], _weigh(request.key, loads[i].index)))
        if min(waits) < least - margin:
            return best, "bound"
        return best, "prefix" if request.num_cached[best] else "wait"


def _weigh(key: int, index: int) -> int:
    """Returns a number that is random in both arguments and the same in every process (splitmix64's finalizer)."""
    x = (key ^ (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


class VllmScore(RoutingPolicy):
    """vLLM's rule: the fewest requests, where waiting ones count more the fuller the cache is. Ties go round."""

    def __init__(self) -> None:
        self._start = 0

    def choose(self, request: Routed, loads: Sequence[EngineLoad]) -> tuple[int, Reason]:
        order = [(self._start + i) % len(loads) for i in range(len(loads))]
        self._start = (self._start + 1) % len(loads)

        def score(i: int) -> float:
            load = loads[i]
            return load.num_requests + load.num_all_waiting * 6 * max(0.0, load.kv_usage - 0.5)

        return min(order, key=score), "wait"


class RoundRobin(RoutingPolicy):
    """One engine after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Routed, loads: Sequence[EngineLoad]) -> tuple[int, Reason]:
        following = [i for i, load in enumerate(loads) if load.index > self._last]
        chosen = following[0] if following else 0
        self._last = loads[chosen].index
        return chosen, "turn"


ROUTING_POLICIES: dict[str, type[RoutingPolicy]] = {
    "least_wait": LeastWait,
    "vllm_score": VllmScore,
    "round_robin": RoundRobin,
}
"""Policies by the name of --routing-policy."""
