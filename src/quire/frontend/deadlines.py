"""Time limits of live requests: deadlines, and readers that take no output.

`Deadlines` knows which of many items is due next; it reads no clock. `RequestTimers` sets one timer of the event loop
for all requests.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from quire.errors import DeadlineExceededError, QuireError, SlowClientError
from quire.field_bounds import FieldBound
from quire.frontend.output_handler import RequestOutputCollector

T = TypeVar("T")
TIMEOUT_S = FieldBound("timeout_s", "float", 0, 1e9, exclusive_minimum=True, optional=True)
MIN_COMPACTION = 64


class Deadlines(Generic[T]):
    """Items and their deadlines. An item that `is_over` need not be taken out: it is forgotten in time.

    Memory stays within twice the live items: when as many are over, they are swept out.
    """

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._heap: list[tuple[float, int, T]] = []
        self._count = itertools.count()
        self._compact_at = MIN_COMPACTION

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: T, due: float) -> None:
        """Adds an item that is due at `due`, on the caller's clock."""
        heapq.heappush(self._heap, (due, next(self._count), item))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if not self._is_over(entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = max(MIN_COMPACTION, 2 * len(self._heap))

    @property
    def next_due(self) -> float | None:
        """Time of the earliest deadline; None: there is none."""
        while self._heap and self._is_over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[T]:
        """Takes out and returns the items that are due and not over, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            item = heapq.heappop(self._heap)[2]
            if not self._is_over(item):
                due.append(item)
        return due


def deadline_error(timeout_s: float) -> DeadlineExceededError:
    """Returns the error that the reader of an overdue request gets."""
    return DeadlineExceededError(
        f"deadline_exceeded: the request was not finished within {timeout_s:g} s; it was ended there "
        "(timeout_s, --request-timeout-s)"
    )


SWEEPS_PER_TIMEOUT = 10
"""Number of looks for stalled readers per timeout: a reader is cut at most two tenths of its time late."""

Expired = list[tuple[RequestOutputCollector, QuireError]]


class RequestTimers:
    """Calls `on_expired` with the requests that must end, and why. Requests that end by themselves need no call.

    A reader is stalled when output was ready and it took none for `slow_client_timeout_s` (0: no limit). The timers
    belong to the loop that is running at the first `watch`.
    """

    def __init__(self, slow_client_timeout_s: float, on_expired: Callable[[Expired], None]) -> None:
        self._slow_timeout_s = slow_client_timeout_s
        self._on_expired = on_expired
        self._deadlines: Deadlines[tuple[RequestOutputCollector, float]] = Deadlines(lambda item: item[0].is_final)
        """Requests and the time they were given."""
        self._readers: dict[RequestOutputCollector, tuple[int, float] | None] = {}
        """Live requests. With output ready: how many outputs their reader had taken when that was first seen, and
        when."""
        self._next_sweep = 0.0
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0
        """Time the timer is set to: timers of uvloop do not show it."""

    def watch(self, collector: RequestOutputCollector, start: float = 0.0, timeout_s: float | None = None) -> None:
        """Watches a request. It has `timeout_s` (None: no limit) from `start`, on the loop's clock, to its end."""
        loop = asyncio.get_running_loop()
        if timeout_s is not None:
            self._deadlines.add((collector, timeout_s), start + timeout_s)
        if self._slow_timeout_s:
            if not self._readers:
                self._next_sweep = loop.time() + self._slow_timeout_s / SWEEPS_PER_TIMEOUT
            self._readers[collector] = None
        self._set_timer(loop)

    def stop(self) -> None:
        """Stops watching."""
        if self._timer is not None:
            self._timer.cancel()
        self._readers.clear()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._deadlines.next_due
        if self._readers:
            due = self._next_sweep if due is None else min(due, self._next_sweep)
        if due is None or (self._timer is not None and self._rings_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at = loop.call_at(due, self._ring, loop), due

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        expired: Expired = [
            (collector, deadline_error(timeout_s)) for collector, timeout_s in self._deadlines.take_due(now)
        ]
        if self._readers and now >= self._next_sweep:
            expired += self._sweep(now)
            self._next_sweep = now + self._slow_timeout_s / SWEEPS_PER_TIMEOUT
        if expired:
            self._on_expired(expired)
        self._set_timer(loop)

    def _sweep(self, now: float) -> Expired:
        stalled: Expired = []
        for collector, seen in list(self._readers.items()):
            if collector.is_final:
                del self._readers[collector]
            elif not collector.has_output:
                self._readers[collector] = None
            elif seen is None or seen[0] != collector.num_taken:
                self._readers[collector] = collector.num_taken, now
            elif now - seen[1] >= self._slow_timeout_s:
                stalled.append((collector, self._slow_client_error()))
        return stalled

    def _slow_client_error(self) -> SlowClientError:
        return SlowClientError(
            f"slow_client: nobody took the request's output for {self._slow_timeout_s:g} s "
            "(--slow-client-timeout-s); it was aborted"
        )
