"""Suspicions, trials and verdicts (promise P2). The whole play is in `client/test_link_random.py`."""

from __future__ import annotations

import signal

import pytest

from quire.frontend.supervision.journal import Journal
from quire.frontend.supervision.quarantine import (
    MAX_NEWCOMERS,
    MAX_TRIAL_TOKENS,
    SAME_SIGNAL_GRACE_S,
    CoreDeath,
    DeathCause,
    Quarantine,
    cause_of_exit,
    describe_exit,
    was_asked_to_end,
)
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreRequest


def make_journal(names: str, answered: str = "") -> Journal:
    """Requests that are with the core; of those in `answered` tokens have come."""
    journal = Journal()
    for name in names:
        entry = journal.add(EngineCoreRequest(name, [1], SamplingParams(), None, 0.0))
        journal.note_sent(entry, first_time=True)
        if name in answered:
            entry.output_token_ids.append(1)
    return journal


def death(cause: DeathCause, members: str | None = "") -> CoreDeath:
    return CoreDeath(cause, "died", None if members is None else tuple(members))


def begin_trial(quarantine: Quarantine, journal: Journal) -> str | None:
    entry = quarantine.begin_trial(journal)
    return None if entry is None else entry.request_id


def suspects(quarantine: Quarantine, journal: Journal) -> list[str]:
    found = []
    while (request_id := begin_trial(quarantine, journal)) is not None:
        found.append(request_id)
        quarantine.clear(request_id)
    return found


def test_a_death_while_drafting_blames_nobody() -> None:
    quarantine, journal = Quarantine(), make_journal("abcde", answered="abcd")
    for _ in range(4):
        assert quarantine.judge(death("draft", "bc"), journal) is None
    assert quarantine.is_empty
    quarantine.judge(death("crash", "b"), journal)
    assert begin_trial(quarantine, journal) == "b"
    assert quarantine.judge(death("draft", "b"), journal) is None
    assert suspects(quarantine, journal) == ["b", "e"], "its trial begins anew"


@pytest.mark.parametrize("cause", ["crash", "hang"])
def test_the_members_of_the_fatal_step_and_who_was_never_answered_are_suspects(cause: DeathCause) -> None:
    quarantine, journal = Quarantine(), make_journal("abcde", answered="abcd")
    assert quarantine.judge(death(cause, "bc"), journal) is None
    assert not quarantine.is_empty
    assert suspects(quarantine, journal) == ["b", "c", "e"]
    assert quarantine.is_empty


def test_of_many_newcomers_the_latest_are_suspects() -> None:
    names = "".join(chr(ord("A") + i) for i in range(MAX_NEWCOMERS + 5))
    quarantine, journal = Quarantine(), make_journal(names)
    quarantine.judge(death("crash"), journal)
    assert sorted(suspects(quarantine, journal)) == sorted(names[-MAX_NEWCOMERS:])


@pytest.mark.parametrize("cause", ["killed", "start", "lost"])
def test_other_deaths_accuse_nobody(cause: DeathCause) -> None:
    quarantine = Quarantine()
    assert quarantine.judge(death(cause, "ab"), make_journal("ab")) is None
    assert quarantine.is_empty


@pytest.mark.parametrize("cause", ["crash", "hang"])
def test_a_second_death_in_its_trial_proves_guilt(cause: DeathCause) -> None:
    quarantine, journal = Quarantine(), make_journal("ab")
    quarantine.judge(death("crash", "ab"), journal)
    assert begin_trial(quarantine, journal) == "a"
    guilty = quarantine.judge(death(cause, "a"), journal)
    assert guilty is not None
    assert guilty.request_id == "a"
    assert quarantine.on_trial is None
    assert suspects(quarantine, journal) == ["b"], "it has still to be tried"


def test_a_kill_in_a_trial_proves_nothing() -> None:
    quarantine, journal = Quarantine(), make_journal("ab")
    quarantine.judge(death("crash", "ab"), journal)
    quarantine.begin_trial(journal)
    assert quarantine.judge(death("killed", "a"), journal) is None
    assert begin_trial(quarantine, journal) == "a", "it is tried again"


@pytest.mark.parametrize(
    ("is_shared", "members", "is_guilty"),
    [
        (True, ("a", "theirs"), False),
        (False, ("a", "theirs"), False),
        (True, ("a",), True),
        (True, (), False),
        (False, (), True),
    ],
)
def test_a_death_that_another_client_may_have_brought_about_proves_nothing(
    is_shared: bool, members: tuple[str, ...], is_guilty: bool
) -> None:
    quarantine, journal = Quarantine(is_shared), make_journal("a")
    quarantine.judge(death("crash", "a"), journal)
    quarantine.begin_trial(journal)
    assert (quarantine.judge(CoreDeath("crash", "died", members), journal) is not None) == is_guilty


def test_who_was_in_three_killed_steps_without_a_token_is_tried_and_the_fourth_convicts() -> None:
    """The system may kill a core for the memory that one request takes."""
    quarantine, journal = Quarantine(), make_journal("ab")
    for _ in range(2):
        quarantine.judge(death("killed", "a"), journal)
        assert quarantine.is_empty
    quarantine.judge(death("killed", "a"), journal)
    assert begin_trial(quarantine, journal) == "a"
    guilty = quarantine.judge(death("killed", "a"), journal)
    assert guilty is not None
    assert guilty.request_id == "a"


def test_where_members_are_unknown_all_are_counted() -> None:
    quarantine, journal = Quarantine(), make_journal("ab")
    for _ in range(3):
        quarantine.judge(death("lost", None), journal)
    assert suspects(quarantine, journal) == ["a", "b"]


def test_if_those_who_came_through_are_there_again_everybody_is_tried_and_they_last() -> None:
    quarantine, journal = Quarantine(), make_journal("abcd", answered="abcd")
    for name in "ab":
        entry = journal.get(name)
        assert entry is not None
        entry.num_acquittals = 1
    quarantine.judge(death("crash", "ab"), journal)
    assert suspects(quarantine, journal) == ["c", "d", "a", "b"]


def test_who_ends_is_no_suspect() -> None:
    quarantine, journal = Quarantine(), make_journal("ab")
    quarantine.judge(death("crash", "ab"), journal)
    quarantine.begin_trial(journal)
    assert not quarantine.clear("b")
    assert quarantine.clear("a")
    assert (quarantine.is_empty, quarantine.on_trial) == (True, None)


def test_each_further_trial_takes_twice_as_many_tokens() -> None:
    """So one that kills the core only after some steps is caught in the act."""
    quarantine, journal = Quarantine(), make_journal("a")
    (entry,) = journal
    for needed in (1, 2, 4, 8):
        quarantine.judge(death("crash", "a"), journal)
        assert begin_trial(quarantine, journal) == "a"
        for _ in range(needed - 1):
            assert not quarantine.note_tokens(entry, 1)
        assert quarantine.note_tokens(entry, 1)
        assert quarantine.clear("a")
    assert quarantine.note_tokens(entry, 1), "nobody is on trial"
    entry.num_acquittals = 60
    quarantine.judge(death("crash", "a"), journal)
    begin_trial(quarantine, journal)
    assert quarantine.note_tokens(entry, MAX_TRIAL_TOKENS), "a trial has an end"


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
def test_an_exit_status_is_described_in_words(returncode: int, cause: str, words: str) -> None:
    assert (cause_of_exit(returncode), describe_exit(returncode)) == (cause, words)


def test_an_end_that_was_asked_for_is_recognized() -> None:
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
