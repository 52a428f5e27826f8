"""The state of a frontend at one moment: the source of metrics that are read at each scrape instead of counted.

`merge_facts` makes one state of those of several frontends. It is commutative and associative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import msgspec

from quire.frontend.metrics.collect.ledger import RequestLedger, add_counts
from quire.frontend.metrics.collect.saturation import Saturation

OTHER_ADAPTERS = "other"
"""Label of all adapters beyond the cap."""
NO_DRAFTS = "speculation_off"
"""Name of the count that is above 0 once there are no more drafts; missing without speculation."""
MAX_ADAPTER_SERIES = 50
"""Number of adapters with series of their own. The cap keeps clients from growing the exposition without bound."""


class Load(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Load of the engine, in a few numbers that are cheap to compute."""

    kv_cache_usage: float
    num_running: int
    num_waiting: int
    saturation: float


class AdapterLoad(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Live requests of LoRA adapters, by adapter."""

    running: dict[str, int] = {}
    waiting: dict[str, int] = {}

    @classmethod
    def count(cls, requests: Iterable[tuple[str, bool]]) -> AdapterLoad:
        """Counts requests, each given as (adapter, whether it is running)."""
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for adapter, is_running in requests:
            (running if is_running else waiting)[adapter] += 1
        return cls(running, waiting)

    def plus(self, other: AdapterLoad) -> AdapterLoad:
        """Returns the sum of both."""
        return AdapterLoad(add_counts(self.running, other.running), add_counts(self.waiting, other.waiting))

    def capped(self, limit: int = MAX_ADAPTER_SERIES) -> list[tuple[str, str, int]]:
        """Returns (adapter, state, requests) of the `limit` busiest adapters, and the sum of the others."""
        total = Counter(self.running) + Counter(self.waiting)
        busiest = sorted(total, key=lambda name: (-total[name], name))
        shown, others = busiest[:limit], busiest[limit:]
        rows = []
        for state, load in (("running", self.running), ("waiting", self.waiting)):
            rows += [(name, state, load.get(name, 0)) for name in shown]
            if others:
                rows.append((OTHER_ADAPTERS, state, sum(load.get(name, 0) for name in others)))
        return rows


class AdapterLabels:
    """Labels of counters by adapter. A counter never goes down, so an adapter keeps the label that it got first: its
    name, or `OTHER_ADAPTERS` after `limit` others."""

    def __init__(self, max_lora: int = 0, limit: int = MAX_ADAPTER_SERIES) -> None:
        self.max_lora = max_lora
        """Maximum number of adapters among running requests; 0: unlimited."""
        self._limit = limit
        self._named: set[str] = set()

    def relabel(self, tokens: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Returns the same counts by label."""
        found: dict[str, tuple[int, int]] = {}
        for name, (num_prompt, num_generation) in tokens.items():
            if len(self._named) < self._limit:
                self._named.add(name)
            label = name if name in self._named else OTHER_ADAPTERS
            prompt, generation = found.get(label, (0, 0))
            found[label] = prompt + num_prompt, generation + num_generation
        return found


class FrontendFacts(msgspec.Struct, kw_only=True, array_like=True, frozen=True, gc=False):
    """State of one frontend at one moment. Made for each snapshot by the thread that owns the frontend."""

    time: float
    """Wall clock, like all times here."""
    ledger: RequestLedger
    num_live: dict[str, int]
    """Live requests: "waiting" (no token yet), "running", "resting" (a session without input)."""
    num_lost: int = 0
    """Requests that were live in an API process when it exited."""
    num_queued_tokens: int = 0
    """Tokens of the waiting prompts."""
    admission_rejections: dict[str, int] = {}
    """Rejected user requests, by the limit that rejected them."""
    core_counts: dict[str, int] = {}
    """The counts of `EngineLink`."""
    core_restarts: dict[str, int] = {}
    is_core_ready: bool = True
    num_engines_up: int = 1
    """Number of engines that would work on a request now."""
    oldest_arrival: float | None = None
    """Arrival time of the oldest live request that is not resting; None without one."""
    last_step_time: float = 0.0
    """Time at which the last step was received."""
    saturation: Saturation = Saturation()
    sleep_level: int = 0
    sleep_time: float = 0.0
    """Time at which `sleep_level` was set; 0 if it never was."""
    operations_in_flight: dict[str, int] = {}
    adapters: AdapterLoad = AdapterLoad()
    max_lora: int = 0
    num_processes: dict[str, int] = msgspec.field(default_factory=lambda: {"answered": 1})
    """Processes of the server: "answered", or "late" (represented by their last report)."""
    num_lost_processes: int = 0
    """Processes that exited without a final report."""

    @property
    def step_age_s(self) -> float:
        """Returns the seconds since the last step while there is something to compute, else 0."""
        if self.oldest_arrival is None:
            return 0.0
        return max(0.0, self.time - max(self.oldest_arrival, self.last_step_time))


def merge_facts(facts: Sequence[FrontendFacts]) -> FrontendFacts:
    """Merges the states of the frontends of one server; at least one."""
    return reduce(_merge, facts)


def _merge(a: FrontendFacts, b: FrontendFacts) -> FrontendFacts:
    arrivals = [arrival for arrival in (a.oldest_arrival, b.oldest_arrival) if arrival is not None]
    later = max(a, b, key=lambda facts: (facts.time, not facts.is_core_ready))
    sleep_time, sleep_level = max((facts.sleep_time, facts.sleep_level) for facts in (a, b))
    return FrontendFacts(
        time=later.time,
        ledger=a.ledger.plus(b.ledger),
        num_live=add_counts(a.num_live, b.num_live),
        num_lost=a.num_lost + b.num_lost,
        num_queued_tokens=a.num_queued_tokens + b.num_queued_tokens,
        admission_rejections=add_counts(a.admission_rejections, b.admission_rejections),
        core_counts=add_counts(a.core_counts, b.core_counts),
        core_restarts=add_counts(a.core_restarts, b.core_restarts),
        is_core_ready=later.is_core_ready,
        num_engines_up=later.num_engines_up,
        oldest_arrival=min(arrivals, default=None),
        last_step_time=max(a.last_step_time, b.last_step_time),
        saturation=a.saturation.or_more(b.saturation),
        sleep_level=sleep_level,
        sleep_time=sleep_time,
        operations_in_flight=add_counts(a.operations_in_flight, b.operations_in_flight),
        adapters=a.adapters.plus(b.adapters),
        max_lora=max(a.max_lora, b.max_lora),
        num_processes=add_counts(a.num_processes, b.num_processes),
        num_lost_processes=a.num_lost_processes + b.num_lost_processes,
    )


def close_facts(facts: FrontendFacts, *, is_lost: bool) -> FrontendFacts:
    """Returns what remains of a frontend that has exited: its live requests are lost, so the sums of the ledger still
    hold.

    `is_lost`: the frontend sent no final report.
    """
    ledger = facts.ledger
    rejected = add_counts(ledger.rejected, {"lost": ledger.num_in_admission} if ledger.num_in_admission else {})
    return msgspec.structs.replace(
        facts,
        ledger=msgspec.structs.replace(ledger, num_in_admission=0, rejected=rejected),
        num_live={},
        num_lost=facts.num_lost + sum(facts.num_live.values()),
        num_queued_tokens=0,
        oldest_arrival=None,
        saturation=Saturation(),
        operations_in_flight={},
        adapters=AdapterLoad(),
        num_processes={},
        num_lost_processes=facts.num_lost_processes + is_lost,
    )
