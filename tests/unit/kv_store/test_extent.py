"""Extents: what is written is read, what is torn is not."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from pathlib import Path

import pytest

from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import (
    Entry,
    ExtentWriter,
    InvalidExtentError,
    find_damage,
    follow,
    open_extent,
    read_into,
    read_table,
    seal_orphan,
    try_lock,
)
from quire.kv_store.record import TAG_BYTES, RecordMac

from .stores import FINGERPRINT, KEY, PAYLOAD_BYTES, digest_of, header_of, open_store, payload_of

NAMESPACE = FINGERPRINT.hex()[:16]
GOLDEN_TABLE = "7b94b2ef902efe94c9523548c128ef600bd47b41204c848c0b51091bc94c1749"
"""SHA-256 of the table of two records."""


@pytest.fixture
def store(tmp_path: Path) -> StoreDirectory:
    return open_store(tmp_path / "store")


def new_writer(store: StoreDirectory, max_bytes: int = 1 << 20) -> ExtentWriter:
    return ExtentWriter(store.descriptor, FINGERPRINT, KEY, max_bytes)


def write(store: StoreDirectory, num_records: int, *, is_sealed: bool) -> tuple[str, list[Entry]]:
    writer = new_writer(store)
    entries = [writer.append(header_of(i), payload_of(i)) for i in range(num_records)]
    writer.seal() if is_sealed else writer.abandon()
    return writer.name, entries


def open_(store: StoreDirectory, name: str) -> int:
    return open_extent(store.descriptor, name, is_writable=True)


def read_records(descriptor: int) -> list[int]:
    """Returns the numbers of the records that an open extent has and whose bytes are right, read into pieces."""
    found = []
    for entry in follow(descriptor, 0, FINGERPRINT[:8]):
        head = memoryview(bytearray(entry.head_bytes))
        pieces = [memoryview(bytearray(len(piece))) for piece in payload_of(0)]
        assert read_into(descriptor, [head, *pieces], entry.offset) == entry.end - entry.offset
        for number in range(9):
            if head[:-TAG_BYTES] == header_of(number).encode():
                RecordMac(KEY).check(header_of(number), head, pieces)
                found.append(number)
    return found


def test_an_open_extent_is_read_header_by_header_and_a_sealed_one_by_its_table(store: StoreDirectory) -> None:
    writer = new_writer(store)
    descriptor = open_(store, writer.name)
    entries: list[Entry] = []
    for number in range(3):
        entries.append(writer.append(header_of(number), payload_of(number)))
        assert list(follow(descriptor, 0, FINGERPRINT[:8])) == entries
        assert list(follow(descriptor, entries[-1].offset, FINGERPRINT[:8])) == entries[-1:]
        with pytest.raises(InvalidExtentError, match="not sealed"):
            read_table(descriptor, KEY)
    writer.seal()
    assert read_table(descriptor, KEY).entries == entries
    assert read_table(descriptor, KEY).fingerprint == FINGERPRINT
    assert list(follow(descriptor, 0, FINGERPRINT[:8])) == entries
    assert list(follow(descriptor, 0, bytes(8))) == []
    assert read_records(descriptor) == [0, 1, 2]
    with pytest.raises(InvalidExtentError, match="another key"):
        read_table(descriptor, bytes(32))


def test_golden_bytes_of_a_table(store: StoreDirectory) -> None:
    name, entries = write(store, 2, is_sealed=True)
    data = (store.path / name).read_bytes()[entries[-1].end :]
    assert hashlib.sha256(data).hexdigest() == GOLDEN_TABLE, data.hex()
    size = entries[0].end
    packed = [digest_of(i) + struct.pack("<IIQQ", 0, size - PAYLOAD_BYTES, i * size, PAYLOAD_BYTES) for i in range(2)]
    counts = struct.pack("<QII", 2 * size, 2, 1) + FINGERPRINT
    assert data.startswith(b"".join(packed) + counts)
    assert data.endswith(b"QUIREKVT")
    assert len(data) == 2 * len(packed[0]) + len(counts) + TAG_BYTES + 8


def test_no_byte_of_a_table_may_change_and_none_be_missing(store: StoreDirectory) -> None:
    name, entries = write(store, 2, is_sealed=True)
    descriptor = open_(store, name)
    size = os.fstat(descriptor).st_size
    for offset in range(entries[-1].end, size):
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 1]), offset)
        with pytest.raises(InvalidExtentError):
            read_table(descriptor, KEY)
        os.pwrite(descriptor, bytes([byte]), offset)
    assert read_table(descriptor, KEY).entries == entries
    for length in range(size - 1, -1, -7):
        os.ftruncate(descriptor, length)
        with pytest.raises(InvalidExtentError):
            read_table(descriptor, KEY)


def test_what_a_dead_writer_left_is_cut_at_any_byte_and_sealed(store: StoreDirectory) -> None:
    name, entries = write(store, 3, is_sealed=False)
    content = (store.path / name).read_bytes()
    for length in range(0, len(content) + 1, 5):
        (store.path / name).write_bytes(content[:length])
        descriptor = open_(store, name)
        whole = [entry for entry in entries if entry.end <= length]
        assert seal_orphan(descriptor, KEY, NAMESPACE) == bool(whole)
        if whole:
            assert read_table(descriptor, KEY).entries == whole
            assert seal_orphan(descriptor, KEY, NAMESPACE), "a sealed one stays as it is"
            assert read_table(descriptor, KEY).entries == whole
        os.close(descriptor)


def test_a_torn_last_record_of_full_length_is_cut(store: StoreDirectory) -> None:
    name, entries = write(store, 3, is_sealed=False)
    descriptor = open_(store, name)
    os.pwrite(descriptor, bytes(8), entries[-1].end - 8)
    assert find_damage(descriptor, entries[-1], RecordMac(KEY)) == "mac"
    assert find_damage(descriptor, entries[0], RecordMac(KEY)) is None
    assert seal_orphan(descriptor, KEY, NAMESPACE)
    assert read_table(descriptor, KEY).entries == entries[:2]


def test_a_writer_holds_the_lock_until_it_dies_or_seals(store: StoreDirectory) -> None:
    writer = new_writer(store)
    descriptor = open_(store, writer.name)
    assert not try_lock(descriptor)
    writer.abandon()
    assert try_lock(descriptor)


def test_names_are_never_shared(store: StoreDirectory) -> None:
    first, second = new_writer(store), new_writer(store)
    assert first.name != second.name
    assert (store.path / first.name).stat().st_mode & 0o777 == 0o600


def test_room_counts_the_table(store: StoreDirectory) -> None:
    writer, number = new_writer(store, 2_000), 0
    while writer.has_room(header_of(number)):
        writer.append(header_of(number), payload_of(number))
        number += 1
    writer.seal()
    size = (store.path / writer.name).stat().st_size
    assert number > 2
    assert 2_000 - header_of(0).record_bytes - 56 < size <= 2_000


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, "short"])
def test_a_failed_write_leaves_what_was_there(
    store: StoreDirectory, monkeypatch: pytest.MonkeyPatch, fault: int | str
) -> None:
    writer = new_writer(store)
    writer.append(header_of(0), payload_of(0))
    real, calls = os.pwritev, []

    def pwritev(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            return real(descriptor, [pieces[0][:50]], offset)
        if fault == "short":
            return 0
        raise OSError(fault, "injected")

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(OSError):
        writer.append(header_of(1), payload_of(1))
    monkeypatch.undo()
    writer.append(header_of(2), payload_of(2))
    writer.seal()
    assert read_records(open_(store, writer.name)) == [0, 2]


def test_short_transfers_go_on_where_they_stopped(store: StoreDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write_, read_ = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda d, p, o: write_(d, [p[0][:7]], o))
    monkeypatch.setattr(os, "preadv", lambda d, p, o: read_(d, [p[0][:7]], o))
    name, _ = write(store, 2, is_sealed=True)
    assert read_records(open_(store, name)) == [0, 1]


def test_only_private_regular_files_are_opened(store: StoreDirectory) -> None:
    name, _ = write(store, 1, is_sealed=True)
    (store.path / "link").symlink_to(name)
    os.mkfifo(store.path / "fifo", 0o600)
    (store.path / "folder").mkdir(0o700)
    (store.path / "shared").write_bytes(b"")
    (store.path / "shared").chmod(0o644)
    for each in ("link", "fifo", "folder", "shared", "absent"):
        with pytest.raises(OSError):
            open_extent(store.descriptor, each)
