"""Requests that are not running, and which of them may be admitted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, count

from quire.engine.request import Request, RequestStatus
from quire.engine.sched.interface import PauseState, StructuredOutputManager
from quire.engine.sched.policy import RequestQueue, SchedulingPolicy


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
