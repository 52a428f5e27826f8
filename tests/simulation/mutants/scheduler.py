"""Planted bugs in scheduling, stopping, aborting and counting."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request
from quire.engine.sched import outputs
from quire.engine.sched.policy import WaitingRequests
from quire.engine.sched.scheduler import Scheduler
from quire.engine.sched.step import SchedulerLimits, StepBuilder
from quire.wire.execution import BlockIds
from quire.wire.stats import PrefillStats
from tests.simulation.mutants.registry import Patch, mutant, wrap


@mutant
def preempt_without_reset(patch: Patch) -> None:
    """A preempted request believes its tokens are still computed."""

    def preempt(original: Any, self: Scheduler, request: Request, *args: Any) -> None:
        num_computed = request.num_computed_tokens
        original(self, request, *args)
        request.num_computed_tokens = num_computed

    wrap(patch, Scheduler, "_preempt", preempt)


@mutant
def preemption_kept_from_the_worker(patch: Patch) -> None:
    """A preempted request stays known to the worker."""

    def preempt(original: Any, self: Scheduler, request: Request, *args: Any) -> None:
        original(self, request, *args)
        self._steps.preempted_req_ids.discard(request.request_id)

    wrap(patch, Scheduler, "_preempt", preempt)


@mutant
def victim_keeps_its_tokens(patch: Patch) -> None:
    """A request preempted in the very step that scheduled it is still in that step."""
    patch.setattr(StepBuilder, "take_back", lambda self, request: None)


@mutant
def stale_table_after_preemption(patch: Patch) -> None:
    """A request that resumes is sent to the worker with the blocks it had before."""
    tables: dict[Request, BlockIds] = {}

    def add_new(original: Any, self: StepBuilder, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        original(self, request, num_tokens, tables.setdefault(request, block_ids))

    wrap(patch, StepBuilder, "add_new", add_new)


@mutant
def budget_off_by_one(patch: Patch) -> None:
    """A step may hold one token more than its budget."""

    def init(original: Any, self: StepBuilder, token_budget: int, *args: Any, **options: Any) -> None:
        original(self, token_budget + 1, *args, **options)

    wrap(patch, StepBuilder, "__init__", init)


@mutant
def threshold_ignored(patch: Patch) -> None:
    """A long prefill takes all of the budget."""
    wrap(patch, SchedulerLimits, "cap_chunk", lambda original, self, num_tokens, budget: min(num_tokens, budget))


@mutant
def one_request_too_many(patch: Patch) -> None:
    """max_num_seqs + 1 requests run."""

    def from_config(original: Any, *args: Any) -> SchedulerLimits:
        limits = original(*args)
        return dataclasses.replace(limits, max_num_seqs=limits.max_num_seqs + 1)

    wrap(patch, SchedulerLimits, "from_config", from_config)


@mutant
def preempted_to_the_tail(patch: Patch) -> None:
    """A preempted request goes to the end of the queue."""
    patch.setattr(WaitingRequests, "add_preempted", WaitingRequests.add)


@mutant
def token_in_flight_computed_again(patch: Patch) -> None:
    """A request preempted while its step is in flight is admitted before that step's token has come."""
    wrap(patch, WaitingRequests, "unblock", lambda original, self, in_flight, *args: original(self, (), *args))


@mutant
def stop_check_skipped(patch: Patch) -> None:
    """Only the end-of-sequence token and lengths end a request; stop_token_ids do not."""
    original = outputs.check_stop

    def check_stop(request: Request, max_model_len: int) -> Any:
        stop = original(request, max_model_len)
        return None if stop is not None and stop.reason is not None else stop

    patch.setattr(outputs, "check_stop", check_stop)


@mutant
def min_tokens_ignored(patch: Patch) -> None:
    """A stop token ends a request before min_tokens."""
    original = outputs.check_stop

    def check_stop(request: Request, max_model_len: int) -> Any:
        min_tokens, request.sampling_params.min_tokens = request.sampling_params.min_tokens, 0
        try:
            return original(request, max_model_len)
        finally:
            request.sampling_params.min_tokens = min_tokens

    patch.setattr(outputs, "check_stop", check_stop)


@mutant
def outputs_before_restart_forgotten(patch: Patch) -> None:
    """A request that comes back after a restart starts over."""

    def init(original: Any, self: Request, origin: Any, *args: Any) -> None:
        origin.output_token_ids = []
        original(self, origin, *args)

    wrap(patch, Request, "__init__", init)


@mutant
def abort_in_flight_lost(patch: Patch) -> None:
    """An abort that arrives during a step is not taken in before its outputs are sent."""
    patch.setattr(EngineCore, "_process_aborts_queue", lambda self: None)


@mutant
def failed_steps_stay_cached(patch: Patch) -> None:
    """After a failed step the prefix cache still offers blocks which that step was to fill."""

    def abandon_steps(original: Any, self: Scheduler) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(BlockPool, "reset_prefix_cache", lambda self: True)
            original(self)

    wrap(patch, Scheduler, "abandon_steps", abandon_steps)


@mutant
def cached_tokens_not_reported(patch: Patch) -> None:
    """The output reports that all of the prompt was computed."""

    def make_prefill_stats(request: Request) -> PrefillStats:
        return PrefillStats(request.num_prompt_tokens, request.num_prompt_tokens)

    patch.setattr(outputs, "make_prefill_stats", make_prefill_stats)


@mutant
def prompt_not_reserved(patch: Patch) -> None:
    """A request is admitted when its first chunk fits, although blocks for its whole prompt were to be free."""

    def from_config(original: Any, *args: Any) -> SchedulerLimits:
        return dataclasses.replace(original(*args), reserve_full_isl=False)

    wrap(patch, SchedulerLimits, "from_config", from_config)


@mutant
def watermark_ignored(patch: Patch) -> None:
    """Requests are admitted until no block is free."""

    def allocate(original: Any, self: KVCacheManager, *args: Any, reserved_blocks: int = 0, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    wrap(patch, KVCacheManager, "allocate_slots", allocate)
