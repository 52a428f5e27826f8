"""Planted bugs in streaming-input sessions."""

from __future__ import annotations

from typing import Any

from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.resting import RestingSessions
from quire.engine.sched.scheduler import Scheduler
from quire.wire.engine_core import EngineCoreRequest
from tests.simulation.mutants.kv_cache import trust_hashes
from tests.simulation.mutants.registry import Patch, mutant, wrap


@mutant
def last_output_kept(patch: Patch) -> None:
    """A segment's last output, which was never computed, becomes part of the session."""

    def continued(original: Any, self: EngineCoreRequest, outputs: Any, segment: EngineCoreRequest) -> Any:
        return original(self, [*outputs, 0], segment)

    wrap(patch, EngineCoreRequest, "continued", continued)


@mutant
def last_output_counts_as_computed(patch: Patch) -> None:
    """A session that rests believes that the slot of its last output was filled."""

    def end_segment(original: Any, self: Request) -> bool:
        rests: bool = original(self)
        self.num_computed_tokens += rests and self.num_computed_tokens > 0
        return rests

    wrap(patch, Request, "end_segment", end_segment)


@mutant
def hash_of_the_last_output_kept(patch: Patch) -> None:
    """A block that the last output filled keeps its hash, though the next input writes another token there (and hits
    are not compared)."""
    trust_hashes(patch)

    def begin_segment(original: Any, self: Request, segment: EngineCoreRequest, block_size: int) -> None:
        original(self, segment, 1)  # one token per block: nothing is cut off

    wrap(patch, Request, "begin_segment", begin_segment)


@mutant
def evicted_session_believes_in_its_blocks(patch: Patch) -> None:
    """A session whose blocks were taken goes on as if they were there."""

    def free_blocks(original: Any, self: Scheduler, request: Request) -> None:
        num_computed = request.num_computed_tokens
        original(self, request)
        request.num_computed_tokens = num_computed

    wrap(patch, Scheduler, "_free_blocks", free_blocks)


@mutant
def sessions_are_never_evicted(patch: Patch) -> None:
    """Sessions at rest keep their blocks whoever needs them."""
    patch.setattr(RestingSessions, "choose_victim", lambda *args, **kwargs: None)


@mutant
def session_leaks_at_its_end(patch: Patch) -> None:
    """A session that ends while it rests takes its blocks with it."""

    def free(original: Any, self: KVCacheManager, request: Request) -> None:
        if request.session is None or request.num_computed_tokens != request.num_tokens - 1:
            original(self, request)

    wrap(patch, KVCacheManager, "free", free)


@mutant
def queued_input_forgotten(patch: Patch) -> None:
    """Inputs that came before the last one was answered are not looked at when it is."""

    def release(original: Any, self: Scheduler, ended: list[Request]) -> None:
        queued = {request: request.session.queued for request in ended if request.session is not None}
        for request in queued:
            request.session.queued = type(queued[request])()
        original(self, ended)
        for request, inputs in queued.items():
            request.session.queued = inputs

    wrap(patch, Scheduler, "_release", release)


@mutant
def late_input_opens_a_session(patch: Patch) -> None:
    """An input for a session that has ended starts a new one, which nobody will ever close."""

    def add_request(original: Any, self: Scheduler, request: Request) -> None:
        if request.origin.continues_session and request.request_id not in self.requests:
            request.origin.continues_session = False
        if request.origin.continues_session or request.num_tokens:
            original(self, request)

    wrap(patch, Scheduler, "add_request", add_request)


@mutant
def worker_remembers_the_last_segment(patch: Patch) -> None:
    """The worker is not told to forget a session at the end of a segment."""

    def release(original: Any, self: Scheduler, ended: list[Request]) -> None:
        rests = [r for r in ended if r.status is RequestStatus.WAITING_FOR_STREAMING_REQ]
        original(self, ended)
        self._steps.finished_req_ids.difference_update(r.request_id for r in rests)

    wrap(patch, Scheduler, "_release", release)


@mutant
def end_told_again_after_a_restart(patch: Patch) -> None:
    """A session that comes back at rest tells its client once more that the segment has ended."""

    def resume(original: Any, self: Scheduler, request: Request, stop: Any) -> None:
        original(self, request, stop)
        if not request.is_finished:
            self._outputs.add_end(request)

    wrap(patch, Scheduler, "_resume_ended", resume)
