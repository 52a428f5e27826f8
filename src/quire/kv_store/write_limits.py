"""Limits what is written to a store: by a rate, by what was written lately, and by a rest after a failure."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from quire.kv_store.access import REST_S
from quire.kv_store.index import PartsIndex
from quire.wire.kv_transfer import SavedBlocks

MAX_WRITE_BYTES_PER_S = 200_000_000
SAVED_S = 5.0
"""Time for which a block is taken as written before a scan has found it."""


class WriteBudget:
    """A rate of bytes with a burst of one second."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._left, self._ts = float(bytes_per_s), clock()

    def count(self, num_bytes: int) -> int:
        """Returns how many times `num_bytes` may be taken: as long as there are any left. A debt is paid before the
        next."""
        return 0 if self.seconds_left() > 0 else math.ceil(self._left / max(1, num_bytes))

    def take(self, num_bytes: int) -> bool:
        """Takes `num_bytes` if there are any left."""
        if self.seconds_left() > 0:
            return False
        self._left -= num_bytes
        return True

    def seconds_left(self) -> float:
        """Returns the seconds until some bytes are left; 0: there are now."""
        if self._left > 0:
            return 0.0
        now = self._clock()
        self._left = min(float(self._rate), self._left + (now - self._ts) * self._rate)
        self._ts = now
        return 0.0 if self._left > 0 else max(1e-3, -self._left / self._rate)


class WriteLimits:
    """Limits what an engine orders to be written."""

    def __init__(self, bytes_per_s: int) -> None:
        self._budget = WriteBudget(bytes_per_s)
        self._ordered: dict[int, set[bytes]] = {}
        """Digests of the blocks that were ordered lately, per group."""
        self._by_age: deque[tuple[float, int, Sequence[bytes]]] = deque()
        """The same in order: when they were ordered, group, digests."""
        self._rest_ts = float("-inf")

    def seconds_left(self) -> float:
        """Returns the seconds until anything may be written; 0: it may now."""
        return max(0.0, self._rest_ts - time.monotonic(), self._budget.seconds_left())

    def rest(self) -> None:
        """Orders nothing for a while: writing has failed."""
        self._rest_ts = time.monotonic() + REST_S / 10

    def take(
        self, group_id: int, digests: Sequence[bytes], num_bytes: int, index: PartsIndex | None
    ) -> tuple[Sequence[int], int]:
        """Returns the indices of the blocks to be written, each of `num_bytes`, and the number of leading blocks that
        were decided on. The former count as ordered then. `index` has what the store has; None: that is not known."""
        now = time.monotonic()
        most = 0 if now < self._rest_ts else self._budget.count(num_bytes)
        if not most:
            return (), 0
        while self._by_age and self._by_age[0][0] < now - SAVED_S:
            _, group, former = self._by_age.popleft()
            self._ordered[group].difference_update(former)
        ordered = self._ordered.setdefault(group_id, set())
        if ordered.isdisjoint(digests) and (index is None or index.has_none(digests, group_id)):  # nearly always
            num_decided = min(most, len(digests))
            wanted: Sequence[int] = range(num_decided)
        else:
            fresh = [i for i, digest in enumerate(digests) if digest not in ordered]
            if index is not None:
                fresh = [i for i in fresh if not index.contains(digests[i], group_id)]
            wanted, num_decided = fresh[:most], fresh[most] if most < len(fresh) else len(digests)
        names = digests if len(wanted) == len(digests) else [digests[i] for i in wanted]
        num_before = len(ordered)
        ordered.update(names)
        if len(ordered) - num_before < len(names):  # some are there twice
            firsts = {digest: i for i, digest in zip(reversed(wanted), reversed(names), strict=True)}
            wanted, names = sorted(firsts.values()), list(firsts)
        self._by_age.append((now, group_id, names))
        self._budget.take(num_bytes * len(wanted))
        return wanted, num_decided

    def forget(self, group_id: int, digest: bytes) -> None:
        """Lets a block be ordered again."""
        self._ordered.get(group_id, set()).discard(digest)

    def forget_unsaved(self, blocks: SavedBlocks, num_saved: int) -> None:
        """Lets the blocks of an order behind the first `num_saved` be ordered again."""
        for group_id, digest in zip(blocks.group_ids[num_saved:], blocks.digests[num_saved:], strict=True):
            self.forget(group_id, digest)

    def forget_all(self) -> None:
        """Lets all blocks be ordered again."""
        self._ordered.clear()
        self._by_age.clear()
