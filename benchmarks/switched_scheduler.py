"""A scheduler whose statistics can be switched off and on between requests, for `metrics_cost`."""

from __future__ import annotations

from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler

STATISTICS = "statistics"
"""Key of `SamplingParams.extra_args`: whether there are any from this request on."""


class SwitchedScheduler(Scheduler):
    """Two engines of one kind differ by a percent or two for as long as they live; one that is switched does not. What
    it goes on counting without statistics is one look-up in the prefix cache per request."""

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if params is not None and params.extra_args is not None:
            self.log_stats = params.extra_args[STATISTICS]
        super().add_request(request)
