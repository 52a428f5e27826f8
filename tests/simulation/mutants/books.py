"""Planted bugs in what a frontend counts: every answer is right, and the metrics are not."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.frontend.client import link
from quire.frontend.drafts import DraftCounts
from quire.frontend.metrics.collect.events import IterationStats, SessionStats
from quire.frontend.metrics.collect.ledger import Receipt, RequestLedger
from quire.frontend.metrics.frontend_stats import FrontendStats
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.request_state import RequestState
from quire.frontend.supervision.journal import JournalEntry
from tests.simulation.mutants.registry import Patch, frontend_mutant, wrap


@frontend_mutant
def ends_are_not_booked(patch: Patch) -> None:
    """The end of a request is not entered into the ledger."""
    patch.setattr(RequestLedger, "finish", lambda *args: None)


@frontend_mutant
def refusals_are_not_booked(patch: Patch) -> None:
    """A request is refused and stays in admission for ever."""
    patch.setattr(Receipt, "reject", lambda *args: None)


@frontend_mutant
def aborts_are_not_observed(patch: Patch) -> None:
    """Counts from outside of a step are lost."""
    patch.setattr(FrontendStats, "close_iteration", lambda *args: None)


@frontend_mutant
def last_token_not_delivered(patch: Patch) -> None:
    """The token that ends a request is generated, and not counted as delivered."""

    def take_text(original: Any, self: OutputProcessor, state: Any, output: Any, stop_terminated: bool) -> Any:
        stop_string = original(self, state, output, stop_terminated)
        self._ledger.num_delivered_tokens -= output.finish_reason is not None and bool(output.new_token_ids)
        return stop_string

    wrap(patch, OutputProcessor, "_take_text", take_text)


@frontend_mutant
def queued_again_after_a_restart(patch: Patch) -> None:
    """The events of a resumed request are taken for those of a new one: it was queued after it was scheduled."""
    patch.setattr(link, "_strip_first_output", lambda output: None)


@frontend_mutant
def segments_are_requests(patch: Patch) -> None:
    """Each segment of a session is observed as a finished request."""
    patch.setattr(IterationStats, "take_segment", lambda self, session: session.add(self.finished_requests[-1]))


@frontend_mutant
def earlier_segments_forgotten(patch: Patch) -> None:
    """The books of a session hold its last segment only."""
    patch.setattr(SessionStats, "add", lambda self, segment: setattr(self, "total", segment))


@frontend_mutant
def rejected_drafts_are_not_the_requests(patch: Patch) -> None:
    """Steps that accept no draft are left out of the request's counts."""

    def add(original: Any, self: DraftCounts, step: Any, num_tokens: int) -> None:
        if step.num_accepted_tokens:
            original(self, step, num_tokens)

    wrap(patch, DraftCounts, "add", add)


@frontend_mutant
def drafts_of_all_segments_in_each(patch: Patch) -> None:
    """The next segment of a session goes on with the counts of the last."""

    def next_segment(original: Any, self: RequestState, *args: Any) -> RequestState:
        state: RequestState = original(self, *args)
        state.drafts = self.drafts
        return state

    wrap(patch, RequestState, "next_segment", next_segment)


@frontend_mutant
def runs_count_as_one_draft(patch: Patch) -> None:
    """However many drafts of a step are accepted, the request counts one."""
    patch.setattr(DraftCounts, "num_accepted_tokens", property(lambda self: sum(self.histogram[1:])))


@frontend_mutant
def journal_loses_the_last_token(patch: Patch) -> None:
    """A resumed request goes on one token too early."""

    def make_request(original: Any, self: JournalEntry) -> Any:
        request = original(self)
        return msgspec.structs.replace(request, output_token_ids=request.output_token_ids[:-1])

    wrap(patch, JournalEntry, "make_request", make_request)
