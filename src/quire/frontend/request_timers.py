"""The clock over live requests: deadlines, and readers that do not read. One timer of the loop serves all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.errors import QuireError, SlowClientError
from quire.frontend.deadlines import Deadlines, deadline_error
from quire.frontend.output_collector import RequestOutputCollector

SWEEPS_PER_TIMEOUT = 10
"""How often stalled readers are looked for: a reader is cut at most two tenths of its time late."""

Expired = list[tuple[RequestOutputCollector, QuireError]]


class RequestTimers:
    """Tells `on_expired` which requests have to end, and why. Requests that end by themselves need no word.

    A reader is stalled when output lay ready and it took none for `slow_client_timeout_s` (0: readers may take their
    time). Belongs to the loop that is running at the first `watch`.
    """

    def __init__(self, slow_client_timeout_s: float, on_expired: Callable[[Expired], None]) -> None:
        self._slow_timeout_s = slow_client_timeout_s
        self._on_expired = on_expired
        self._deadlines: Deadlines[tuple[RequestOutputCollector, float]] = Deadlines(lambda item: item[0].is_final)
        """Requests and the time they were given."""
        self._readers: dict[RequestOutputCollector, tuple[int, float] | None] = {}
        """Live requests; of those whose output lies: what their reader had taken when that was first seen, and when."""
        self._next_sweep = 0.0
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0
        """When; uvloop's timers do not say, and one that is due is none."""

    def watch(self, collector: RequestOutputCollector, start: float = 0.0, timeout_s: float | None = None) -> None:
        """A request has been added. It has `timeout_s` (None: all the time it needs) from `start`, on the loop's clock,
        to its end."""
        loop = asyncio.get_running_loop()
        if timeout_s is not None:
            self._deadlines.add((collector, timeout_s), start + timeout_s)
        if self._slow_timeout_s:
            if not self._readers:
                self._next_sweep = loop.time() + self._slow_timeout_s / SWEEPS_PER_TIMEOUT
            self._readers[collector] = None
        self._set_timer(loop)

    def stop(self) -> None:
        """Nothing is watched any more."""
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
