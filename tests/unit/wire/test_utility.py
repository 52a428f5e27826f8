"""The table of control verbs, as a client reads it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.wire.lora import AdapterInfo
from quire.wire.stats import BlockMap, EngineSnapshot
from quire.wire.trace import PhaseTrace, TraceWindow
from quire.wire.utility import UTILITIES, convert_result

TRACE = TraceWindow(1.0, 2.0, [], [PhaseTrace("a", "queued", 1.0, 2.0)], 9)
SNAPSHOT = EngineSnapshot(1.0, 2.0, 0, 3, 4, 5, 6, BlockMap(8, 7, 0, 1))


@pytest.mark.parametrize(
    ("verb", "result", "converted"),
    [
        ("pause_scheduler", None, None),
        ("is_sleeping", True, True),
        ("update_weights", "1", "1"),
        ("list_loras", [3, 4], {3, 4}),
        ("add_lora", [3, 1, "digest", 1000, 8], AdapterInfo(3, 1, "digest", 1000, 8)),
        ("get_supported_tasks", ["generate"], ("generate",)),
        ("collective_rpc", ["pong"], ["pong"]),
        ("get_dropped_messages", {"corrupt": 2}, {"corrupt": 2}),
        ("get_snapshot", msgspec.to_builtins(SNAPSHOT), SNAPSHOT),
        ("get_trace", [1.0, 2.0, [], [["a", "queued", 1.0, 2.0]], 9], TRACE),
        ("get_trace", TRACE, TRACE),
        ("a verb that there is not", [1], [1]),
    ],
)
def test_results_become_what_the_row_says(verb: str, result: Any, converted: Any) -> None:
    assert convert_result(verb, result) == converted


def test_what_is_remembered_is_repeatable() -> None:
    """Else a restarted core could be brought into a state that the one before it may not have had."""
    assert all(spec.is_repeatable for spec in UTILITIES.values() if spec.is_remembered)
