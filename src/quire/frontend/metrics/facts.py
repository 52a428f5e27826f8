"""What is true of a frontend at the moment somebody asks: the source of the metrics that are read, not counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quire.frontend.metrics.ledger import RequestLedger
from quire.frontend.metrics.saturation import Saturation

OTHER_ADAPTERS = "other"
"""The label of all adapters beyond the cap."""
MAX_ADAPTER_SERIES = 50
"""Adapters with series of their own (promise: no client can make the exposition grow without bound)."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Live requests of LoRA adapters, by adapter."""

    running: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def count(cls, requests: Iterable[tuple[str, bool]]) -> AdapterLoad:
        """Of (adapter, is it running) per live request."""
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for adapter, is_running in requests:
            (running if is_running else waiting)[adapter] += 1
        return cls(running, waiting)

    def capped(self, limit: int = MAX_ADAPTER_SERIES) -> list[tuple[str, str, int]]:
        """(adapter, state, requests): the `limit` busiest adapters, and the others together."""
        total = Counter(self.running) + Counter(self.waiting)
        busiest = sorted(total, key=lambda name: (-total[name], name))
        shown, others = busiest[:limit], busiest[limit:]
        rows = []
        for state, load in (("running", self.running), ("waiting", self.waiting)):
            rows += [(name, state, load.get(name, 0)) for name in shown]
            if others:
                rows.append((OTHER_ADAPTERS, state, sum(load.get(name, 0) for name in others)))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendFacts:
    """One moment of one frontend. Made for each snapshot, by the thread that owns what it shows."""

    time: float
    """Wall clock."""
    ledger: RequestLedger
    num_live: Mapping[str, int]
    """Requests that have not ended, by "waiting" (no token yet), "running", "resting" (a session without input)."""
    num_queued_tokens: int
    """Of the prompts that wait."""
    admission_rejections: Mapping[str, int]
    """User requests, by the limit."""
    core_counts: Mapping[str, int]
    """`EngineLink.counts`."""
    core_restarts: Mapping[str, int]
    is_core_ready: bool
    step_age_s: float
    """Since the last step, while there is something to compute; else 0."""
    saturation: Saturation
    sleep_level: int
    operations_in_flight: Mapping[str, int]
    adapters: AdapterLoad
    max_lora: int
