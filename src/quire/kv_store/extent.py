"""Extents: append-only files of records, `<namespace>-<pid>-<n>.kvx`.

An extent has one writer, which holds its flock. Records follow one another from byte 0, so that an open extent is read
header by header. A full one is *sealed*: a table of its records is appended, under a tag, and nothing after. A scan
that finds an extent without a table and without a writer cuts it behind its last whole record and seals it. Nothing is
synced or renamed: a torn record fails its tag, and what a dead process had written is in the page cache.

::

    record ... record | entries | u64 bytes of records | u32 entries | u32 version | fingerprint (32) | tag (32)
    | magic "QUIREKVT"
    entry = digest (32) | u32 group | u32 bytes of header and tag | u64 offset | u64 bytes of the stored payload
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import itertools
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.failpoints import failpoint
from quire.kv_store.record import (
    MAX_HEADER_BYTES,
    TAG_BYTES,
    InvalidRecordError,
    RecordHeader,
    RecordMac,
    decode_header,
)

SUFFIX = ".kvx"
NAMESPACE_DIGITS = 16
"""Hexadecimal digits of the fingerprint in an extent's name."""
EXTENT_BYTES = 64 << 20
"""Largest extent, table included; also what an open one is taken to need."""
TABLE_MAGIC = b"QUIREKVT"
TABLE_VERSION = 1
_ENTRY = struct.Struct("<32sIIQQ")
_COUNTS = struct.Struct("<QII32s")
TRAILER_BYTES = _COUNTS.size + TAG_BYTES + len(TABLE_MAGIC)
ENTRY_BYTES = _ENTRY.size
MAX_ENTRIES = 1 << 20
_NUMBERS = itertools.count(int(time.time()))
"""Numbers of this process's extents. They begin with the time, so that no name is used again after its deletion."""
_IOV_MAX = 1024
_FIRST_READ = 2048
"""Bytes read to find a header: those of a block of up to 200 tokens."""


class InvalidExtentError(Exception):
    """A file that is no sealed extent of this store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Position of one record."""

    digest: bytes
    group: int
    offset: int
    head_bytes: int
    """Bytes of the header and the tag."""
    stored_bytes: int
    """Bytes of the payload as it is stored."""

    @property
    def end(self) -> int:
        """Offset of the first byte after the record."""
        return self.offset + self.head_bytes + self.stored_bytes


def open_extent(directory: int, name: str, *, is_writable: bool = False) -> int:
    """Returns a descriptor of an extent. Raises OSError; EINVAL for what is no regular file of this user."""
    mode = os.O_RDWR if is_writable else os.O_RDONLY
    flags = mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOATIME
    descriptor = os.open(name, flags, dir_fd=directory)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a private file of this user", name)
    return descriptor


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Takes the flock of a file. Returns False if another has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_into(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Fills `pieces`, one after the other, from `offset` on. Returns the number of bytes: fewer than wanted only at the
    end of the file. Raises OSError."""
    failpoint("kv.read")
    return fill(descriptor, pieces, offset)


def fill(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Does what `read_into` does, without a failpoint."""
    return _transfer(os.preadv, descriptor, pieces, offset)


def write(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Writes `pieces`, one after the other, from `offset` on. Returns the number of bytes. Raises OSError."""
    return _transfer(os.pwritev, descriptor, pieces, offset)


def _transfer(move: Callable[..., int], descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    left, done, first, wanted = list(pieces), 0, 0, sum(map(len, pieces))
    while first < len(left):
        num_bytes = move(descriptor, left[first : first + _IOV_MAX], offset + done)
        done += num_bytes
        if num_bytes == 0 or done == wanted:  # nearly always after the first call
            break
        while first < len(left) and num_bytes >= len(left[first]):
            num_bytes -= len(left[first])
            first += 1
        if num_bytes:
            left[first] = left[first][num_bytes:]
    return done


def read_header(descriptor: int, offset: int) -> RecordHeader:
    """Returns the header of the record at `offset`. Raises OSError and InvalidRecordError."""
    data = os.pread(descriptor, _FIRST_READ, offset)
    try:
        return decode_header(data)
    except InvalidRecordError as e:
        if e.reason != "truncated" or len(data) < _FIRST_READ:
            raise
    return decode_header(os.pread(descriptor, MAX_HEADER_BYTES, offset))


def follow(descriptor: int, start: int, fingerprint_start: bytes) -> Iterator[Entry]:
    """Yields the records of an open extent from `start` on, up to the first that is not whole or of another namespace.
    Raises OSError. Their tags are not checked."""
    size = os.fstat(descriptor).st_size
    while True:
        try:
            header = read_header(descriptor, start)
        except InvalidRecordError:
            return
        entry = _entry_of(header, start)
        if entry.end > size or not header.fingerprint.startswith(fingerprint_start):
            return
        yield entry
        start = entry.end


def _entry_of(header: RecordHeader, offset: int) -> Entry:
    return Entry(header.digest, header.group, offset, header.header_bytes + TAG_BYTES, header.stored_bytes)


@dataclass(frozen=True, slots=True)
class Table:
    """The content of a sealed extent."""

    fingerprint: bytes
    data: bytes
    """Packed entries."""

    @property
    def entries(self) -> list[Entry]:
        """Returns the entries as objects, which takes long for many."""
        return [
            Entry(digest, group, offset, head_bytes, stored_bytes)
            for digest, group, head_bytes, offset, stored_bytes in _ENTRY.iter_unpack(self.data)
        ]


def read_table(descriptor: int, key: bytes) -> Table:
    """Returns the table of a sealed extent. Raises OSError, and InvalidExtentError for a file without a valid one."""
    size = os.fstat(descriptor).st_size
    trailer = os.pread(descriptor, TRAILER_BYTES, max(0, size - TRAILER_BYTES))
    if len(trailer) < TRAILER_BYTES or not trailer.endswith(TABLE_MAGIC):
        raise InvalidExtentError("it is not sealed")
    counts, tag = trailer[: _COUNTS.size], trailer[_COUNTS.size : _COUNTS.size + TAG_BYTES]
    record_bytes, num_entries, version, fingerprint = _COUNTS.unpack(counts)
    if version != TABLE_VERSION or num_entries > MAX_ENTRIES:
        raise InvalidExtentError("its table has another version, or is too long")
    if record_bytes + num_entries * _ENTRY.size + TRAILER_BYTES != size:
        raise InvalidExtentError("its table has another length than its end says")
    data = os.pread(descriptor, num_entries * _ENTRY.size, record_bytes)
    if not hmac.compare_digest(_table_tag(key, data, counts), tag):
        raise InvalidExtentError("the tag of its table is wrong: it is damaged, or of another key")
    return Table(fingerprint, data)


def _table_tag(key: bytes, entries: bytes, counts: bytes) -> bytes:
    return hmac.digest(key, TABLE_MAGIC + entries + counts, "sha256")


def write_table(descriptor: int, key: bytes, fingerprint: bytes, entries: Sequence[Entry]) -> None:
    """Seals an extent: appends the table of `entries` behind the last. Raises OSError."""
    failpoint("kv.seal")
    end = entries[-1].end if entries else 0
    data = b"".join(_ENTRY.pack(e.digest, e.group, e.head_bytes, e.offset, e.stored_bytes) for e in entries)
    counts = _COUNTS.pack(end, len(entries), TABLE_VERSION, fingerprint)
    table = data + counts + _table_tag(key, data, counts) + TABLE_MAGIC
    os.ftruncate(descriptor, end)
    if write(descriptor, [memoryview(table)], end) != len(table):
        raise OSError(errno.ENOSPC, "the table of an extent was not written whole")


def seal_orphan(descriptor: int, key: bytes, namespace: str) -> bool:
    """Seals an extent whose writer died; the caller holds its lock. Returns False if it holds no whole record.

    Records before the last were complete when the last began. The last one is kept if its tag is right.
    """
    try:
        read_table(descriptor, key)
        return True  # sealed since the caller has looked
    except InvalidExtentError:
        pass
    entries = list(follow(descriptor, 0, bytes.fromhex(namespace)))
    mac = RecordMac(key)
    while entries and find_damage(descriptor, entries[-1], mac) is not None:
        entries.pop()
    if not entries:
        return False
    write_table(descriptor, key, read_header(descriptor, 0).fingerprint, entries)
    return True


def find_damage(descriptor: int, entry: Entry, mac: RecordMac) -> str | None:
    """Reads a record. Returns the reason why it may not be used; None: it is whole. Raises OSError."""
    data = memoryview(os.pread(descriptor, entry.end - entry.offset, entry.offset))
    try:
        header = decode_header(data)
        if _entry_of(header, entry.offset) != entry or len(data) != header.record_bytes:
            return "truncated"
        start = header.header_bytes + TAG_BYTES
        mac.check_tag(data[:start], [data[start:]])
    except InvalidRecordError as e:
        return e.reason
    return None


class ExtentWriter:
    """One open extent. Used by one thread. Methods raise OSError."""

    def __init__(self, directory: int, fingerprint: bytes, key: bytes, max_bytes: int) -> None:
        """Creates the file under a new name."""
        self.fingerprint = fingerprint
        self.name, self._descriptor = "", -1
        while self._descriptor < 0:
            self.name = f"{fingerprint.hex()[:NAMESPACE_DIGITS]}-{os.getpid()}-{next(_NUMBERS)}{SUFFIX}"
            self._descriptor = _create(directory, self.name)
        self._key, self._max_bytes = key, max_bytes
        self._mac = RecordMac(key)
        self._entries: list[Entry] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the records."""
        return self._entries[-1].end if self._entries else 0

    @property
    def is_deleted(self) -> bool:
        """True if the file has no name any more: no reader would find what is written."""
        return not os.fstat(self._descriptor).st_nlink

    def has_room(self, header: RecordHeader) -> bool:
        """Returns whether a record, and the table after it, fit."""
        table_bytes = (len(self._entries) + 1) * ENTRY_BYTES + TRAILER_BYTES
        return self.num_bytes + header.record_bytes + table_bytes <= self._max_bytes

    def append(self, header: RecordHeader, payload: Sequence[memoryview]) -> Entry:
        """Writes a record. What was written of one that failed is cut off."""
        head = header.encode()
        offset = self.num_bytes
        entry = _entry_of(header, offset)
        failpoint("kv.write")
        try:
            pieces = [memoryview(head + self._mac.tag(head, payload)), *payload]
            num_bytes = write(self._descriptor, pieces, offset)
            if num_bytes != header.record_bytes:
                raise OSError(errno.EIO, f"{num_bytes} bytes of a record of {header.record_bytes} were written")
        except OSError:
            os.ftruncate(self._descriptor, offset)
            raise
        self._entries.append(entry)
        return entry

    def seal(self) -> None:
        """Appends the table and gives the file up. An extent without records is deleted by the next scan."""
        try:
            if self._entries:
                write_table(self._descriptor, self._key, self.fingerprint, self._entries)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Gives the file up as it is: the next scan seals it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _create(directory: int, name: str) -> int:
    """Returns the descriptor of a new file, locked; -1 if there is one of this name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    except FileExistsError:
        return -1
    if try_lock(descriptor) and os.fstat(descriptor).st_nlink == 1:
        return descriptor
    os.close(descriptor)  # another process took it for an orphan
    return -1
