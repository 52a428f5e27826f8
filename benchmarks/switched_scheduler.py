"""A scheduler whose statistics can be switched off and on while it runs, for `metrics_cost`."""

from __future__ import annotations

from typing import Any

from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler
from quire.wire.stats import SchedulerStats

STATISTICS = "statistics"
"""Key of `SamplingParams.extra_args`: whether there are any from this request on, or IN_TURNS."""
IN_TURNS = "in turns"
"""After BLOCK steps with them come as many without, and so on. What happens to a request is noted in either."""
BLOCK = 4


class SwitchedScheduler(Scheduler):
    """Two engines of one kind differ by a percent or two for as long as they live; one that is switched does not. What
    it goes on counting without statistics is one look-up in the prefix cache per request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._takes_turns = False
        self._num_steps = 0

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if params is not None and params.extra_args is not None:
            wanted = params.extra_args[STATISTICS]
            self._takes_turns = wanted == IN_TURNS
            self.log_stats = bool(wanted)
        super().add_request(request)

    def make_stats(self) -> SchedulerStats | None:
        self._num_steps += 1
        is_off = self._takes_turns and self._num_steps // BLOCK % 2 == 0
        # The last step of all says that nothing runs any more, as always.
        return None if is_off and self.running else super().make_stats()
