"""Sessions that are not running: who waits for input, and whose blocks go first when memory is short."""

from __future__ import annotations

from quire.engine.request import Request, RequestStatus
from quire.engine.sched.policy import SchedulingPolicy


class RestingSessions:
    """Sessions between the end of a segment and the admission of the next. Owns no block: the scheduler frees them.

    Both dicts are ordered sets, longest at rest first.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.waiting_for_input: dict[Request, None] = {}
        self._holding: dict[Request, None] = {}
        """Those with blocks. Their next input may have come: then they are in the waiting queue, too."""
        self._key = policy.key

    def add(self, request: Request) -> None:
        """A session's segment has ended."""
        self.waiting_for_input[request] = None
        if request.num_computed_tokens:
            self._holding[request] = None

    def has_input(self, request: Request) -> None:
        """It waits for capacity now, and no longer for its user."""
        del self.waiting_for_input[request]

    def has_no_blocks(self, request: Request) -> None:
        """What it held has been freed."""
        self._holding.pop(request, None)

    def remove(self, request: Request) -> None:
        """It runs, or has ended. Nothing happens if it does not rest."""
        self.waiting_for_input.pop(request, None)
        self._holding.pop(request, None)

    def choose_victim(self, spared: Request | None = None) -> Request | None:
        """Whose blocks to take, None if nobody but `spared` holds any: who has waited for input longest, then who would
        be admitted last."""
        if not self._holding:
            return None
        for request in self._holding:
            if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                return request
        return max((request for request in self._holding if request is not spared), key=self._key, default=None)
