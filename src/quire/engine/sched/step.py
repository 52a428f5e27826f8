"""One step: the limits it keeps to, the plan of an admission, its contents; and the steps in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from quire.config.engine import SchedulerConfig
from quire.engine.kv_cache.block import KVCacheBlocks
from quire.engine.request import Request, RequestStatus
from quire.errors import ConfigError, PromptTooLongError
from quire.wire.execution import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput


class Admission(NamedTuple):
    """Plan for a waiting request that starts in a step."""

    cached_blocks: KVCacheBlocks
    """Found in the prefix cache."""
    num_hits: int
    """Tokens in `cached_blocks`."""
    num_cached: int
    """Tokens that are not computed again: those that the request holds, and the hits."""
    num_new: int
    """Tokens computed in the step."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of one engine, from its `SchedulerConfig`."""

    max_num_scheduled_tokens: int
    """Token budget of a step."""
    max_num_seqs: int
    max_model_len: int
    """Context length, fitted to the cache."""
    long_prefill_token_threshold: int
    """Most tokens of one request in a step; 0: unlimited."""
    enable_chunked_prefill: bool
    reserve_full_isl: bool
    watermark_blocks: int
    """Blocks that an admission must leave free."""

    @classmethod
    def from_config(cls, config: SchedulerConfig, max_model_len: int, num_blocks: int) -> SchedulerLimits:
        """Raises ConfigError where a budget is still None, or too small for a prompt that may not be split."""
        budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        if budget is None or config.max_num_seqs is None:
            raise ConfigError(
                f"the scheduler has no budget (max_num_batched_tokens={config.max_num_batched_tokens}, "
                f"max_num_seqs={config.max_num_seqs}); EngineArgs.create_engine_config fills in the defaults"
            )
        if not config.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"a step of {budget} tokens cannot take a prompt of up to {max_model_len}, and chunked prefill is off; "
                "raise --max-num-batched-tokens (and --max-num-scheduled-tokens, where set), lower --max-model-len or "
                "drop --no-enable-chunked-prefill"
            )
        return cls(
            max_num_scheduled_tokens=budget,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=config.enable_chunked_prefill,
            reserve_full_isl=config.scheduler_reserve_full_isl,
            watermark_blocks=int(config.watermark * num_blocks),
        )

    def validate_length(self, request: Request) -> None:
        """Raises PromptTooLongError if the context has no room for the request and, if it generates, one more token."""
        room = self.max_model_len - (request.sampling_params is not None)
        if request.num_tokens > room:
            raise PromptTooLongError(
                f"request {request.request_id} has {request.num_tokens} tokens; the engine's context of "
                f"{self.max_model_len} takes at most {room}; shorten the prompt or raise "
                "--max-model-len",
                param="prompt",
                value=request.num_tokens,
            )

    def cap_chunk(self, num_tokens: int, token_budget: int) -> int:
        """Returns how many of the `num_tokens` that a request lacks it may compute in a step with `token_budget`
        left."""
        if self.enable_chunked_prefill and 0 < self.long_prefill_token_threshold < num_tokens:
            num_tokens = self.long_prefill_token_threshold
        return min(num_tokens, token_budget)


class StepBuilder:
    """Collects what one step computes.

    `requests` are in the order of `num_scheduled_tokens`; `token_budget` is the rest of the step's budget. A request's
    `num_computed_tokens` advances as soon as it is added: it counts what is in flight.
    """

    def __init__(
        self, token_budget: int, timestamp: float, *, max_num_reqs: int | None = None, sends_tokens: bool = False
    ) -> None:
        """`max_num_reqs`: most requests; None: no limit. `sends_tokens`: to workers that do not sample."""
        self.token_budget = token_budget
        self._max_num_reqs, self._sends_tokens = max_num_reqs, sends_tokens
        self.timestamp = timestamp
        """Time of the step on the engine's clock."""
        self.requests: list[Request] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_reqs: list[NewRequestData] = []
        self.cached_reqs = CachedRequestData()
        self.spec_token_ids: dict[str, list[int]] = {}

    @property
    def has_room(self) -> bool:
        """True if another request may be added."""
        return self.token_budget > 0 and (self._max_num_reqs is None or len(self.requests) < self._max_num_reqs)

    def add_running(self, request: Request, num_tokens: int, new_block_ids: BlockIds | None) -> None:
        """Adds `num_tokens` of a request that the worker knows."""
        cached = self.cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(new_block_ids)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        if request.unsent_token_ids or self._sends_tokens:
            first = max(request.num_computed_tokens, request.num_prompt_tokens)
            if token_ids := request.all_token_ids[first:]:
                cached.new_token_ids[request.request_id] = token_ids
            request.unsent_token_ids = []
        self._add(request, num_tokens)

    def add_new(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """Adds the first `num_tokens` of a request that the worker does not know, or has forgotten."""
        self.new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                sampling_params=request.sampling_params,
                pooling_params=request.origin.pooling_params,
                output_token_ids=request.output_token_ids,
                lora_request=request.lora_request,
                prompt_embeds=request.origin.prompt_embeds,
                prompt_is_token_ids=request.origin.prompt_is_token_ids,
                lora_revision=request.lora_revision,
                lora_start=request.lora_start,
            )
        )
        request.unsent_token_ids = []
        self._add(request, num_tokens)

    def _add(self, request: Request, num_tokens: int) -> None:
        self.requests.append(request)
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.token_budget -= num_tokens
        request.num_computed_tokens += num_tokens

    def add_drafts(self, row: int, num_drafts: int, new_block_ids: BlockIds | None) -> None:
        """Adds the first `num_drafts` drafts of request `row`, and more blocks. Comes after all requests were added."""
        request, cached = self.requests[row], self.cached_reqs
        if new_block_ids is not None:
            num_cached = cached.num_reqs
            held = cached.new_block_ids[row] if row < num_cached else self.new_reqs[row - num_cached].block_ids
            if held is None:
                cached.new_block_ids[row] = new_block_ids
            else:
                for table, more in zip(held, new_block_ids, strict=True):
                    table += more
        if num_drafts:
            self.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
            self.num_scheduled_tokens[request.request_id] += num_drafts
            self.token_budget -= num_drafts
            request.num_computed_tokens += num_drafts
        request.spec_token_ids = []

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


class StepsInFlight:
    """Steps whose results are not known, oldest first, and ids to send to the worker with the next one."""

    def __init__(self, max_num_steps: int = 1, *, sends_tokens: bool = False) -> None:
        """`max_num_steps`: most steps at once, among which requests are divided. `sends_tokens`: to workers that do not
        sample."""
        self._max_num_steps, self._sends_tokens = max_num_steps, sends_tokens
        self.finished_req_ids: set[str] = set()
        self.preempted_req_ids: set[str] = set()
        self._steps: deque[tuple[SchedulerOutput, list[Request]]] = deque()

    def begin(self, token_budget: int, timestamp: float, num_reqs: int) -> StepBuilder:
        """Returns the next step, which is still empty. `num_reqs`: requests that could be in it."""
        share = None if self._max_num_steps == 1 else max(1, -(-num_reqs // self._max_num_steps))
        return StepBuilder(token_budget, timestamp, max_num_reqs=share, sends_tokens=self._sends_tokens)

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

    def abandon(self) -> int:
        """Gives up all steps in flight. Ids that they carried are sent again. Returns the number of their drafts."""
        num_drafts = 0
        for output, _ in self._steps:
            self.finished_req_ids |= output.finished_req_ids
            self.preempted_req_ids |= output.preempted_req_ids
            num_drafts += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        self._steps.clear()
        return num_drafts

    def get_preempted(self) -> set[Request]:
        """Returns the requests that were preempted after they were scheduled."""
        return {
            request for _, requests in self._steps for request in requests if request.status is RequestStatus.PREEMPTED
        }
