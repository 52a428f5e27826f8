"""The first messages between a core and its frontend."""

from __future__ import annotations

import msgspec
import pytest

from quire.errors import ConfigError
from quire.wire.handshake import (
    PROTOCOL_VERSION,
    EngineHandshakeMetadata,
    EngineStatus,
    EngineZmqAddresses,
    check_protocol_version,
    engine_identity,
)
from quire.wire.serial import MsgpackDecoder, WireError


def test_identities_are_two_bytes_little_endian() -> None:
    assert [engine_identity(i) for i in (0, 1, 258)] == [b"\x00\x00", b"\x01\x00", b"\x02\x01"]
    with pytest.raises(OverflowError):
        engine_identity(1 << 16)


def test_another_version_is_refused_in_words() -> None:
    check_protocol_version(PROTOCOL_VERSION, "the engine core")
    with pytest.raises(
        ConfigError, match=f"the engine core speaks protocol version 99.*{PROTOCOL_VERSION}.*same version"
    ):
        check_protocol_version(99, "the engine core")


def test_a_status_of_another_version_can_still_be_read() -> None:
    """A core of another version can be sent the reason of its refusal: fields have names, and unknown ones are
    skipped."""
    newer = {"status": "HELLO", "protocol_version": 99, "a_field_of_tomorrow": [1, 2]}
    status = MsgpackDecoder(EngineStatus).decode([msgspec.msgpack.encode(newer)])
    assert (status.status, status.protocol_version) == ("HELLO", 99)
    newer = {"addresses": {"inputs": [], "outputs": []}, "engine_config": b"", "protocol_version": 99, "new": 1}
    assert MsgpackDecoder(EngineHandshakeMetadata).decode([msgspec.msgpack.encode(newer)]).protocol_version == 99


def test_both_sides_state_the_version_they_were_built_with() -> None:
    assert EngineStatus("HELLO").protocol_version == PROTOCOL_VERSION
    assert EngineHandshakeMetadata(EngineZmqAddresses([], []), b"").protocol_version == PROTOCOL_VERSION


def test_the_version_is_in_the_bytes() -> None:
    """Left out as a default it would be read as the receiver's own."""
    for said in (EngineStatus("HELLO"), EngineHandshakeMetadata(EngineZmqAddresses([], []), b"")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(said))["protocol_version"] == PROTOCOL_VERSION


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(WireError, match="status"):
        MsgpackDecoder(EngineStatus).decode([msgspec.msgpack.encode({"status": "GOODBYE"})])
