"""How an engine core ended, and whom that says something about."""

from __future__ import annotations

import signal
from typing import Literal, NamedTuple

DeathCause = Literal["crash", "hang", "killed", "start", "lost"]
"""crash: it ended itself, by an error or a fault. hang: it made no progress and was killed for it. killed: somebody
else sent it a signal (an operator, the system out of memory). start: it never got ready. lost: the connection to a
core that another process looks after is gone; nothing more is known."""

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals no core sends itself: a fault of its own is SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL …"""
_ASKED_TO_END = frozenset({0, -signal.SIGTERM, -signal.SIGINT})
"""Exit statuses of a core that somebody asked to end: in good order, or before it could listen to signals."""
SAME_SIGNAL_GRACE_S = 0.5
"""Whoever asks a whole group of processes to end (systemd, kill of a group) asks us, too, but we may hear of the core's
end first."""


class CoreDeath(NamedTuple):
    """The end of one incarnation of a core."""

    cause: DeathCause
    description: str
    """For a log line and an error message: "was killed by SIGSEGV in phase EXECUTE"."""
    request_ids: tuple[str, ...] | None = ()
    """The request being taken in and those of the step, as the core called them; None where nobody can tell."""
    was_asked: bool = False
    """By a signal to end, and not by us."""

    def calls_for_successor(self, age_s: float, *, is_draining: bool, has_live_requests: bool) -> bool:
        """Whether another core is to be started now, `age_s` after the death. A server that ends needs one for the
        requests that still have time, and for nothing else."""
        if self.was_asked and age_s < SAME_SIGNAL_GRACE_S:
            return False
        return has_live_requests or not is_draining


def cause_of_exit(returncode: int) -> DeathCause:
    """What the exit status of a core that had been ready says. One that ended in good order was told to by somebody."""
    if returncode < 0:
        return "killed" if -returncode in _FROM_OUTSIDE else "crash"
    return "crash" if returncode else "killed"


def was_asked_to_end(returncode: int) -> bool:
    """Whether an exit status says so."""
    return returncode in _ASKED_TO_END


def describe_exit(returncode: int) -> str:
    """The exit status in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
