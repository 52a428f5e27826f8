"""Calls that bring a new core into the state of the last one."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.lifecycle import UTILITIES
from quire.frontend.client.control_calls import REMEMBERED_VERBS, REPEATABLE_VERBS, ControlState
from quire.lora_request import LoRARequest

LORA = LoRARequest("adapter", 7, "/l")
Call = tuple[str, tuple[Any, ...], Any]


def state_after(*calls: Call) -> list[tuple[str, tuple[Any, ...]]]:
    state = ControlState()
    for call in calls:
        state.note_success(*call)
    return state.calls()


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], []),
        ([("reset_prefix_cache", (), True), ("is_sleeping", (), False)], []),
        ([("pause_scheduler", ("abort", True), None)], [("pause_scheduler", ("abort", False))]),
        ([("pause_scheduler", ("wait", True), None)], [("pause_scheduler", ("abort", False))]),
        ([("pause_scheduler", ("keep", True), None)], [("pause_scheduler", ("keep", False))]),
        ([("pause_scheduler", (), None)], [("pause_scheduler", ("abort", False))]),
        ([("pause_scheduler", ("keep",), None), ("resume_scheduler", (), None)], []),
        ([("sleep", (), None)], [("sleep", (1, "abort"))]),
        ([("sleep", (2, "keep"), None)], [("sleep", (2, "keep"))]),
        ([("sleep", (2,), None), ("wake_up", (None,), True)], []),
        ([("pause_scheduler", ("keep",), None), ("sleep", (1,), None), ("wake_up", (), True)], []),
        (
            [("sleep", (1,), None), ("wake_up", (["weights"],), False)],
            [("sleep", (1, "abort")), ("wake_up", (["weights"],))],
        ),
        ([("release_kv_cache_memory", ("keep",), None)], [("release_kv_cache_memory", ("keep",))]),
        ([("update_weights", ("/a",), "1"), ("update_weights", ("/b", "x"), "x")], [("update_weights", ("/b", "x"))]),
        ([("add_lora", (LORA,), True), ("pin_lora", (7,), True)], [("add_lora", (LORA,)), ("pin_lora", (7,))]),
        ([("add_lora", (LORA,), True), ("remove_lora", (7,), True)], []),
        (
            [("sleep", (1,), None), ("add_lora", (LORA,), True), ("update_weights", ("/a",), "1")],
            [("update_weights", ("/a", "1")), ("add_lora", (LORA,)), ("sleep", (1, "abort"))],
        ),
    ],
)
def test_calls_leave_what_a_new_core_must_be_told(
    calls: list[Call], expected: list[tuple[str, tuple[Any, ...]]]
) -> None:
    assert state_after(*calls) == expected


def test_every_verb_of_the_core_is_decided_about() -> None:
    """A new verb is repeatable or not: say so in the table of control_calls.py."""
    unrepeatable = {"collective_rpc", "profile", "execute_dummy_batch", "get_dropped_messages"}
    assert UTILITIES.keys() - REPEATABLE_VERBS <= unrepeatable


@pytest.mark.parametrize("verb", sorted(UTILITIES.keys() - {"add_lora", "remove_lora", "pin_lora"}))
def test_what_is_remembered_is_made_by_whoever_starts_cores(verb: str) -> None:
    """Every verb that changes the state, and no other, goes through the owner of a shared core."""
    args: tuple[Any, ...] = ("/w", None) if verb == "update_weights" else ()
    before: list[Call] = [("pause_scheduler", ("keep",), None), ("sleep", (1,), None)]
    changes = state_after(*before, (verb, args, True)) != state_after(*before)
    is_pause_again = verb == "pause_scheduler"
    assert (changes or is_pause_again) == (verb in REMEMBERED_VERBS)
