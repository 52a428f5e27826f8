"""Calls of workers: what is encoded is decoded, by the types of the verb and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.wire.execution import GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from quire.wire.kv_transfer import KVConnectorMetadata
from quire.wire.serial import MsgpackEncoder, WireError
from quire.wire.worker_calls import (
    WORKER_VERBS,
    WorkerCall,
    WorkerReply,
    decode_call,
    decode_reply,
    decode_result,
    encode_call,
    encode_reply,
)
from quire.worker.worker import Worker

SPEC = FullAttentionSpec(16, 2, 8)
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("execute_model", (SchedulerOutput([NewRequestData("a", [1, 2], ([1],), 0)], total_num_scheduled_tokens=2),)),
    ("initialize_from_config", ([KVCacheConfig(4, [KVCacheTensor(9, ["x"])], [KVCacheGroupSpec(["x"], SPEC)])],)),
    ("wake_up", (["weights"],)),
    ("load_weights", (None,)),
    ("call_method", ("set_step_time", [0.5, "x", [1]], {"a": {"b": None}})),
    ("start_transfers", (KVConnectorMetadata(cancels=[3], params={"release": ["a"]}),)),
    ("load_model", ()),
]
RESULTS: list[tuple[str, Any]] = [
    ("execute_model", None),
    ("sample_tokens", ModelRunnerOutput(["a"], [[3]])),
    ("get_kv_cache_spec", {"x": SPEC}),
    ("get_supported_tasks", ("generate",)),
    ("determine_available_memory", 1 << 40),
    ("call_method", [1, {"a": 2.5}]),
]


@pytest.mark.parametrize(("verb", "arguments"), CALLS)
def test_calls_cross(verb: str, arguments: tuple[Any, ...]) -> None:
    call, found = decode_call(encode_call(WorkerCall(7, verb), arguments, MsgpackEncoder()))
    assert (call, found) == (WorkerCall(7, verb), arguments)


@pytest.mark.parametrize(("verb", "result"), RESULTS)
def test_results_cross(verb: str, result: Any) -> None:
    frames = encode_reply(WorkerReply(7), result, MsgpackEncoder())
    assert (decode_reply(frames), decode_result(frames, verb)) == (WorkerReply(7), result)


def test_masks_and_errors_cross() -> None:
    mask = np.arange(200, dtype=np.int32).reshape(2, 100)
    _, (found,) = decode_call(
        encode_call(WorkerCall(1, "sample_tokens"), (GrammarOutput(["a"], mask),), MsgpackEncoder())
    )
    assert np.array_equal(found.grammar_bitmask, mask)
    error = WorkerReply(3, "ModelLoadError", "no such file", is_echo=True)
    assert decode_reply(encode_reply(error, None, MsgpackEncoder())) == error


def test_arguments_that_are_left_out_are_none() -> None:
    _, found = decode_call(encode_call(WorkerCall(1, "profile"), (True,), MsgpackEncoder()))
    assert found == (True, None, None, None)


def test_other_types_and_verbs_are_errors() -> None:
    frames = encode_call(WorkerCall(1, "update_max_model_len"), ("many",), MsgpackEncoder())
    with pytest.raises(WireError, match="cannot be decoded"):
        decode_call(frames)
    with pytest.raises(KeyError):
        encode_call(WorkerCall(1, "__init__"), (), MsgpackEncoder())


def test_every_verb_is_a_method_of_the_worker() -> None:
    own = {verb for verb in WORKER_VERBS if not verb.startswith("call_")}
    assert not [verb for verb in own if not callable(getattr(Worker, verb, None))]
