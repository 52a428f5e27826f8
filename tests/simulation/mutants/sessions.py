"""Planted bugs in streaming-input sessions, and in requests that have the id of one that has just ended."""

from __future__ import annotations

from typing import Any

from quire.engine.request import Request
from quire.engine.sched.scheduler import Scheduler
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.session import SessionInput, SessionState
from quire.wire.engine_core import EngineCoreRequest
from tests.simulation.mutants.registry import Patch, frontend_mutant, mutant, wrap


@frontend_mutant
def last_output_kept(patch: Patch) -> None:
    """A segment's last output, which was never computed, becomes part of the session."""

    def follow(original: Any, self: SessionInput, request: EngineCoreRequest, outputs: Any) -> Any:
        return original(self, request, [*outputs, 0])

    wrap(patch, SessionInput, "follow", follow)


@frontend_mutant
def queued_input_forgotten(patch: Patch) -> None:
    """Inputs that came before the last one was answered are not looked at when it is."""

    def go_on(original: Any, self: OutputProcessor, state: Any, session: SessionState, *args: Any) -> None:
        if len(session.queued) > 1:
            session.queued.popleft()
        original(self, state, session, *args)

    wrap(patch, OutputProcessor, "_go_on", go_on)


@frontend_mutant
def session_without_room_is_sent(patch: Patch) -> None:
    """A session that has outgrown the context goes on."""

    def go_on(original: Any, self: OutputProcessor, *args: Any) -> None:
        limit, self._max_model_len = self._max_model_len, 1 << 30
        original(self, *args)
        self._max_model_len = limit

    wrap(patch, OutputProcessor, "_go_on", go_on)


@frontend_mutant
def session_ends_with_each_answer(patch: Patch) -> None:
    """The end of an answer is taken for that of the session."""
    patch.setattr(SessionState, "goes_on_after", lambda self, finish_reason: bool(self.queued))


@mutant
def end_forgotten_when_the_id_is_used_again(patch: Patch) -> None:
    """An ended request stays known to the worker if its id is used again at once."""

    def add_request(original: Any, self: Scheduler, request: Request) -> None:
        original(self, request)
        self._steps.finished_req_ids.discard(request.request_id)

    wrap(patch, Scheduler, "add_request", add_request)


@mutant
def end_told_again_after_a_restart(patch: Patch) -> None:
    """A request that is resumed with all its tokens reports its end twice."""

    def add_request(original: Any, self: Scheduler, request: Request) -> None:
        original(self, request)
        if request.is_finished:
            self._outputs.add_end(request)

    wrap(patch, Scheduler, "add_request", add_request)
