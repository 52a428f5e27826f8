"""The links of a server whose API processes share a core: one process finds the request that killed it (promise P2).

A process knows its own requests only, so it cannot try a suspect alone: the others' would be with the core, too. The
process that starts the core can, because a restarted core serves no other client until it has orders to admit them. So
every death goes this way::

    OwnerLink.on_death ──on_report──▶ MemberLink.report_death in each process: the suspects
                                                     │
    all are admitted ◀── trials, one after the other ◀── OwnerLink.try_suspects

A verdict is carried out by the process whose request it is (`MemberLink.convict`), before anybody is admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from quire.frontend.client.link import EngineLink, LinkState, Message, Verdict
from quire.frontend.supervision.journal import JournalEntry, Standing
from quire.frontend.supervision.quarantine import CoreDeath
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest, EngineCoreRequestType

TRIAL_SUFFIX = "~t"
"""Suffix of the id a suspect is tried under: outputs of its trial are not taken for those of the request sent again."""


class DeathReport(NamedTuple):
    """Report of a death to the other processes."""

    incarnation: int
    """Number of the core that died."""
    death: CoreDeath
    verdict: Verdict | None
    """Verdict on the request that was being tried."""


class Suspect(NamedTuple):
    """A request that is to be tried, and what its process holds against it (`JournalEntry`)."""

    request: EngineCoreRequest
    num_deaths: int
    num_acquittals: int


class OwnerLink(EngineLink):
    """Link of the process that starts a core for other clients and makes no requests itself: it tries their suspects.

    `are_others_busy` returns whether requests of theirs are in progress. `on_report`, if set, is called with every
    death, on the link's thread; each call must be followed by one of `try_suspects`. No client is admitted before.
    """

    def __init__(self, are_others_busy: Callable[[], bool]) -> None:
        super().__init__()
        self.on_report: Callable[[DeathReport], None] | None = None
        self.on_end: Callable[[str], None] | None = None
        """Called, on the link's thread, with the reason why there will be no core any more."""
        self._are_others_busy = are_others_busy
        self._num_open_reports = 0
        self._has_admitted = False

    @property
    def is_needed(self) -> bool:
        return super().is_needed or self._are_others_busy()

    def try_suspects(self, suspects: Iterable[Suspect]) -> None:
        """Answers the oldest report with the suspects of all processes. They are tried before any client is
        admitted."""
        self._num_open_reports -= 1
        if self.state is not LinkState.GONE:
            for suspect in sorted(suspects, key=lambda suspect: suspect.num_acquittals):
                self._accuse(suspect)
            self._send_held()
            self._admit_if_free()

    def _accuse(self, suspect: Suspect) -> None:
        if self._journal.get(suspect.request.request_id) is not None:
            return
        entry = self._journal.add(msgspec.structs.replace(suspect.request, client_index=0))
        entry.num_deaths, entry.num_acquittals = suspect.num_deaths, suspect.num_acquittals
        self._quarantine.accuse([entry])

    def on_ready(self, ready: EngineCoreReadyResponse) -> None:
        super().on_ready(ready)
        self._admit_if_free()

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        super().on_outputs(outputs)
        self._drop_outputs()
        self._admit_if_free()

    def on_gone(self, reason: str) -> None:
        super().on_gone(reason)
        self._drop_outputs()
        if self.on_end is not None:
            self.on_end(reason)

    def _judge(self, death: CoreDeath) -> Verdict | None:
        self._has_admitted = False
        verdict = super()._judge(death)
        self._drop_outputs()
        if self.on_report is not None and death.cause not in ("start", "lost"):
            assert self.ready_response is not None  # a core that dies has been ready
            self._num_open_reports += 1
            self.on_report(DeathReport(self.ready_response.incarnation, death, verdict))
        return verdict

    def _note_progress(self, entry: JournalEntry, num_tokens: int) -> None:
        """Aborts a suspect that is cleared: its own process will send it again."""
        if self._quarantine.note_tokens(entry, num_tokens):
            self.abort_requests([entry.request_id])

    def _admit_if_free(self) -> None:
        is_free = self._quarantine.is_empty and not self._num_open_reports
        if self.state is LinkState.UP and is_free and not self._has_admitted:
            self._has_admitted = True
            self._send_call(self._calls.begin_admission())

    def _drop_outputs(self) -> None:
        """Discards outputs produced during a trial; the next core computes them again."""
        self.deliveries = [outputs for outputs in self.deliveries if outputs.scheduler_stats is not None]
        for outputs in self.deliveries:
            outputs.outputs = []


class MemberLink(EngineLink):
    """Link of a client whose owner reports each death and tries its suspects. The end of a connection proves nothing
    about the fault."""

    def __init__(self, client_index: int) -> None:
        super().__init__(client_index)
        self._last_judged = -1

    def report_death(self, incarnation: int, death: CoreDeath) -> list[Suspect]:
        """Takes the death of the core of this number. Returns our suspects: none if we were not, or are no longer,
        connected to it."""
        ready = self.ready_response
        if self.state is LinkState.GONE or ready is None or ready.incarnation != incarnation:
            return []
        if self.state is not LinkState.DOWN:
            self.on_death(death)
        if self._last_judged == incarnation:
            return []
        self._last_judged = incarnation
        guilty = self._quarantine.judge(death, self._journal)
        assert guilty is None  # nothing is tried here
        entries = [self._journal.get(request_id) for request_id in self._quarantine.suspects]
        return [_make_suspect(entry) for entry in entries if entry is not None]

    def convict(self, verdict: Verdict) -> None:
        """Ends a request of this process that was found guilty, if it still lives."""
        entry = self._journal.get(verdict.request_id.removesuffix(TRIAL_SUFFIX))
        if entry is None:
            return
        if self.state is LinkState.UP and entry.standing is not Standing.HELD:
            self.messages.append(Message(EngineCoreRequestType.ABORT, [entry.wire_id]))
        self._fail([entry], verdict.message)

    def on_ready(self, ready: EngineCoreReadyResponse) -> None:
        """Handles the admission to the next core: every suspect has been tried."""
        if self.ready_response is not None and ready.incarnation > self.ready_response.incarnation:
            for request_id in self._quarantine.suspects:
                entry = self._journal.get(request_id)
                assert entry is not None  # one that ends is no suspect any more
                entry.num_acquittals += 1
                entry.num_deaths = 0
                self._quarantine.clear(request_id)
        super().on_ready(ready)

    def _judge(self, death: CoreDeath) -> Verdict | None:
        return None


def _make_suspect(entry: JournalEntry) -> Suspect:
    request = entry.make_request()
    name = entry.request_id
    external = request.external_req_id or name
    request = msgspec.structs.replace(request, request_id=name + TRIAL_SUFFIX, external_req_id=external)
    return Suspect(request, entry.num_deaths, entry.num_acquittals)
