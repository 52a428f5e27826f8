"""Scheduling policies: who is admitted first, and who gives way when KV blocks run out.

A policy is a row of `POLICIES`. It says two things:

* the order of the waiting queue (`make_queue`), from whose head requests are admitted;
* which running request is preempted (`choose_victim`).

Between that, running requests are served in the order they were admitted, whatever the policy: each needs one token
per step to go on, and a policy that starved them of it would only hold their blocks for longer. docs/recipes has a page
on adding a policy.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
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
    """One row of `POLICIES`. `choose_victim` returns an index into the running requests, of which there is one."""

    make_queue: Callable[[], RequestQueue]
    choose_victim: Callable[[Sequence[Request]], int]


def last_admitted(running: Sequence[Request]) -> int:
    """The one that has waited least."""
    return len(running) - 1


def least_urgent(running: Sequence[Request]) -> int:
    """The one with the largest `priority_key`."""
    return max(range(len(running)), key=lambda index: priority_key(running[index]))


POLICIES: dict[str, SchedulingPolicy] = {
    "fcfs": SchedulingPolicy(FCFSRequestQueue, last_admitted),
    "priority": SchedulingPolicy(PriorityRequestQueue, least_urgent),
}
"""By the value of `--scheduling-policy`, whose choices (config/scheduler.py) must name the same rows."""
