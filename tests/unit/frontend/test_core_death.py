"""What the end of a core says."""

from __future__ import annotations

import signal

import pytest

from quire.frontend.core_death import cause_of_exit, describe_exit


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
