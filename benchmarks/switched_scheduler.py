"""A scheduler whose statistics can be switched off and on while it runs, for `metrics_cost`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler
from quire.wire.stats import SchedulerStats

STATISTICS = "statistics"
"""Key of `SamplingParams.extra_args`: whether there are any from this request on, or Turns."""
BLOCK = 3
"""Steps. The first of a block is not compared; the longer a block, the less alike are the neighbours that are. Every
16th step is another one, in which all requests of a length need a block of the cache: with 2 or 4, which divide 16, it
would always fall on the same side."""


class Turns(StrEnum):
    """After BLOCK steps with statistics come as many without, and so on. What happens to a request is noted in either.

    What a step takes depends on which one of a run it is. So there is the opposite of each: over two runs every step
    has had statistics once, and has not once.
    """

    ON_FIRST = "on first"
    OFF_FIRST = "off first"

    def are_on(self, num_steps: int) -> bool:
        """For the step before which there were so many since nothing ran."""
        return (num_steps // BLOCK % 2 == 0) == (self is Turns.ON_FIRST)


class SwitchedScheduler(Scheduler):
    """Two engines of one kind differ by a percent or two for as long as they live; one that is switched does not. What
    it goes on counting without statistics is one look-up in the prefix cache per request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns: Turns | None = None
        self._num_steps = 0

    def add_request(self, request: Request) -> None:
        if not self.requests:
            self._num_steps = 0
        params = request.sampling_params
        if params is not None and params.extra_args is not None:
            wanted = params.extra_args[STATISTICS]
            self._turns = Turns(wanted) if isinstance(wanted, str) else None
            self.log_stats = bool(wanted)
        super().add_request(request)

    def make_stats(self) -> SchedulerStats | None:
        is_off = self._turns is not None and not self._turns.are_on(self._num_steps)
        self._num_steps += 1
        # The last step of all says that nothing runs any more, as always.
        return None if is_off and self.running else super().make_stats()
