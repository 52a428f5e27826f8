"""Planted bugs in the verification of drafts, in the engine and in the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request
from quire.engine.sched import outputs
from quire.engine.sched.drafts import DraftFitter
from quire.engine.sched.outputs import OutputCollector
from quire.engine.sched.scheduler import Scheduler
from quire.engine.sched.step import StepBuilder
from quire.testing.fake_executor import FakeExecutor
from tests.simulation.mutants.registry import Patch, mutant, wrap


def _change_roll_back(patch: Patch, change: Callable[[int], int]) -> None:
    """Takes back `change(n)` computed tokens where n are right."""

    def add_result(original: Any, self: OutputCollector, requests: list[Request], step: Any, result: Any) -> Any:
        num_new = dict(zip(result.req_ids, map(len, result.sampled_token_ids), strict=True))
        for request in requests:
            drafts = step.scheduled_spec_decode_tokens.get(request.request_id)
            if drafts and not request.is_finished and request.num_computed_tokens:
                right = len(drafts) + 1 - num_new[request.request_id]
                request.num_computed_tokens += right - change(right)
        return original(self, requests, step, result)

    wrap(patch, OutputCollector, "add_result", add_result)


@mutant
def drafts_are_not_rolled_back(patch: Patch) -> None:
    """Rejected drafts count as computed."""
    _change_roll_back(patch, lambda right: 0)


@mutant
def drafts_are_rolled_back_one_too_far(patch: Patch) -> None:
    """The last accepted draft is computed again."""
    _change_roll_back(patch, lambda right: right + 1)


@mutant
def drafts_are_hashed(patch: Patch) -> None:
    """Blocks that drafts fill can be hit before the drafts are verified."""

    def allocate_slots(original: Any, self: KVCacheManager, request: Request, *args: Any, **kwargs: Any) -> Any:
        drafts, num_hashes = request.spec_token_ids, len(request.block_hashes)
        if not drafts or request._block_hasher is None:
            return original(self, request, *args, **kwargs)
        request.append_output_token_ids(drafts)
        try:
            return original(self, request, *args, **kwargs)
        finally:
            del request.all_token_ids[-len(drafts) :], request.block_hashes[num_hashes:]
            request.num_tokens -= len(drafts)

    wrap(patch, KVCacheManager, "allocate_slots", allocate_slots)


@mutant
def bonus_from_the_wrong_row(patch: Patch) -> None:
    """The token after an accepted run is drawn from the row before."""

    def verify(original: Any, self: FakeExecutor, digests: list[int], *args: Any) -> list[int]:
        token_ids: list[int] = original(self, digests, *args)
        if len(token_ids) > 1:
            token_ids[-1] = self.model.next_token(digests[len(token_ids) - 2])
        return token_ids

    wrap(patch, FakeExecutor, "_verify", verify)


@mutant
def token_after_a_mismatch_kept(patch: Patch) -> None:
    """The token drawn behind a rejected draft is kept, too."""

    def verify(original: Any, self: FakeExecutor, digests: list[int], *args: Any) -> list[int]:
        token_ids: list[int] = original(self, digests, *args)
        more = digests[len(token_ids) : len(token_ids) + 1]
        return token_ids + [self.model.next_token(digest) for digest in more]

    wrap(patch, FakeExecutor, "_verify", verify)


@mutant
def drafts_survive_preemption(patch: Patch) -> None:
    """A preempted request keeps its drafts."""

    def take_back(original: Any, self: DraftFitter, request: Request, reason: Any) -> None:
        kept = request.spec_token_ids
        original(self, request, reason)
        if reason == "preempted":
            request.spec_token_ids = kept

    wrap(patch, DraftFitter, "take_back", take_back)


@mutant
def lookahead_counted_as_computed(patch: Patch) -> None:
    """Slots that only a drafter has written count as computed."""

    def add_drafts(original: Any, self: StepBuilder, row: int, *args: Any) -> None:
        original(self, row, *args)
        self.requests[row].num_computed_tokens += 1

    wrap(patch, StepBuilder, "add_drafts", add_drafts)


@mutant
def run_not_cut_at_a_stop(patch: Patch) -> None:
    """Tokens behind the one that ends a request are sent."""

    def append_until_stop(original: Any, request: Request, new_token_ids: list[int], *args: Any) -> list[int]:
        original(request, new_token_ids, *args)
        return new_token_ids

    wrap(patch, outputs, "_append_until_stop", append_until_stop)


@mutant
def drafts_preempt(patch: Patch) -> None:
    """Where blocks are short, a request with drafts preempts another one."""

    def schedule_drafts(original: Any, self: Scheduler, step: StepBuilder, drafts: DraftFitter) -> None:
        wanting = [request for request in step.requests if request.spec_token_ids]
        known = [request for request in self.running if request.request_id in step.cached_reqs.req_ids]
        if wanting and known and self.kv_cache_manager.block_pool.get_num_free_blocks() < 2:
            victim = known[-1]
            if victim is not wanting[0]:
                self.running.remove(victim)
                step.take_back(victim)
                self._preempt(victim, step.timestamp)
        preempted, self._steps.preempted_req_ids = self._steps.preempted_req_ids, set()
        original(self, step, drafts)
        self._steps.preempted_req_ids = preempted

    wrap(patch, Scheduler, "_schedule_drafts", schedule_drafts)


@mutant
def last_steps_blocks_unregistered(patch: Patch) -> None:
    """Blocks that accepted drafts have filled in a request's last step cannot be hit."""

    def free(original: Any, self: KVCacheManager, request: Request) -> None:
        enabled, self.enable_caching = self.enable_caching, False
        original(self, request)
        self.enable_caching = enabled

    wrap(patch, KVCacheManager, "free", free)


@mutant
def drafts_of_two_requests_swapped(patch: Patch) -> None:
    """The worker computes the drafts of another request, and compares with those of its own."""

    def swap(drafts: dict[str, list[int]]) -> None:
        ids = list(drafts)
        for one, other in zip(ids[::2], ids[1::2], strict=False):
            if len(drafts[one]) == len(drafts[other]):
                drafts[one], drafts[other] = drafts[other], drafts[one]

    def forward(original: Any, self: FakeExecutor, step: Any) -> Any:
        swap(step.scheduled_spec_decode_tokens)
        digests = original(self, step)
        swap(step.scheduled_spec_decode_tokens)
        return digests

    wrap(patch, FakeExecutor, "_forward", forward)
