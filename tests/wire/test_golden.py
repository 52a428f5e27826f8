"""Every struct that crosses a process boundary has the bytes it always had, and is covered."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import msgspec
import numpy as np
import pytest

import quire.wire
from quire.wire.engine_core import EngineCoreRequestType
from quire.wire.handshake import ENGINE_CORE_DEAD, PROTOCOL_VERSION, engine_identity
from quire.wire.serial import MsgpackDecoder, MsgpackEncoder

from . import golden
from .equality import assert_same
from .samples import FULL, LEFT_AT_DEFAULT, SAMPLES

RECORDED = golden.read()
ABSTRACT = {"_AnyHello", "Group", "KVCacheSpec", "KVEvent", "Topology"}
"""Structs nothing sends as such."""


def _structs_of_the_wire() -> dict[str, type]:
    found = {}
    for info in pkgutil.iter_modules(quire.wire.__path__):
        module = importlib.import_module(f"quire.wire.{info.name}")
        for name, value in vars(module).items():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and (issubclass(value, msgspec.Struct) or dataclasses.is_dataclass(value)):
                found[name] = value
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_are_those_recorded(name: str) -> None:
    assert name in RECORDED, f"{name} is not recorded yet. {golden.HOW_TO_CHANGE}"
    assert [bytes(frame) for frame in golden.encode(name)] == RECORDED[name], golden.HOW_TO_CHANGE


def test_recorded_with_the_version_in_force() -> None:
    assert int.from_bytes(RECORDED["PROTOCOL_VERSION"][0]) == PROTOCOL_VERSION, golden.HOW_TO_CHANGE


def test_nothing_is_recorded_that_is_no_longer_sent() -> None:
    assert RECORDED.keys() == {*SAMPLES, "PROTOCOL_VERSION"}


@pytest.mark.parametrize("name", SAMPLES)
def test_recorded_bytes_still_mean_the_same(name: str) -> None:
    sample = SAMPLES[name]
    decoded = MsgpackDecoder(list[str] if isinstance(sample, list) else type(sample)).decode(RECORDED[name])
    assert_same(decoded, list(sample) if name == "UTILITY.plain" else sample)


def test_every_struct_has_a_sample() -> None:
    missing = _structs_of_the_wire().keys() - FULL.keys() - ABSTRACT
    assert not missing, f"add to tests/wire/samples.py: {sorted(missing)}"


@pytest.mark.parametrize("name", FULL)
def test_a_full_sample_leaves_no_field_at_its_default(name: str) -> None:
    struct = type(FULL[name])
    fields = msgspec.structs.fields(struct) if issubclass(struct, msgspec.Struct) else dataclasses.fields(struct)
    left = {field.name for field in fields if np.array_equal(getattr(FULL[name], field.name), _default(field))}
    assert left == LEFT_AT_DEFAULT.get(name, set()), "set them in tests/wire/samples.py"


def _default(field: Any) -> Any:
    """A field's default; something unequal to all else where it has none."""
    if field.default_factory in (msgspec.NODEFAULT, dataclasses.MISSING):
        return field.default
    return field.default_factory()


def test_single_frames_have_their_bytes() -> None:
    assert [t.value for t in EngineCoreRequestType] == [bytes([i]) for i in range(7)]
    assert ENGINE_CORE_DEAD == b"ENGINE_CORE_DEAD"
    assert engine_identity(0x0102) == b"\x02\x01"


def test_a_changed_field_changes_the_bytes() -> None:
    """The comparison can fail."""
    changed = msgspec.structs.replace(FULL["EngineCoreRequest"], priority=-4)
    assert bytes(MsgpackEncoder().encode(changed)[0]) != RECORDED["EngineCoreRequest.full"][0]
