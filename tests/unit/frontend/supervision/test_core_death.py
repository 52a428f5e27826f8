"""What the end of a core says."""

from __future__ import annotations

import signal

import pytest

from quire.frontend.supervision.core_death import (
    SAME_SIGNAL_GRACE_S,
    CoreDeath,
    cause_of_exit,
    describe_exit,
    was_asked_to_end,
)


@pytest.mark.parametrize(
    ("returncode", "cause", "words"),
    [
        (1, "crash", "exited with code 1"),
        (0, "killed", "exited with code 0"),
        (-signal.SIGKILL, "killed", "was killed by SIGKILL"),
        (-signal.SIGTERM, "killed", "was killed by SIGTERM"),
        (-signal.SIGSEGV, "crash", "was killed by SIGSEGV"),
        (-signal.SIGABRT, "crash", "was killed by SIGABRT"),
        (-250, "crash", "was killed by signal 250"),
    ],
)
def test_exit_status(returncode: int, cause: str, words: str) -> None:
    assert (cause_of_exit(returncode), describe_exit(returncode)) == (cause, words)


def test_who_asked() -> None:
    asked = [0, -signal.SIGTERM, -signal.SIGINT]
    others = [1, 2, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGHUP]
    assert [code for code in asked + others if was_asked_to_end(code)] == asked


@pytest.mark.parametrize(
    ("was_asked", "is_draining", "is_live", "at_once", "after_the_grace"),
    [
        (False, False, False, True, True),
        (False, True, False, False, False),
        (False, True, True, True, True),
        (True, False, False, False, True),
        (True, True, False, False, False),
        (True, True, True, False, True),
    ],
)
def test_who_is_followed(
    was_asked: bool, is_draining: bool, is_live: bool, at_once: bool, after_the_grace: bool
) -> None:
    """A server that ends starts a core for live requests only; a core that was asked to end may not be the only one."""
    death = CoreDeath("killed", "died", was_asked=was_asked)
    assert [
        death.calls_for_successor(age_s, is_draining=is_draining, has_live_requests=is_live)
        for age_s in (0.0, SAME_SIGNAL_GRACE_S)
    ] == [at_once, after_the_grace]
