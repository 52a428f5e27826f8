"""Policies that choose the engine of a request. A further one is a class and a row of `ROUTING_POLICIES`.

A policy sees the load of each engine that may be chosen (`EngineLoad`) and one request (`Routed`), and returns an
engine and the reason. It is pure but for what it remembers itself.
"""

from __future__ import annotations

import math
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
MIN_PROMPT_STEPS = 32
"""Steps with prompts among them: without any, prompts would seem to cost nothing. Only steps that follow another count,
so an engine that is mostly idle sees few."""
REFIT_INTERVAL_S = 10.0
NO_ROOM_S = 1.0
"""Wait that is expected where the blocks of the prompt do not fit beside those in use."""
LOAD_FACTOR = 1.25
"""No engine gets a request if it then has more than this times the mean, plus 1, and more than `FEW`."""
FEW = 2
"""Requests that any engine may have: with fewer than one for each engine on average, a second one costs a row, and
another engine the prefix."""
TIE_S = 0.002
TIE_SHARE = 0.25
"""Waits are equal if they differ by less than `TIE_S`, and by less than this share of the shorter one."""
_WORD = (1 << 64) - 1


class EngineLoad:
    """Load of one engine: the requests it has, of this client and of others, and the cost of its steps, learnt from its
    statistics. Its methods alone change it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.salt = (index + 1) * 0x9E3779B97F4A7C15 & _WORD
        """Distinguishes its weights for keys from those of other engines."""
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
        self._prices: dict[int, float] = {}
        """Seconds of a step with so many rows, by `model`."""
        self._num_steps = 0
        self._last_ts = self._fitted_ts = 0.0
        self._was_busy = False
        self.terms = (0, 0, PROMPT_TOKEN_S, STEP_S + ROW_S, math.inf)
        """Terms of a wait, made at each change, because a choice reads them of up to 64 engines: requests and queued
        prompt tokens of all clients, seconds of a prompt token, of a step with one more row, and the tokens that fit
        into the cache beside those in use."""

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
        return self.terms[0]

    def _update(self) -> None:
        num_running, num_waiting, num_queued_tokens = self.others
        num_requests = self.num_running + self.num_waiting + num_running + num_waiting
        num_rows = num_requests + 1
        if self.model is None:
            prompt_token_s, step_s = PROMPT_TOKEN_S, STEP_S + num_rows * ROW_S
        else:
            known = self._prices.get(num_rows)
            step_s = self._prices[num_rows] = self.model.decoding_step(num_rows) if known is None else known
            prompt_token_s = self.model.prompt_token
        room = self.num_tokens_of_cache * (1.0 - self.kv_usage) if self.num_tokens_of_cache else math.inf
        self.terms = (num_requests, self.num_queued_tokens + num_queued_tokens, prompt_token_s, step_s, room)

    def add_request(self, num_tokens: int) -> None:
        """Adds a request of this client, which waits; `num_tokens` of its prompt have to be computed."""
        self.num_waiting += 1
        self.num_queued_tokens += num_tokens
        self._update()

    def start_request(self, num_tokens: int) -> None:
        """Records the first token of a request that was added with so many tokens."""
        self.num_waiting -= 1
        self.num_queued_tokens -= num_tokens
        self.num_running += 1
        self._update()

    def remove_request(self) -> None:
        """Removes a request that has had a token."""
        self.num_running -= 1
        self._update()

    def note_ready(self, num_tokens_of_cache: int) -> None:
        """Records that the engine was started, with an empty cache of this size."""
        self.num_tokens_of_cache, self.kv_usage = num_tokens_of_cache, 0.0
        self._update()

    def note_others(self, others: tuple[int, int, int]) -> None:
        """Records the requests of other clients (`RequestCounts`)."""
        if others != self.others:
            self.others = RequestCounts(*others)
            self._update()

    def note_facts(self, kv_usage: float, model: CostModel | None) -> None:
        """Records the use of the cache, and new costs of steps; None: they have not changed."""
        if model is not None:
            self.model, self._prices = model, {}
        if model is not None or kv_usage != self.kv_usage:
            self.kv_usage = kv_usage
            self._update()

    def note_step(self, timestamp: float, stats: SchedulerStats) -> bool:
        """Learns from the statistics of a step, which ended at `timestamp` on the engine's clock. Returns whether the
        costs were fitted again."""
        num_prompt = max(0, stats.num_scheduled_tokens - stats.num_decoded_reqs)
        if self._was_busy and timestamp > self._last_ts and (num_prompt or stats.num_decoded_reqs):
            self._costs.add(timestamp, stats.num_decoded_reqs, num_prompt, timestamp - self._last_ts)
            self._num_steps += 1
        self._last_ts = timestamp
        self._was_busy = bool(stats.num_running_reqs or stats.num_waiting_reqs)
        is_fitted = (
            self._num_steps >= MIN_STEPS
            and timestamp > self._fitted_ts + REFIT_INTERVAL_S
            and self._costs.num_prompt_steps >= MIN_PROMPT_STEPS
        )
        if is_fitted:
            self._fitted_ts = timestamp
        self.note_facts(stats.kv_cache_usage, self._costs.fit_by_token() if is_fitted else None)
        return is_fitted

    def predict_wait(self, num_tokens: int, num_cached: int) -> float:
        """Returns the seconds until the first token of a further request of `num_tokens` tokens."""
        _, num_queued_tokens, prompt_token_s, step_s, room = self.terms
        num_new = num_tokens - num_cached
        wait = (num_queued_tokens + num_new) * prompt_token_s + step_s
        return wait + NO_ROOM_S if num_new > room else wait


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

    An engine that would have more than `LOAD_FACTOR` times the mean number of requests, plus 1, is left out, unless it
    would have `FEW`. So a prefix that many requests share spreads over more engines as soon as the queue before it
    costs more than the prefix. Among equal waits the longest cached prefix decides, then the fewest requests, then the
    first block by rendezvous hashing: after a restart the same prompts meet at the same engine.
    """

    reads_prefixes = True

    def choose(self, request: Routed, loads: Sequence[EngineLoad]) -> tuple[int, Reason]:
        num_tokens, key, num_cached = request
        terms = [load.terms for load in loads]
        counts = [each[0] for each in terms]
        waits = [  # `predict_wait`; a call for each is dear here
            (queued + num_new) * token_s + step_s + token_s * num_new
            if num_new <= room
            else (queued + num_new) * token_s + step_s + NO_ROOM_S + token_s * num_new
            for (_, queued, token_s, step_s, room), cached in zip(terms, num_cached, strict=True)
            for num_new in (num_tokens - cached,)
        ]
        limit = max(FEW, math.floor(LOAD_FACTOR * (sum(counts) + 1) / len(counts) + 1)) - 1
        shortest = least = min(waits)
        if max(counts) > limit:
            least = min([wait for wait, count in zip(waits, counts, strict=True) if count <= limit])
        margin = min(TIE_S, TIE_SHARE * least)
        end = least + margin
        tied = [i for i, wait in enumerate(waits) if wait <= end and counts[i] <= limit]
        if len(tied) > 1:
            most = max([num_cached[i] for i in tied])
            tied = [i for i in tied if num_cached[i] == most]
            fewest = min([counts[i] for i in tied])
            tied = [i for i in tied if counts[i] == fewest]
        best = tied[0] if len(tied) == 1 else _choose_by_key(key, tied, loads)
        if shortest < least - margin:
            return best, "bound"
        return best, "prefix" if num_cached[best] else "wait"


def _choose_by_key(key: int, positions: list[int], loads: Sequence[EngineLoad]) -> int:
    """Returns the position whose engine has the largest weight. Weights are random in key and engine, and the same in
    every process (splitmix64's finalizer)."""
    key &= _WORD
    best, most = positions[0], -1
    for i in positions:
        x = key ^ loads[i].salt
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        x ^= x >> 31
        if x > most:
            best, most = i, x
    return best


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
