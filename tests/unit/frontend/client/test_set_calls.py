"""The answers of several engines to one control call."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from quire.errors import EngineDeadError
from quire.frontend.client.control_calls import Answer
from quire.frontend.client.set_calls import SetCalls
from quire.wire.engine_core import UtilityOutput
from quire.wire.stats import BlockMap, EngineSnapshot, RequestSnapshot
from quire.wire.utility import convert_result


def join(method: str, *results: Any) -> UtilityOutput | EngineDeadError:
    """The joint answer to results, failures (`UtilityOutput`) and deaths of engines 0, 1, …"""
    calls = SetCalls()
    call = calls.begin(method, ())
    for engine in range(len(results)):
        calls.note_sent(call, engine, 10 + engine)
    joint: list[Answer] = []
    for engine, result in enumerate(results):
        output = result if isinstance(result, UtilityOutput | EngineDeadError) else UtilityOutput(0, result=result)
        joint += calls.take_answers(engine, [Answer(10 + engine, output)])
    (answer,) = joint
    assert answer.call_id == call.call_id
    return answer.output


@pytest.mark.parametrize(
    ("method", "results", "expected"),
    [
        ("is_sleeping", (True, True), True),
        ("list_loras", ([1, 2], [2, 1]), [1, 2]),
        ("reset_prefix_cache", (True, False), False),
        ("reset_prefix_cache", (True, True), True),
        ("get_dropped_messages", ({"a": 1}, {"a": 2, "b": 1}), {"a": 3, "b": 1}),
        ("collective_rpc", (["x"], ["y"]), ["x", "y"]),
        ("unknown", ("first", "second"), "first"),
    ],
)
def test_answers_become_one(method: str, results: tuple[Any, ...], expected: Any) -> None:
    output = join(method, *results)
    assert isinstance(output, UtilityOutput)
    assert (output.failure_message, output.result) == (None, expected)


def test_different_answers_are_an_error() -> None:
    output = join("get_weight_version", "1", "2")
    assert isinstance(output, UtilityOutput)
    assert (
        output.failure_message
        == "the engines have answered get_weight_version differently: engine 0: '1'; engine 1: '2'"
    )


def test_the_failure_of_one_engine_is_that_of_the_call() -> None:
    output = join("update_weights", "2", UtilityOutput(0, "no such file", error_type="ModelLoadError"))
    assert isinstance(output, UtilityOutput)
    assert output.failure_message == "engine 1: no such file (carried out by engine 0)"
    assert output.error_type == "ModelLoadError"


def test_the_same_failure_everywhere_is_told_once() -> None:
    output = join("update_weights", *[UtilityOutput(0, "no such file", error_type="ModelLoadError")] * 2)
    assert isinstance(output, UtilityOutput)
    assert output.failure_message == "no such file"


def test_a_death_is_told() -> None:
    output = join("profile", None, EngineDeadError("it died"))
    assert isinstance(output, EngineDeadError)
    assert str(output) == "engine 1: it died"


def test_an_engine_that_goes_is_not_waited_for() -> None:
    calls = SetCalls()
    call = calls.begin("pause_scheduler", ())
    for engine in (0, 1):
        calls.note_sent(call, engine, 5)
    assert list(calls.take_answers(0, [Answer(5, UtilityOutput(5))])) == []
    assert calls.get_remembered() == [call]
    ((call_id, output),) = calls.forget_engine(1)
    assert call_id == call.call_id
    assert isinstance(output, UtilityOutput)
    assert output.failure_message is None
    assert list(calls.take_answers(1, [Answer(5, UtilityOutput(5))])) == []


def test_snapshots_become_one() -> None:
    def snapshot(name: str, num_touched: int, stride: int) -> EngineSnapshot:
        listed = bytes(range(1, 1 + -(-num_touched // stride)))
        blocks = BlockMap(16, 10, 4, num_touched, stride, listed, listed)
        request = RequestSnapshot(name, name, "running", 3, 4, 4, block_ids=array("I", [2, 5]).tobytes())
        return EngineSnapshot(1.0, 2.0, 0, 1, 2, 8, 100, blocks, [request])

    results = [
        msgspec.to_builtins(snapshot(name, *size), builtin_types=(bytes,)) for name, *size in (("a", 8, 2), ("b", 8, 4))
    ]
    output = join("get_snapshot", *results)
    assert isinstance(output, UtilityOutput)
    joint = convert_result("get_snapshot", output.result)
    blocks = joint.blocks
    assert (blocks.num_blocks, blocks.num_free, blocks.num_cached, blocks.num_touched, blocks.stride) == (
        32,
        20,
        8,
        24,
        4,
    )
    assert blocks.references == bytes([1, 3, 0, 0, 1, 2])
    assert (joint.num_running, joint.num_waiting, joint.max_num_seqs) == (2, 4, 16)
    assert [list(array("I", request.block_ids)) for request in joint.requests] == [[2, 5], [18, 21]]
