"""Scheduling policies: who is admitted first, and who gives way when KV blocks run out.

A policy is a row of `POLICIES`. It says two things:

* the order of the waiting queue (`key`), from whose head requests are admitted;
* which running request is preempted (`choose_victim`).

Between that, running requests are served in the order they were admitted, whatever the policy: each needs one token
per step to go on, and a policy that starved them of it would only hold their blocks for longer. docs/recipes has a page
on adding a policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from quire.engine.request import Request

OrderKey = tuple[float | str, ...]
"""Smaller is served first; never equal for two requests."""


def arrival_key(request: Request) -> OrderKey:
    """First come, first served: also when a request comes back, preempted or no longer blocked."""
    return (request.arrival_index,)


def priority_key(request: Request) -> OrderKey:
    """Priority, then arrival, then id (checklist S3-DEF-022)."""
    return (request.priority, request.arrival_time, request.request_id)


class RequestQueue:
    """Waiting requests in the order of a key, as a binary heap. Knows nothing of capacity.

    Who comes back takes the place the key gives: a preempted request is before those that came later, and has no claim
    over a more urgent one.
    """

    def __init__(self, key: Callable[[Request], OrderKey]) -> None:
        self._key = key
        self._heap: list[tuple[OrderKey, Request]] = []

    def add(self, request: Request) -> None:
        """A request takes its place."""
        heapq.heappush(self._heap, (self._key(request), request))

    def peek(self) -> Request:
        """The head. IndexError if empty."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take the head. IndexError if empty."""
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: Collection[Request]) -> None:
        """Take out all of `requests`, in one pass; those that are not here are ignored."""
        gone = set(requests)
        self._heap = [entry for entry in self._heap if entry[1] not in gone]
        heapq.heapify(self._heap)

    def first(self, num_requests: int) -> list[Request]:
        """The first of them, in the order they would be popped, at a cost that does not grow with the queue."""
        heap, found = self._heap, list[Request]()
        candidates = [(heap[0][0], 0)] if heap else []
        while candidates and len(found) < num_requests:
            _, index = heapq.heappop(candidates)
            found.append(heap[index][1])
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(candidates, (heap[child][0], child))
        return found

    def __iter__(self) -> Iterator[Request]:
        """In the order they would be popped."""
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(frozen=True)
class SchedulingPolicy:
    """One row of `POLICIES`. `choose_victim` returns an index into the running requests, of which there is one."""

    key: Callable[[Request], OrderKey]
    choose_victim: Callable[[Sequence[Request]], int]


def last_admitted(running: Sequence[Request]) -> int:
    """The one that has waited least."""
    return len(running) - 1


def least_urgent(running: Sequence[Request]) -> int:
    """The one with the largest `priority_key`."""
    return max(range(len(running)), key=lambda index: priority_key(running[index]))


POLICIES: dict[str, SchedulingPolicy] = {
    "fcfs": SchedulingPolicy(arrival_key, last_admitted),
    "priority": SchedulingPolicy(priority_key, least_urgent),
}
"""By the value of `--scheduling-policy`, whose choices (config/engine.py) must name the same rows."""
