"""Deadlines: which of many things is due next. No clock is read here, and no timer set."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from quire.errors import DeadlineExceededError
from quire.field_bounds import FieldBound

T = TypeVar("T")
TIMEOUT_S = FieldBound("timeout_s", "float", 0, 1e9, exclusive_minimum=True, optional=True)
MIN_COMPACTION = 64


class Deadlines(Generic[T]):
    """Items and when each is due. An item that `is_over` needs no taking out: it is forgotten in time.

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
        """`item` is due at `due`, on the caller's clock."""
        heapq.heappush(self._heap, (due, next(self._count), item))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if not self._is_over(entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = max(MIN_COMPACTION, 2 * len(self._heap))

    @property
    def next_due(self) -> float | None:
        """When to look again; None: never."""
        while self._heap and self._is_over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[T]:
        """The items that are due and not over, earliest first. They are taken out."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            item = heapq.heappop(self._heap)[2]
            if not self._is_over(item):
                due.append(item)
        return due


def deadline_error(timeout_s: float) -> DeadlineExceededError:
    """What the reader of a request is told whose time is up."""
    return DeadlineExceededError(
        f"deadline_exceeded: the request was not finished within {timeout_s:g} s; it was ended there "
        "(timeout_s, --request-timeout-s)"
    )
