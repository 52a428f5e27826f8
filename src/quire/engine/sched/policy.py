"""Scheduling policies and the waiting queues they order.

A policy is a row of `POLICIES`. It decides two things:

* the order of the waiting queue (`key`), from whose head requests are admitted;
* which running request is preempted (`choose_victim`).

Running requests are served in the order they were admitted, whatever the policy: each needs one token per step to go
on, and a policy that withheld it would only keep the request's blocks in use for longer. docs/recipes has a page on
adding a policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count

from quire.engine.request import Request, RequestStatus
from quire.engine.sched.interface import PauseState, StructuredOutputManager

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


class WaitingRequests:
    """Two queues of one policy: `ready` waits for capacity only, `blocked` for something else.

    Blocked are requests whose grammar is not compiled, new ones during a pause, and preempted ones whose last step is
    still in flight: its token is to come, and if it were computed again meanwhile it would come twice.
    """

    def __init__(self, policy: SchedulingPolicy, structured_output_manager: StructuredOutputManager | None) -> None:
        self.ready = RequestQueue(policy.key)
        self.blocked = RequestQueue(policy.key)
        self._structured_output_manager = structured_output_manager
        self._pause_state = PauseState.UNPAUSED
        self._in_flight: Collection[Request] = ()
        self._arrivals = count()

    def add(self, request: Request) -> None:
        """A new request takes its place."""
        request.arrival_index = next(self._arrivals)
        self.ready.add(request)

    def add_preempted(self, request: Request) -> None:
        """A request that was admitted comes back to its place."""
        self.ready.add(request)

    def remove(self, requests: Collection[Request]) -> None:
        """Take out those of `requests` that are here."""
        self.ready.remove(requests)
        self.blocked.remove(requests)

    def unblock(self, in_flight: Collection[Request], pause_state: PauseState) -> None:
        """Start a round of admissions: what is no longer blocked goes back to its place.

        `in_flight` are requests that the result of a step is still to come for.
        """
        self._in_flight, self._pause_state = in_flight, pause_state
        free = [request for request in self.blocked if self._may_start(request)]
        if free:
            self.blocked.remove(free)
            for request in free:
                self.ready.add(request)

    def peek(self) -> Request | None:
        """The next request to admit, None if there is none. Blocked ones ahead of it are set aside."""
        while self.ready:
            request = self.ready.peek()
            if self._may_start(request):
                return request
            self.blocked.add(self.ready.pop())
        return None

    def pop(self) -> None:
        """Take out the request `peek` returned."""
        self.ready.pop()

    def _may_start(self, request: Request) -> bool:
        if request.status is RequestStatus.PREEMPTED:
            return request not in self._in_flight
        if self._pause_state is not PauseState.UNPAUSED:
            return False
        return self._structured_output_manager is None or self._structured_output_manager.is_ready(request)

    def any_preempted(self) -> bool:
        """Whether a request that has run before waits here."""
        return any(request.status is RequestStatus.PREEMPTED for request in self)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.ready, self.blocked)

    def __len__(self) -> int:
        return len(self.ready) + len(self.blocked)
