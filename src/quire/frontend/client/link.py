"""The protocol between a frontend and its engine core, over any number of deaths of that core, without a socket.

`EngineLink` is a state machine: calls and messages go in; what to send, what to deliver to the caller and which control
calls are answered come out. The thread that drives it owns the sockets (`link_thread.py`).

::

    DOWN ──on_ready──▶ RESTORING ──control state restored──▶ UP
     ▲                                                        │
     └───────────────────────on_death─────────────────────────┘        any ──on_gone──▶ GONE

Invariants, whatever happens: what was handed on of a request is at every moment a prefix of its one correct output, and
its last output, with a finish reason, is handed on exactly once, unless the caller aborted it.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from quire.errors import EngineDeadError
from quire.frontend.client.control_calls import Answer, ControlCalls
from quire.frontend.supervision.journal import Journal, JournalEntry, Standing, num_tokens_of
from quire.frontend.supervision.quarantine import CoreDeath, Quarantine
from quire.logger import init_logger
from quire.wire.elastic import EEP_NOTIFICATION_CALL_ID, EEPNotificationType
from quire.wire.engine_core import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)

logger = init_logger(__name__)


class LinkState(Enum):
    """States of the link, as drawn above."""

    DOWN = "down"
    """No core is connected; one is expected."""
    RESTORING = "restoring"
    """A core is connected and being brought into the state of the one before it."""
    UP = "up"
    GONE = "gone"
    """No core will be connected any more."""


class Message(NamedTuple):
    """A message to the core. Messages are sent in order."""

    type: EngineCoreRequestType
    payload: Any


class Verdict(NamedTuple):
    """A request that kills the core, and the message its user gets."""

    request_id: str
    message: str


class EngineLink:
    """The link of one client. Single-threaded. Take `messages`, `deliveries` and `answers` after each call.

    `counts` says what happened: "stale", "corrupt", "repeated", "lost" messages and "unknown" outputs, which were
    dropped; "deaths", "resumed_requests", "recomputed_tokens", "poisoned_requests".
    """

    def __init__(self, client_index: int = 0, *, is_shared: bool = False, is_owner: bool = False) -> None:
        """`is_shared`: the core has other clients, too. `is_owner`: this client starts it."""
        self.state = LinkState.DOWN
        self.ready_response: EngineCoreReadyResponse | None = None
        self.messages: list[Message] = []
        self.deliveries: list[EngineCoreOutputs] = []
        self.answers: list[Answer] = []
        self.counts: Counter[str] = Counter()
        self.gone_reason = ""
        self.is_closing = False
        """The caller ends the engine: a core that gives up its requests does what it was asked to do."""
        self._journal = Journal()
        self._quarantine = Quarantine(is_shared)
        self._calls = ControlCalls(client_index)
        self._admits_others = is_shared and is_owner
        self._incarnation = -1
        """Number of the core whose outputs count; -1: none."""
        self._last_sequence = 0
        self._early = (-1, 0)
        """Incarnation and number of the last message that came before the ready frame of its core."""

    @property
    def num_live_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._journal)

    @property
    def is_needed(self) -> bool:
        """True if a core that dies must be followed by another although the server ends."""
        return self.num_live_requests > 0

    # -- the caller -----------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request, now or when a core is there.

        Raises ValueError for an id in use.
        """
        entry = self._journal.add(request)
        if self.state is LinkState.GONE:
            self._fail([entry], self.gone_reason)
        elif self.state is LinkState.UP and self._quarantine.is_empty:
            self._send(entry, first_time=True)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Forgets requests: none of their outputs is delivered any more. Unknown ids are ignored."""
        entries = [entry for i in request_ids if (entry := self._journal.get(i)) is not None]
        on_core = [entry.wire_id for entry in entries if entry.standing is not Standing.HELD]
        if on_core and self.state is LinkState.UP:
            self.messages.append(Message(EngineCoreRequestType.ABORT, on_core))
        for entry in entries:
            self._forget(entry)
        self._send_held()

    # -- requests that move between the links of one client (`EngineSet`) ------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if a request would be worked on now: a core is connected, and no suspect is being tried."""
        return self.state is LinkState.UP and self._quarantine.is_empty

    def has_request(self, request_id: str) -> bool:
        """Returns True for a live request of this link."""
        return self._journal.get(request_id) is not None

    def get_entries(self) -> tuple[list[JournalEntry], list[JournalEntry]]:
        """Returns the suspects, and all other live requests in the order in which they came."""
        suspects = dict.fromkeys(self._quarantine.suspects)
        others = [entry for entry in self._journal if entry.request_id not in suspects]
        return [entry for request_id in suspects if (entry := self._journal.get(request_id))], others

    def release(self, entries: list[JournalEntry]) -> None:
        """Gives requests up for another link to adopt. The core aborts them, and no output of it counts any more."""
        on_core = [entry.wire_id for entry in entries if entry.standing is not Standing.HELD]
        if on_core and self.state is LinkState.UP:
            self.messages.append(Message(EngineCoreRequestType.ABORT, on_core))
        for entry in entries:
            self._forget(entry)
            entry.note_released()
        self._send_held()

    def adopt(self, entries: list[JournalEntry], *, are_suspects: bool = False) -> None:
        """Takes over requests that another link has released. They go on at their next token."""
        for entry in entries:
            self._journal.insert(entry)
        if self.state is LinkState.GONE:
            self._fail(entries, self.gone_reason)
        elif are_suspects:
            self._quarantine.accuse(entries)
            self._send_held()
        elif self.is_open:
            for entry in entries:
                self._send(entry)

    def inherit_calls(self, other: EngineLink) -> None:
        """Takes over the state that control calls have led to, from the link of another core of this client."""
        self._calls.inherit(other._calls)

    # -- control ----------------------------------------------------------------------------------------------------

    def call_utility(self, method: str, args: tuple[Any, ...]) -> int:
        """Calls a control verb. Returns the id its answer will have."""
        call_id = self._calls.begin(method, args)
        if self.state is LinkState.UP:
            self._send_call(call_id)
        elif self.state is LinkState.GONE:
            self.answers += self._calls.end_all(self.gone_reason)
        return call_id

    # -- the core -------------------------------------------------------------------------------------------------

    def on_ready(self, ready: EngineCoreReadyResponse) -> None:
        """Handles a connection: of the first core, a restarted one, or one that had lost this client and found it
        again."""
        former = self.ready_response
        if self.state is LinkState.GONE or (former is not None and ready.incarnation < former.incarnation):
            self.counts["stale"] += 1
            return
        if self.state is not LinkState.DOWN:
            self.on_death(CoreDeath("lost", "was lost and is back", None))
        early_incarnation, early_sequence = self._early
        has_early = early_incarnation == ready.incarnation  # statistics: nothing was asked of the core before
        self._last_sequence = max(ready.next_sequence - 1, early_sequence if has_early else 0)
        self._incarnation = ready.incarnation
        self.ready_response = ready
        self._journal.note_new_core()
        self.state = LinkState.RESTORING
        for call_id in self._calls.begin_restoring():
            self._send_call(call_id)
        self._go_up_if_restored()

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Takes in a message of the core. Drops what does not belong to the connected core or to a live request."""
        if outputs.incarnation != self._incarnation or self.state is LinkState.GONE:
            self.counts["stale"] += 1
            self._early = outputs.incarnation, outputs.sequence
            return
        if outputs.sequence and not self._is_next(outputs.sequence):
            return
        on_core = self._journal.on_core
        num_dropped = 0
        for output in outputs.outputs:
            entry = on_core.get(output.request_id)
            if entry is None or entry.standing or output.finish_reason is not None or output.adapter is not None:
                if not self._take_unusual(entry, output):
                    output.request_id = ""
                    num_dropped += 1
                continue
            try:
                entry.output_token_ids.fromlist(output.new_token_ids)
            except OverflowError:
                self._refuse(entry, output)
        if num_dropped:
            self.counts["unknown"] += num_dropped
            outputs.outputs = [output for output in outputs.outputs if output.request_id]
        if outputs.outputs or outputs.scheduler_stats is not None:
            self.deliveries.append(outputs)
        if outputs.utility_output is not None:
            self._on_answer(outputs.utility_output)

    def on_corrupt_message(self) -> None:
        """Handles a message that could not be decoded: the number of the next message shows whether it came from this
        core."""
        self.counts["corrupt"] += 1
        self.probe()

    def probe(self) -> None:
        """Asks the core for the number of its last message."""
        if self.state is LinkState.UP and (call_id := self._calls.begin_probe()) is not None:
            self._send_call(call_id)

    def on_death(self, death: CoreDeath) -> None:
        """Handles the death of the core; another one may come. Outputs it had sent before may still arrive, and
        count."""
        if self.state is LinkState.GONE:
            return
        if death.cause != "start" and not death.is_planned:
            self.counts["deaths"] += 1
        if death.worker_end:
            self.counts[f"worker_deaths.{death.worker_end.name.lower()}"] += 1
        self._judge(death)
        self.state = LinkState.DOWN
        self.answers += self._calls.end_unrepeatable(death)

    def cut(self, death: CoreDeath) -> None:
        """Handles the loss of a machine: its core may live on, but none of its outputs counts until it has connected
        again. Calls without an answer are given up."""
        self._incarnation = -1
        if self.state is not LinkState.DOWN:
            self.on_death(death)
        self.answers += self._calls.end_all(f"the engine core {death.description}")

    def _judge(self, death: CoreDeath) -> Verdict | None:
        """Finds the suspects of a death. Returns the verdict that has been carried out, if there is one."""
        guilty = self._quarantine.judge(death, self._journal)
        if guilty is None:
            return None
        self.counts["poisoned_requests"] += 1
        logger.error("request %s is failed alone: the engine core %s", guilty.request_id, death.description)
        verdict = Verdict(guilty.request_id, _explain(guilty, death))
        self._fail([guilty], verdict.message)
        return verdict

    def on_gone(self, reason: str) -> None:
        """Ends everything live with an error that gives the reason: no core will come any more."""
        if self.state is LinkState.GONE:
            return
        self.state, self.gone_reason = LinkState.GONE, reason
        self._fail(list(self._journal), reason)
        self.answers += self._calls.end_all(reason)

    # -- requests -------------------------------------------------------------------------------------------------

    def _send(self, entry: JournalEntry, *, first_time: bool = False) -> None:
        self._journal.note_sent(entry, first_time=first_time)
        request = entry.make_request()
        self.messages.append(Message(EngineCoreRequestType.ADD, request))
        if entry.has_output:
            self.counts["resumed_requests"] += 1
            self.counts["recomputed_tokens"] += num_tokens_of(request)

    def _withdraw(self, entries: list[JournalEntry]) -> None:
        """Aborts these requests in the core for now; they may be sent again under another id."""
        wire_ids = [self._journal.note_withdrawn(entry) for entry in entries]
        if wire_ids:
            self.messages.append(Message(EngineCoreRequestType.ABORT, wire_ids))

    def _send_held(self) -> None:
        """Sends what may be with the core now: every request, or the one suspect that is tried next."""
        if self.state is not LinkState.UP or self._quarantine.on_trial is not None:
            return
        tried = self._quarantine.begin_trial(self._journal)
        if tried is None:
            entries = [entry for entry in self._journal if entry.standing is Standing.HELD]
        else:
            self._withdraw(list(self._journal.on_core.values()))
            entries = [tried]
        for entry in entries:
            self._send(entry)

    def _take_unusual(self, entry: JournalEntry | None, output: EngineCoreOutput) -> bool:
        """Takes in an output that ends its request, or one of a watched request. Returns False if it must not be
        delivered."""
        if entry is None or (_is_farewell(output) and not self.is_closing):
            return False
        output.request_id = entry.request_id
        if entry.standing is Standing.WATCHED and entry.has_output:
            _strip_first_output(output)
        try:
            entry.take_in(output)
        except OverflowError:
            self._refuse(entry, output)
        if output.finish_reason is not None:
            self._forget(entry)
            self._send_held()
        elif output.new_token_ids:
            self._note_progress(entry, len(output.new_token_ids))
        return True

    def _note_progress(self, entry: JournalEntry, num_tokens: int) -> None:
        entry.num_deaths = 0
        if not self._quarantine.note_tokens(entry, num_tokens):
            return
        if entry.wire_id == entry.request_id:
            entry.standing = Standing.SENT
        if self._quarantine.clear(entry.request_id):
            self._send_held()

    def _refuse(self, entry: JournalEntry, output: EngineCoreOutput) -> None:
        """Fails a request for which the core sent a number that is no token id."""
        output.new_token_ids, output.new_logprobs = [], None
        output.finish_reason = FinishReason.ERROR
        output.error_message = f"the engine sent a token id of more than 32 bits for request {_name(entry)}"
        self._withdraw([entry])
        self._forget(entry)

    def _forget(self, entry: JournalEntry) -> None:
        if self._journal.get(entry.request_id) is entry:
            self._journal.remove(entry)
            self._quarantine.clear(entry.request_id)

    def _fail(self, entries: list[JournalEntry], message: str) -> None:
        outputs = []
        for entry in entries:
            self._forget(entry)
            outputs.append(
                EngineCoreOutput(entry.request_id, [], finish_reason=FinishReason.ERROR, error_message=message)
            )
        if outputs:
            self.deliveries.append(EngineCoreOutputs(outputs=outputs))

    # -- messages -------------------------------------------------------------------------------------------------

    def _is_next(self, sequence: int) -> bool:
        """Returns True for a new message. If there is a gap before it, every request is sent again: tokens are
        missing."""
        num_lost = sequence - self._last_sequence - 1
        if num_lost < 0:
            self.counts["repeated"] += 1
            return False
        self._last_sequence = sequence
        if num_lost:
            self.counts["lost"] += num_lost
            logger.error("%d messages of the engine core were lost: its requests are sent again", num_lost)
            self._resend_everything()
        return True

    def _resend_everything(self) -> None:
        if self.state is LinkState.DOWN:
            self._journal.note_new_core()  # these are the last messages of a dead one, and count no more
            return
        entries = list(self._journal.on_core.values())
        self._withdraw(entries)
        for entry in entries:
            self._send(entry)
        for call_id in self._calls.ids():
            self._send_call(call_id)

    # -- control calls --------------------------------------------------------------------------------------------

    def _send_call(self, call_id: int) -> None:
        self.messages.append(Message(EngineCoreRequestType.UTILITY, self._calls.make_payload(call_id)))

    def _on_answer(self, output: UtilityOutput) -> None:
        if output.call_id == EEP_NOTIFICATION_CALL_ID:
            self._note_elastic(output)
            return
        if output.error_type == EngineDeadError.__name__ and not self.is_closing:
            return  # it is shutting down by itself and answers nothing any more; its death decides about the call
        try:
            answer = self._calls.take_answer(output)
        except KeyError:
            self.counts["unknown"] += 1
        except EngineDeadError as e:
            self.on_gone(str(e))
        else:
            self.answers += [] if answer is None else [answer]
            self._go_up_if_restored()

    def _note_elastic(self, output: UtilityOutput) -> None:
        try:
            name, rank = msgspec.convert(output.result, tuple[EEPNotificationType, int])
        except msgspec.ValidationError:
            self.counts["unknown"] += 1
        else:
            self.counts[f"elastic.{name.value}"] += 1
            logger.info("engine %d reports %s", rank, name.value)

    def _go_up_if_restored(self) -> None:
        if self.state is LinkState.RESTORING and self._calls.is_restored:
            self.state = LinkState.UP
            if self._admits_others:
                self._calls.begin_admission()
            before = self.counts["recomputed_tokens"]
            self._send_held()
            if (num_tokens := self.counts["recomputed_tokens"] - before) > 0:
                logger.info("%d requests go on, %d tokens are computed again", len(self._journal.on_core), num_tokens)
            for call_id in self._calls.ids():
                self._send_call(call_id)


def _is_farewell(output: EngineCoreOutput) -> bool:
    """Returns True if a core gives up a request because it is shutting down. Unless we asked it to, the next core
    resumes it."""
    return output.finish_reason is FinishReason.ABORT and output.error_message is not None


def _strip_first_output(output: EngineCoreOutput) -> None:
    """Removes what a core sends with a request's first output if its user has had it already."""
    output.prefill_stats = output.new_prompt_logprobs_tensors = None
    output.adapter = None
    if output.events:
        output.events = [event for event in output.events if event.type is EngineCoreEventType.PREEMPTED] or None


def _name(entry: JournalEntry) -> str:
    return entry.request.external_req_id or entry.request_id


def _explain(guilty: JournalEntry, death: CoreDeath) -> str:
    return (
        f"request {_name(guilty)} was in the last step of an engine core that failed, and when it was computed alone "
        f"the engine core {death.description}: it is ended so that other requests go on; do not send it again unchanged"
    )
