"""Calls that bring a new core into the state of the last one."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.lifecycle import UTILITIES
from quire.frontend.client.control_calls import REMEMBERED_VERBS, REPEATABLE_VERBS, ControlState
from quire.lora_request import LoRARequest
from quire.wire.lora import RegisteredAdapter

LORA = LoRARequest("adapter", 7, "/l")
MOVED = LoRARequest("adapter", 7, "/m", load_inplace=True)
OTHER = LoRARequest("other", 8, "/o")
INFO = [7, 3, "d", 1000, 8]
"""An AdapterInfo as it comes off the wire."""
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
        ([("add_lora", (LORA,), INFO)], [("register_loras", ([RegisteredAdapter(LORA, 3, "d")],))]),
        (
            [("add_lora", (LORA,), INFO), ("pin_lora", (7,), True)],
            [("register_loras", ([RegisteredAdapter(LORA, 3, "d", is_pinned=True)],))],
        ),
        (  # reloaded from another directory
            [("add_lora", (LORA,), INFO), ("pin_lora", (7,), True), ("add_lora", (MOVED,), [7, 4, "e", 1, 8])],
            [("register_loras", ([RegisteredAdapter(MOVED, 4, "e", is_pinned=True)],))],
        ),
        (
            [("add_lora", (LORA,), INFO), ("add_lora", (OTHER,), [8, 1, "f", 1, 8])],
            [("register_loras", ([RegisteredAdapter(LORA, 3, "d"), RegisteredAdapter(OTHER, 1, "f")],))],
        ),
        ([("add_lora", (LORA,), INFO), ("remove_lora", (7,), True)], []),
        ([("pin_lora", (9,), True)], []),  # a request has made it known; its requests do so again
        (
            [("sleep", (1,), None), ("add_lora", (["adapter", 7, "/l"],), INFO), ("update_weights", ("/a",), "1")],
            [
                ("update_weights", ("/a", "1")),
                ("register_loras", ([RegisteredAdapter(LORA, 3, "d")],)),
                ("sleep", (1, "abort")),
            ],
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
    unrepeatable |= {"reinitialize_distributed", "commit_prepared_elastic_ep", "discard_prepared_elastic_ep"}
    assert UTILITIES.keys() - REPEATABLE_VERBS <= unrepeatable


@pytest.mark.parametrize("verb", sorted(UTILITIES))
def test_what_is_remembered_is_made_by_whoever_starts_cores(verb: str) -> None:
    """Every verb that changes the state, and no other, goes through the owner of a shared core."""
    some: dict[str, tuple[Any, ...]] = {"update_weights": ("/w", None), "add_lora": (LORA,)}
    args = some.get(verb, (8,) if verb in ("remove_lora", "pin_lora") else ())
    before: list[Call] = [("pause_scheduler", ("keep",), None), ("sleep", (1,), None), ("add_lora", (OTHER,), INFO)]
    changes = state_after(*before, (verb, args, INFO)) != state_after(*before)
    is_pause_again = verb == "pause_scheduler"
    assert (changes or is_pause_again) == (verb in REMEMBERED_VERBS)
