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
from quire.engine.sched.interface import AdmissionGate, PauseState
from quire.errors import QuireError

OrderKey = tuple[float | str, ...]
"""Smaller is served first; never equal for two requests."""


def arrival_key(request: Request) -> OrderKey:
    """Orders by arrival, also when a request comes back, preempted or no longer blocked."""
    return (request.arrival_index,)


def priority_key(request: Request) -> OrderKey:
    """Orders by priority, then arrival, then id."""
    return (request.priority, request.arrival_time, request.request_id)


class RequestQueue:
    """Waiting requests in the order of a key, as a binary heap. Knows nothing of capacity.

    A request that comes back takes the place that the key gives: a preempted request is before those that came later,
    and never before a more urgent one.
    """

    def __init__(self, key: Callable[[Request], OrderKey]) -> None:
        self._key = key
        self._heap: list[tuple[OrderKey, Request]] = []

    def add(self, request: Request) -> None:
        """Adds a request at its place."""
        heapq.heappush(self._heap, (self._key(request), request))

    def peek(self) -> Request:
        """Returns the head. Raises IndexError if empty."""
        return self._heap[0][1]

    def pop(self) -> Request:
        """Removes and returns the head. Raises IndexError if empty."""
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: Collection[Request]) -> None:
        """Removes all of `requests`, in one pass; ignores those that are not here."""
        gone = set(requests)
        self._heap = [entry for entry in self._heap if entry[1] not in gone]
        heapq.heapify(self._heap)

    def first(self, num_requests: int) -> list[Request]:
        """Returns the first requests, in the order they would be popped, at a cost that does not grow with the
        queue."""
        heap, found = self._heap, list[Request]()
        candidates = [(heap[0][0], 0)] if heap else []
        while candidates and len(found) < num_requests:
            _, index = heapq.heappop(candidates)
            found.append(heap[index][1])
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(candidates, (heap[child][0], child))
        return found

    def __iter__(self) -> Iterator[Request]:
        """Iterates in the order they would be popped."""
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(frozen=True)
class SchedulingPolicy:
    """One row of `POLICIES`. `choose_victim` returns an index into the running requests, of which there is one."""

    key: Callable[[Request], OrderKey]
    choose_victim: Callable[[Sequence[Request]], int]


def last_admitted(running: Sequence[Request]) -> int:
    """Returns the index of the last one: it has waited least."""
    return len(running) - 1


def least_urgent(running: Sequence[Request]) -> int:
    """Returns the index of the request with the largest `priority_key`."""
    return max(range(len(running)), key=lambda index: priority_key(running[index]))


POLICIES: dict[str, SchedulingPolicy] = {
    "fcfs": SchedulingPolicy(arrival_key, last_admitted),
    "priority": SchedulingPolicy(priority_key, least_urgent),
}
"""Policies by the value of `--scheduling-policy`, whose choices (config/engine.py) must be the same."""


class WaitingRequests:
    """Two queues of one policy: `ready` waits for capacity only, `blocked` for something else.

    Blocked are requests that a gate holds (their grammar is not compiled, their adapter not loaded), new ones during a
    pause, and preempted ones whose last step is still in flight: its token will come, and would come twice if it were
    computed again meanwhile.
    """

    def __init__(self, policy: SchedulingPolicy, gates: Sequence[AdmissionGate] = ()) -> None:
        self.ready = RequestQueue(policy.key)
        self.blocked = RequestQueue(policy.key)
        self.gates = gates
        self._pause_state = PauseState.UNPAUSED
        self._in_flight: Collection[Request] = ()
        self._arrivals = count()

    def add(self, request: Request) -> None:
        """Adds a new request."""
        request.arrival_index = next(self._arrivals)
        self.ready.add(request)

    def add_preempted(self, request: Request) -> None:
        """Adds a preempted request."""
        self.note_left(request)
        self.ready.add(request)

    def remove(self, requests: Collection[Request]) -> None:
        """Removes those of `requests` that are here."""
        self.ready.remove(requests)
        self.blocked.remove(requests)

    def unblock(self, in_flight: Collection[Request], pause_state: PauseState) -> None:
        """Starts a round of admissions: requests that are no longer blocked return to their place.

        `in_flight` are requests whose last step has no result yet.
        """
        self._in_flight, self._pause_state = in_flight, pause_state
        free = [request for request in self.blocked if self._may_start(request)]
        if free:
            self.blocked.remove(free)
            for request in free:
                self.ready.add(request)

    def peek(self) -> Request | None:
        """Returns the next request to admit, or None. Moves blocked ones before it to `blocked`."""
        while self.ready:
            request = self.ready.peek()
            if self._may_start(request):
                return request
            self.blocked.add(self.ready.pop())
        return None

    def pop(self) -> None:
        """Removes the request that `peek` returned, which starts."""
        request = self.ready.pop()
        for gate in self.gates:
            gate.note_admitted(request)

    def _may_start(self, request: Request) -> bool:
        if request.status is RequestStatus.PREEMPTED:
            if request in self._in_flight:
                return False
        elif self._pause_state is not PauseState.UNPAUSED:
            return False
        return all(gate.is_ready(request) for gate in self.gates)

    def is_blocked(self) -> bool:
        """Returns whether requests wait here, and gates hold all of them."""
        if self.ready or not self.blocked:
            return False
        return not any(all(gate.is_ready(request) for gate in self.gates) for request in self.blocked)

    def get_error(self, request: Request) -> QuireError | None:
        """Returns the error that a gate ends a ready request with."""
        return next(filter(None, (gate.get_error(request) for gate in self.gates)), None)

    def note_left(self, request: Request) -> None:
        """Notes that a request was preempted or has ended."""
        for gate in self.gates:
            gate.note_left(request)

    def any_preempted(self) -> bool:
        """Returns whether a request waits here that has run, be it for a load."""
        return any(request.status is not RequestStatus.WAITING and request.num_preemptions for request in self)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.ready, self.blocked)

    def __len__(self) -> int:
        return len(self.ready) + len(self.blocked)
