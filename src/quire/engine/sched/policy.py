"""Scheduling policies: who is served first, and who gives way when KV blocks run out.

A policy is a row of `POLICIES`. It says two things:

* the order of the waiting queue (a `RequestQueue`), from whose head requests are admitted;
* the place of an admitted request among the running ones (`insert_running`). Running requests are served from the head
  of that list, and the one at its *tail* is preempted first.

Because the order of service and the order of preemption are one list, a request that was already given tokens in a
step is never the victim of the same step: no scheduled token has to be taken back. docs/recipes has a page on adding a
policy.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from quire.engine.request import Request


class RequestQueue(ABC):
    """Waiting requests in the order of a policy. Knows nothing of capacity."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request takes its place."""

    @abstractmethod
    def prepend(self, request: Request) -> None:
        """A request that was ahead already (preempted, or passed over) comes back, before its equals."""

    @abstractmethod
    def peek(self) -> Request:
        """The head. IndexError if empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Take the head. IndexError if empty."""

    @abstractmethod
    def remove(self, requests: Collection[Request]) -> None:
        """Take out all of `requests`, in one pass; those that are not here are ignored."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In the order they would be popped."""

    @abstractmethod
    def __len__(self) -> int: ...


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def prepend(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, requests: Collection[Request]) -> None:
        gone = set(requests)
        self._queue = deque(request for request in self._queue if request not in gone)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)


PriorityKey = tuple[int, float, str]


def priority_key(request: Request) -> PriorityKey:
    """Smaller is served first: priority, then arrival, then id (checklist S3-DEF-022). Never equal for two requests."""
    return (request.priority, request.arrival_time, request.request_id)


class PriorityRequestQueue(RequestQueue):
    """By `priority_key`, as a binary heap."""

    def __init__(self) -> None:
        self._heap: list[tuple[PriorityKey, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (priority_key(request), request))

    def prepend(self, request: Request) -> None:
        """The key alone decides: a preempted request has no claim over a more urgent one."""
        self.add(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: Collection[Request]) -> None:
        gone = set(requests)
        self._heap = [entry for entry in self._heap if entry[1] not in gone]
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(frozen=True)
class SchedulingPolicy:
    """One row of `POLICIES`; see the module's docstring."""

    make_queue: Callable[[], RequestQueue]
    insert_running: Callable[[list[Request], Request], None]


def _insert_by_priority(running: list[Request], request: Request) -> None:
    insort(running, request, key=priority_key)


POLICIES: dict[str, SchedulingPolicy] = {
    "fcfs": SchedulingPolicy(FCFSRequestQueue, list.append),
    "priority": SchedulingPolicy(PriorityRequestQueue, _insert_by_priority),
}
"""By the value of `--scheduling-policy`, whose choices (config/scheduler.py) must name the same rows."""
