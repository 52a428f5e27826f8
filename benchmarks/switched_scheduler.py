"""A scheduler whose statistics can be switched off and on while it runs, for `metrics_cost`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler
from quire.wire.stats import SchedulerStats

STATISTICS = "statistics"
"""Key of `SamplingParams.extra_args`: True, False or one of Order, from this request on."""
BLOCK = 3
"""Number of steps in a block. The first of a block is not compared; in longer blocks, neighbours are less alike.

Every 16th step is special, because all requests of a length need a block of the cache in it: with 2 or 4, which divide
16, it would always fall on the same side.
"""


class Order(StrEnum):
    """The order of blocks with and without statistics. What happens to a request is noted in either.

    The time of a step depends on its place in the run, so there is the opposite of each order: over two runs every step
    has had statistics once, and has not once.
    """

    ON_FIRST = "on first"
    OFF_FIRST = "off first"

    def are_on(self, num_steps: int) -> bool:
        """Returns True if the step with this number since the last idle moment has statistics."""
        return (num_steps // BLOCK % 2 == 0) == (self is Order.ON_FIRST)


class SwitchedScheduler(Scheduler):
    """A scheduler that can be switched, because two engines of one kind always differ by a percent or two.

    Without statistics it still counts one look-up in the prefix cache per request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns: Order | None = None
        self._num_steps = 0

    def add_request(self, request: Request) -> None:
        if not self.requests:
            self._num_steps = 0
        params = request.sampling_params
        if params is not None and params.extra_args is not None:
            wanted = params.extra_args[STATISTICS]
            self._turns = Order(wanted) if isinstance(wanted, str) else None
            self.log_stats = bool(wanted)
        super().add_request(request)

    def make_stats(self) -> SchedulerStats | None:
        is_off = self._turns is not None and not self._turns.are_on(self._num_steps)
        self._num_steps += 1
        # The last step always reports that nothing runs any more.
        return None if is_off and self.running else super().make_stats()
