"""The writer and the reader of a directory: when a writer seals and rests, what a reader accepts."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from quire.kv_store import directory
from quire.kv_store.access import BUSY_REST_S, OPEN_S, REST_S, RecordBuffer, RecordReader, StoreWriter
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.index import StoreIndex
from quire.kv_store.record import InvalidRecordError, RecordMac

from .stores import FINGERPRINT, KEY, digest_of, header_of, open_store, payload_of

EXTENT_BYTES = 4096


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> StoreDirectory:
    return open_store(tmp_path / "store", 16 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)


@pytest.fixture
def writer(store: StoreDirectory, clock: Clock) -> StoreWriter:
    return StoreWriter(store, clock)


def write(writer: StoreWriter, number: int, fingerprint: bytes = FINGERPRINT) -> str:
    return writer.append(header_of(number, fingerprint=fingerprint), payload_of(number))


def states(store: StoreDirectory) -> list[tuple[str, bool]]:
    """Returns the namespaces of the extents, and whether they are sealed."""
    return sorted((file.namespace, store.is_sealed(file)) for file in store.list_extents())


def test_a_full_extent_is_sealed_and_followed_by_another(store: StoreDirectory, writer: StoreWriter) -> None:
    for number in range(50):
        assert write(writer, number) == ""
    writer.seal()
    assert [sealed for _, sealed in states(store)] == [True] * len(states(store))
    assert len(states(store)) > 3
    index = StoreIndex(store, FINGERPRINT)
    index.scan()
    assert all(index.contains(digest_of(number), 0) for number in range(50))


def test_an_extent_that_was_deleted_is_not_written_to(
    store: StoreDirectory, writer: StoreWriter, caplog: pytest.LogCaptureFixture
) -> None:
    write(writer, 1)
    for file in store.list_extents():
        store.remove(file.name)
    assert write(writer, 2) == ""
    index = StoreIndex(store, FINGERPRINT)
    index.scan()
    assert (index.contains(digest_of(1), 0), index.contains(digest_of(2), 0)) == (False, True)
    shutil.rmtree(store.path)
    assert write(writer, 3) == "error"
    assert f"{store.path} is not written to for 60 s: its directory was deleted; start" in caplog.text


def test_an_extent_is_sealed_after_ten_minutes(store: StoreDirectory, writer: StoreWriter, clock: Clock) -> None:
    assert writer.seconds_to_seal() is None
    write(writer, 1)
    assert writer.seconds_to_seal() == OPEN_S
    clock.now = OPEN_S - 1
    writer.seal_if_old()
    assert [sealed for _, sealed in states(store)] == [False]
    clock.now = OPEN_S
    writer.seal_if_old()
    assert [sealed for _, sealed in states(store)] == [True]
    assert writer.seconds_to_seal() is None


def test_a_namespace_has_extents_of_its_own(store: StoreDirectory, writer: StoreWriter) -> None:
    write(writer, 1)
    write(writer, 2, fingerprint=bytes(32))
    assert states(store) == [("0" * 16, False), (FINGERPRINT.hex()[:16], True)]


def test_a_record_that_fits_no_extent_is_not_written(store: StoreDirectory, writer: StoreWriter) -> None:
    assert writer.append(header_of(1, payload_bytes=EXTENT_BYTES), payload_of(1, EXTENT_BYTES)) == "format"
    assert write(writer, 2) == ""


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "error")])
def test_after_an_error_the_writer_rests_and_then_goes_on(
    store: StoreDirectory, writer: StoreWriter, clock: Clock, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    for number in range(20):
        write(writer, number)
    num_before = len(states(store))

    def fail(*args: object) -> int:
        raise OSError(code, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        assert write(writer, 21) == reason
        if reason == "full":
            patch.setattr(store, "_free_bytes", lambda: 0)
    clock.now = REST_S - 1
    assert write(writer, 22) == reason
    clock.now = REST_S
    assert write(writer, 22) == ""
    assert len(states(store)) > num_before - 2


def test_a_full_store_makes_room_and_a_busy_one_is_tried_again(
    store: StoreDirectory, writer: StoreWriter, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LOCK_WAIT_S", 0.0)
    with store.locked():
        assert write(writer, 1) == "full"
    assert write(writer, 1) == "full"
    clock.now = BUSY_REST_S
    assert write(writer, 1) == ""
    for number in range(400):
        assert write(writer, number) == ""
        assert store.count_bytes() <= store.max_bytes


def content(buffer: RecordBuffer, start: int, sizes: list[int]) -> bytes:
    """Returns what is filled into pieces of these sizes."""
    pieces = [memoryview(bytearray(size)) for size in sizes]
    buffer.copy_to(start, pieces)
    return b"".join(pieces)


@pytest.mark.parametrize("has_files_in_memory", [True, False])
def test_a_buffer_grows_and_fills_pieces(has_files_in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_files_in_memory:
        monkeypatch.delattr(os, "memfd_create")
    buffer = RecordBuffer()
    buffer.take(10)[:] = bytes(range(10))
    assert content(buffer, 2, [3, 0, 4]) == bytes(range(2, 9))
    assert content(buffer, 2, []) == b""
    large = bytes(range(256)) * 1000
    buffer.take(len(large))[:] = large
    assert content(buffer, 1, [100] * 2000) == large[1:200_001], "more pieces than one call takes"
    pieces = [memoryview(large)[i : i + 100] for i in range(0, 200_000, 100)]
    assert buffer.copy_from([*pieces, memoryview(b"")]) == large[:200_000]
    assert buffer.copy_from([]) == b""
    buffer.close()
    buffer.close()


def test_a_reader_takes_the_record_that_was_asked_for_and_no_other(store: StoreDirectory, writer: StoreWriter) -> None:
    for number in range(3):
        write(writer, number)
    index = StoreIndex(store, FINGERPRINT)
    index.scan()
    reader, buffer = RecordReader(store, RecordMac(store.key)), RecordBuffer()
    sizes = [len(piece) for piece in payload_of(0)]
    for number in range(3):
        place = index.find(digest_of(number), 0)
        assert place is not None
        start = reader.read(*place, header_of(number), buffer)
        assert content(buffer, start, sizes) == b"".join(payload_of(number))
        with pytest.raises(InvalidRecordError) as caught:
            reader.read(*place, header_of(number + 1), buffer)
        assert caught.value.reason == "key"
    with pytest.raises(InvalidRecordError) as caught:
        RecordReader(store, RecordMac(KEY)).read(*place, header_of(2), buffer)
    assert caught.value.reason == "mac"
    with pytest.raises(InvalidRecordError) as caught:
        reader.read(place.extent, place.offset + 1000, header_of(2), buffer)
    assert caught.value.reason == "truncated"
    with pytest.raises(InvalidRecordError) as caught:
        reader.read("absent", 0, header_of(2), buffer)
    assert caught.value.reason == "gone"
    store.remove(place.extent)
    start = reader.read(*place, header_of(2), buffer)
    assert content(buffer, start, sizes) == b"".join(payload_of(2)), "it has the file open"
    buffer.close()
    reader.close()
