"""A step while it is being filled, and the steps in flight."""

from __future__ import annotations

from collections import deque

from quire.engine.request import Request, RequestStatus
from quire.wire.execution import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput


class StepBuilder:
    """Collects what one step computes.

    `requests` are in the order of `num_scheduled_tokens`; `token_budget` is the rest of the step's budget. A request's
    `num_computed_tokens` advances as soon as it is added: it counts what is in flight.
    """

    def __init__(self, token_budget: int, timestamp: float) -> None:
        self.token_budget = token_budget
        self.timestamp = timestamp
        """Time of the step on the engine's clock."""
        self.requests: list[Request] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_reqs: list[NewRequestData] = []
        self.cached_reqs = CachedRequestData()
        self.spec_token_ids: dict[str, list[int]] = {}

    def add_running(self, request: Request, num_tokens: int, new_block_ids: BlockIds | None) -> None:
        """Adds `num_tokens` of a request that the worker knows; drops drafts that do not fit."""
        cached = self.cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(new_block_ids)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        if request.unsent_token_ids:
            cached.new_token_ids[request.request_id] = request.unsent_token_ids
            request.unsent_token_ids = []
        self._add(request, num_tokens)
        if request.spec_token_ids:
            num_drafts = request.num_computed_tokens - request.num_tokens
            if num_drafts > 0:
                self.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []

    def add_new(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """Adds the first `num_tokens` of a request that the worker does not know, or has forgotten."""
        self.new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                sampling_params=request.sampling_params,
                pooling_params=request.pooling_params,
                output_token_ids=request.output_token_ids,
                lora_request=request.lora_request,
            )
        )
        request.unsent_token_ids = []
        self._add(request, num_tokens)

    def _add(self, request: Request, num_tokens: int) -> None:
        self.requests.append(request)
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.token_budget -= num_tokens
        request.num_computed_tokens += num_tokens

    def take_back(self, request: Request) -> None:
        """Removes a request that is to be preempted, if it was added as a running one: the worker must not see it."""
        num_tokens = self.num_scheduled_tokens.pop(request.request_id, 0)
        if num_tokens == 0:
            return
        self.requests.remove(request)
        self.token_budget += num_tokens
        request.num_computed_tokens -= num_tokens
        cached = self.cached_reqs
        row = cached.req_ids.index(request.request_id)
        del cached.req_ids[row], cached.new_block_ids[row], cached.num_computed_tokens[row]
        cached.new_token_ids.pop(request.request_id, None)
        self.spec_token_ids.pop(request.request_id, None)


class StepsInFlight:
    """Steps whose results are not known, oldest first, and ids to send to the worker with the next one."""

    def __init__(self) -> None:
        self.finished_req_ids: set[str] = set()
        self.preempted_req_ids: set[str] = set()
        self._steps: deque[tuple[SchedulerOutput, list[Request]]] = deque()

    def send(self, step: StepBuilder) -> SchedulerOutput:
        """Completes a step and adds it to those in flight."""
        output = SchedulerOutput(
            scheduled_new_reqs=step.new_reqs,
            scheduled_cached_reqs=step.cached_reqs,
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(step.num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens=step.spec_token_ids,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            has_structured_output_requests=any(r.structured_output is not None for r in step.requests),
        )
        self.finished_req_ids, self.preempted_req_ids = set(), set()
        self._steps.append((output, step.requests))
        return output

    def receive(self, output: SchedulerOutput) -> list[Request]:
        """Returns the requests of the oldest step, whose result is `output`'s, in the order of its
        num_scheduled_tokens.

        Raises RuntimeError if `output` is another step's.
        """
        if not self._steps or self._steps[0][0] is not output:
            raise RuntimeError("a step's result came out of order, twice, or for a step that was given up")
        return self._steps.popleft()[1]

    def abandon(self) -> None:
        """Gives up all steps in flight. Ids that they carried are sent again."""
        for output, _ in self._steps:
            self.finished_req_ids |= output.finished_req_ids
            self.preempted_req_ids |= output.preempted_req_ids
        self._steps.clear()

    def get_preempted(self) -> set[Request]:
        """Returns the requests that were preempted after they were scheduled."""
        return {
            request for _, requests in self._steps for request in requests if request.status is RequestStatus.PREEMPTED
        }
