"""How long blocks live, idle and wait for their next use: measured on a sample (checklist S0-PR-033...035)."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from quire.wire.stats import KVCacheEvictionEvent

NUM_ACCESSES_KEPT = 4


@dataclass(slots=True)
class _BlockLife:
    birth_ts: float
    access_ts: deque[float]
    """Its last few uses; the allocation is the first."""


class KVCacheMetricsCollector:
    """Follows a share of the allocated blocks from allocation to eviction.

    A block whose content was never cached, or was dropped by a reset, is reused rather than evicted: it makes no event.
    Which blocks are followed is drawn from a generator of its own, so that a seed replays a run.
    """

    def __init__(self, sample_rate: float, clock: Callable[[], float] = time.monotonic, seed: int = 0) -> None:
        self._sample_rate = sample_rate
        self._clock = clock
        self._random = random.Random(seed)
        self._lives: dict[int, _BlockLife] = {}
        self._events: list[KVCacheEvictionEvent] = []

    def on_block_allocated(self, block_id: int) -> None:
        """The block was given to a request for new tokens."""
        self._lives.pop(block_id, None)
        if self._random.random() < self._sample_rate:
            now = self._clock()
            self._lives[block_id] = _BlockLife(now, deque([now], maxlen=NUM_ACCESSES_KEPT))

    def on_block_accessed(self, block_id: int) -> None:
        """A request hit the block."""
        if life := self._lives.get(block_id):
            life.access_ts.append(self._clock())

    def on_block_evicted(self, block_id: int) -> None:
        """The block's cached content is about to be overwritten."""
        if life := self._lives.pop(block_id, None):
            now = self._clock()
            gaps = tuple(after - before for before, after in pairwise(life.access_ts))
            self._events.append(KVCacheEvictionEvent(now - life.birth_ts, now - life.access_ts[-1], gaps))

    def reset(self) -> None:
        """The cache was emptied on purpose: nothing that is followed will be evicted."""
        self._lives.clear()

    def take_events(self) -> list[KVCacheEvictionEvent]:
        """Evictions since the last call."""
        events, self._events = self._events, []
        return events
