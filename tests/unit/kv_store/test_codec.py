"""Codec 1: what was compressed comes back, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.kv_store import codec
from quire.kv_store.access import RecordBuffer, RecordReader, StoreWriter
from quire.kv_store.codec import compress, decompress, prove_payload
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import find_damage, open_extent
from quire.kv_store.record import CODEC_PLANES, InvalidRecordError, RecordMac

from .stores import KEY, header_of, open_store

NUM_BYTES = 4096


@pytest.fixture
def store(tmp_path: Path) -> StoreDirectory:
    return open_store(tmp_path / "store", 1 << 20, extent_bytes=1 << 16)


def floats_of(element_bytes: int) -> memoryview:
    """Returns numbers as keys have them, of about one size: float32, or their upper halves, which are bfloat16."""
    numbers = np.random.default_rng(1).standard_normal(NUM_BYTES).astype("<f4").view("<u4")
    return memoryview((numbers >> 16).astype("<u2").tobytes() if element_bytes == 2 else numbers.tobytes())


@pytest.mark.parametrize(("element_bytes", "share"), [(2, 0.75), (4, 0.87)])
def test_a_payload_comes_back_bit_by_bit(element_bytes: int, share: float) -> None:
    payload = floats_of(element_bytes)
    stored = compress(payload, element_bytes)
    assert stored is not None
    assert len(stored) < share * len(payload)
    assert decompress(memoryview(stored), len(payload)) == payload


def test_bytes_are_compressed_whole() -> None:
    payload = memoryview(b"abcd" * 100)
    stored = compress(payload, 1)
    assert stored is not None
    assert decompress(memoryview(stored), len(payload)) == payload


def test_what_does_not_become_smaller_is_not_compressed() -> None:
    noise = memoryview(np.random.default_rng(2).bytes(NUM_BYTES))
    assert [compress(noise, size) for size in (1, 2, 4)] == [None] * 3
    assert compress(memoryview(b""), 2) is None
    assert compress(memoryview(b"abc"), 2) is None, "no whole number of elements"
    assert compress(memoryview(bytes(80)), 8) is None, "no codec for these"


def test_whatever_else_is_stored_is_no_payload() -> None:
    stored = bytearray(compress(floats_of(2), 2) or b"")
    frame_bytes = int.from_bytes(stored[4:8], "little")
    for at, value, payload_bytes in (
        (0, 3, 2 * NUM_BYTES),
        (0, 4, 2 * NUM_BYTES),
        (4, frame_bytes - 1, 2 * NUM_BYTES),
        (4, 1 << 31, 2 * NUM_BYTES),
        (0, 2, 2 * NUM_BYTES + 1),
        (0, 2, 2 * NUM_BYTES - 2),
    ):
        other = bytearray(stored)
        other[at : at + 4] = value.to_bytes(4, "little")
        with pytest.raises(InvalidRecordError):
            decompress(memoryview(other), payload_bytes)
    shorter = bytes(stored[:4]) + (7).to_bytes(4, "little") + bytes(stored[8:15]) + bytes(stored[8 + frame_bytes :])
    with pytest.raises(InvalidRecordError, match="cannot be decompressed"):
        decompress(memoryview(shorter), 2 * NUM_BYTES)
    with pytest.raises(InvalidRecordError) as caught:
        decompress(memoryview(stored[:7]), 2 * NUM_BYTES)
    assert caught.value.reason == "truncated"
    stored[8 + 6 : 8 + 30] = bytes(24)
    with pytest.raises(InvalidRecordError, match="cannot be decompressed"):
        decompress(memoryview(stored), 2 * NUM_BYTES)


def test_a_directory_holds_both_kinds(store: StoreDirectory) -> None:
    """The reader asks for the block, however it is stored; the records are whole to `quire kv-store verify`."""
    writer, reader, buffer = StoreWriter(store), RecordReader(store, RecordMac(store.key)), RecordBuffer()
    payload = floats_of(2)
    stored = memoryview(compress(payload, 2) or b"")
    wanted, places = [header_of(number, payload_bytes=len(payload)) for number in (1, 2)], []
    compressed = dataclasses.replace(wanted[0], codec=CODEC_PLANES, compressed_bytes=len(stored))
    for header, piece in ((compressed, stored), (wanted[1], payload)):
        assert writer.append(header, [piece]) == ""
        places.append(writer.last_place)
    for header, place in zip(wanted, places, strict=True):
        start = reader.read(*place, header, buffer)
        assert buffer.take(start + len(payload))[start:] == payload
    assert reader.num_records == 2
    writer.seal()
    (file,) = store.list_extents()
    table = store.load_table(file)
    assert table is not None
    descriptor = open_extent(store.descriptor, file.name)
    assert [entry.stored_bytes for entry in table.entries] == [len(stored), len(payload)]
    assert {find_damage(descriptor, entry, RecordMac(store.key)) for entry in table.entries} == {None}


def test_a_record_that_came_in_parts() -> None:
    payload, mac = floats_of(4), RecordMac(KEY)
    stored = memoryview(compress(payload, 4) or b"")
    wanted = header_of(1, payload_bytes=len(payload))
    header = dataclasses.replace(wanted, codec=CODEC_PLANES, compressed_bytes=len(stored)).encode()
    head = memoryview(header + mac.tag(header, [stored]))
    assert prove_payload(mac, wanted, head, stored) == payload
    with pytest.raises(InvalidRecordError):
        prove_payload(mac, wanted, head, stored[:-1])
    with pytest.raises(InvalidRecordError):
        prove_payload(mac, header_of(2, payload_bytes=len(payload)), head, stored)


def test_without_zstd_a_compressed_block_is_a_miss_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    codec._find_zstd.cache_clear()
    with pytest.raises(InvalidRecordError, match=r"quire\[zstd\]"):
        decompress(memoryview(bytes(100)), 100)
