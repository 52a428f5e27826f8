"""Mutated messages: whatever arrives, decoding gives a value of the declared type or a WireError, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.handshake import EngineHandshakeMetadata, EngineStatus
from quire.wire.serial import MsgpackDecoder, WireError
from tests.seeds import seed_of, volume

from . import golden
from .mutate import mutate

RECORDED = {name: frames for name, frames in golden.read().items() if name != "PROTOCOL_VERSION"}
ALL_FRAMES = [frame for frames in RECORDED.values() for frame in frames]
ARRIVING: dict[str, Any] = {
    "EngineCoreRequest": EngineCoreRequest,
    "EngineCoreOutputs": EngineCoreOutputs,
    "EngineCoreReadyResponse": EngineCoreReadyResponse,
    "EngineStatus": EngineStatus,
    "EngineHandshakeMetadata": EngineHandshakeMetadata,
    "SchedulerOutput": SchedulerOutput,
    "ModelRunnerOutput": ModelRunnerOutput,
    "ABORT": list[str],
    "UTILITY": tuple[int, int, str, tuple[Any, ...]],
}
"""Every type a process decodes from a socket."""


def _run(name: str, count: int, seed: int) -> tuple[int, int]:
    """Decode `count` mutations. How many were taken for a message, and how many refused."""
    rng = random.Random(f"{name}/{seed}")
    decoder = MsgpackDecoder(ARRIVING[name])
    right = [frames for sample, frames in RECORDED.items() if sample.split(".")[0] == name]
    taken = refused = 0
    for _ in range(count):
        message = mutate(rng, rng.choice(right), ALL_FRAMES)
        try:
            value = decoder.decode(message)
        except WireError:
            refused += 1
        else:
            taken += 1
            msgspec.msgpack.encode(value, enc_hook=str)  # a value through and through, not a half-made one
    return taken, refused


@pytest.mark.fresh
@pytest.mark.parametrize("name", ARRIVING)
def test_only_wire_errors_escape(name: str) -> None:
    count = volume(10_000) // len(ARRIVING) + 1
    taken, refused = _run(name, count, seed_of(1))
    assert taken + refused == count
    assert taken > count // 1000, "the mutations are all too coarse: none came close to a right message"
    assert refused > count // 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ARRIVING)
def test_only_wire_errors_escape_from_millions(name: str, seed: int) -> None:
    _run(name, 100_000, seed=1000 + seed)
