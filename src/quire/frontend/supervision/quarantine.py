"""The death of an engine core, and poison control: the request that killed it is isolated (promise P2).

* The requests in the last step of a core that crashed or hung are *suspects*.
* Each suspect runs alone on the restarted core until its first output clears it. All other requests wait: a verdict is
  sound only in isolation.
* A suspect whose trial ends in a second death is *guilty*. So a poison costs two restarts, however many requests were
  around it. One that kills the core only some steps later costs a few more: each further trial is twice as long.
* A core killed from outside makes a suspect only of a request that was in the last step of
  `MAX_DEATHS_WITHOUT_TOKEN` such cores in a row without a token in between: the system may be killing the core for the
  memory which that request takes.
* A core that dies while it drafts makes no suspects: the supervisor gives up drafts instead.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from quire.frontend.supervision.journal import Journal, JournalEntry
from quire.wire.heartbeat import WorkerEnd

DeathCause = Literal["crash", "hang", "killed", "draft", "start", "lost"]
"""crash: ended by an error or a fault of its own. hang: made no progress and was killed for it. killed: another process
sent it a signal (an operator, the system out of memory). draft: one of these while it drafted, which is no request's
fault. start: never got ready. lost: the connection to a core that another process supervises is gone; nothing more is
known."""

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals no core sends itself: a fault of its own is SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL …"""
_ASKED_TO_END = frozenset({0, -signal.SIGTERM, -signal.SIGINT})
"""Exit statuses of a core that was asked to end: in good order, or before it could handle signals."""
SAME_SIGNAL_GRACE_S = 0.5
"""A signal to a whole group of processes (systemd, kill of a group) is for this process, too, but the core's end may be
seen first."""


class CoreDeath(NamedTuple):
    """The end of one incarnation of a core."""

    cause: DeathCause
    description: str
    """For a log line and an error message: "was killed by SIGSEGV in phase EXECUTE"."""
    request_ids: tuple[str, ...] | None = ()
    """Ids at the core of the request being taken in and of those of the step; None where they are unknown."""
    was_asked: bool = False
    """True if a signal that this process did not send asked it to end."""
    is_planned: bool = False
    """True if this process asked it to end, to be followed by another."""
    worker_end: WorkerEnd = WorkerEnd.NONE
    """End of the worker for which it has ended."""

    def calls_for_successor(self, age_s: float, *, is_draining: bool, has_live_requests: bool) -> bool:
        """Returns True if another core must be started now, `age_s` after the death. A server that ends needs one only
        for the requests that still have time."""
        if self.was_asked and age_s < SAME_SIGNAL_GRACE_S:
            return False
        return has_live_requests or not is_draining


def cause_of_exit(returncode: int) -> DeathCause:
    """Returns the cause that follows from the exit status of a core that had been ready."""
    if returncode < 0:
        return "killed" if -returncode in _FROM_OUTSIDE else "crash"
    return "crash" if returncode else "killed"


def was_asked_to_end(returncode: int) -> bool:
    """Returns True for an exit status of a core that was asked to end."""
    return returncode in _ASKED_TO_END


def describe_exit(returncode: int) -> str:
    """Returns the exit status in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


MAX_DEATHS_WITHOUT_TOKEN = 3
MAX_TRIAL_TOKENS = 256
MAX_NEWCOMERS = 16
"""Maximum number of suspects among requests that no core has answered yet: such a request may have killed it on its way
in."""


class Quarantine:
    """The suspects, in the order of their trials. Knows requests by internal id; sends nothing.

    `is_shared`: the core has other clients, too, and their requests may be the reason of a death.
    """

    def __init__(self, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._suspects: dict[str, None] = {}
        self._on_trial: str | None = None
        self._num_tokens_left = 0
        """Number of tokens until the request on trial is cleared."""

    @property
    def is_empty(self) -> bool:
        """True if there are no suspects."""
        return not self._suspects

    @property
    def on_trial(self) -> str | None:
        """The request that is alone with the core now."""
        return self._on_trial

    @property
    def suspects(self) -> list[str]:
        """The suspects, in the order of their trials."""
        return list(self._suspects)

    def begin_trial(self, journal: Journal) -> JournalEntry | None:
        """Returns the next suspect, to be sent alone; None if there is none."""
        request_id = next(iter(self._suspects), None)
        if request_id is None:
            return None
        entry = journal.get(request_id)
        assert entry is not None  # one that ends is no suspect any more
        self._on_trial = request_id
        self._num_tokens_left = min(1 << entry.num_acquittals, MAX_TRIAL_TOKENS)
        return entry

    def note_tokens(self, entry: JournalEntry, num_tokens: int) -> bool:
        """Counts tokens of a request on trial. Returns False if its trial is not over yet. Each further trial takes
        twice as long, until it reaches the step in which the request kills the core."""
        if self._on_trial != entry.request_id:
            return True
        self._num_tokens_left -= num_tokens
        if self._num_tokens_left > 0:
            return False
        entry.num_acquittals += 1
        return True

    def clear(self, request_id: str) -> bool:
        """Drops the suspicion of a request that gave an output or ended. Returns True if it was the one on trial."""
        self._suspects.pop(request_id, None)
        if self._on_trial != request_id:
            return False
        self._on_trial = None
        return True

    def judge(self, death: CoreDeath, journal: Journal) -> JournalEntry | None:
        """Takes in the death of a core. Returns the request found guilty by it, if there is one; no request is on trial
        then."""
        members = _members(death, journal)
        repeaters = _count_deaths(members) if death.cause in ("killed", "lost") else []
        tried, self._on_trial = self._on_trial, None
        if tried is not None:
            entry = journal.get(tried)
            if entry is not None and self._convicts(death, entry, members, repeaters):
                self.clear(tried)
                return entry
        if death.cause in ("crash", "hang"):
            self.accuse(_candidates(members, journal) if tried is None else ())
        else:
            self.accuse(repeaters)
        return None

    def _convicts(
        self,
        death: CoreDeath,
        tried: JournalEntry,
        members: Sequence[JournalEntry],
        repeaters: Sequence[JournalEntry],
    ) -> bool:
        """Returns True if a death during the trial of `tried` proves its guilt.

        It does not if a request of another client was, or may have been, the reason. A kill proves it only for a
        request that was accused by kills.
        """
        if death.request_ids is not None:
            is_alone = all(wire_id == tried.wire_id for wire_id in death.request_ids)
            if not is_alone or (self._is_shared and not death.request_ids):
                return False
        if death.cause in ("crash", "hang"):
            return True
        return death.cause != "start" and tried in members and tried in repeaters

    def accuse(self, entries: Iterable[JournalEntry]) -> None:
        """Adds suspects, to be tried after those there are."""
        for entry in entries:
            self._suspects[entry.request_id] = None


def _members(death: CoreDeath, journal: Journal) -> list[JournalEntry]:
    """Returns the requests of this client in the fatal step; where that is unknown, all it had with the core."""
    if death.request_ids is None:
        return list(journal.on_core.values())
    return [entry for wire_id in death.request_ids if (entry := journal.on_core.get(wire_id)) is not None]


def _candidates(members: Sequence[JournalEntry], journal: Journal) -> list[JournalEntry]:
    """Returns the suspects of a crash among the step's members and the newcomers: untested requests only, or all of
    them if that found none before."""
    if any(entry.num_acquittals for entry in members):
        everyone = list(journal.on_core.values())
    else:
        everyone = [*members, *_newcomers(journal)]
    return sorted(everyone, key=lambda entry: entry.num_acquittals)


def _newcomers(journal: Journal) -> list[JournalEntry]:
    """Returns the latest requests the core was given and no core has ever answered."""
    unanswered = (entry for entry in reversed(journal.on_core.values()) if not entry.has_output)
    return list(islice(unanswered, MAX_NEWCOMERS))


def _count_deaths(members: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Counts a death against each. Returns those with too many."""
    for entry in members:
        entry.num_deaths += 1
    return [entry for entry in members if entry.num_deaths >= MAX_DEATHS_WITHOUT_TOKEN]
