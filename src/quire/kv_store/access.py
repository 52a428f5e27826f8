"""Reads and writes records: a reader proves them before they are used, a writer rests when it fails."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

from quire.kv_store.codec import decompress
from quire.kv_store.directory import StoreDirectory, StoreFullError
from quire.kv_store.extent import ExtentWriter, fill, open_extent, read_into, write
from quire.kv_store.record import (
    CODEC_RAW,
    TAG_BYTES,
    InvalidRecordError,
    RecordHeader,
    RecordMac,
    stored_bytes_of,
)
from quire.logger import init_logger

logger = init_logger(__name__)

GONE = "gone"
"""Reason for a record whose extent was deleted: a miss, no damage."""


class RecordBuffer:
    """The memory of one thread through which records pass on their way into blocks, and from them.

    A tag over one piece of memory is computed without the interpreter's lock; over the many pieces of a block (keys and
    values of each layer) it is not, and several threads are no faster than one. So a record is read into one piece, and
    a block is copied into one before it is written. That is a file in memory (memfd), from and to which the system
    copies all pieces of a block in one call, without the lock.
    """

    def __init__(self) -> None:
        self._file = -1
        self._memory: mmap.mmap | None = None

    def take(self, num_bytes: int) -> memoryview:
        """Returns its first bytes. What was taken before must not be used any more."""
        if self._memory is None or len(self._memory) < num_bytes:
            self.close()
            size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if hasattr(os, "memfd_create"):
                self._file = os.memfd_create("kv-record", os.MFD_CLOEXEC)
                os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        return memoryview(self._memory)[:num_bytes]

    def copy_to(self, start: int, pieces: Sequence[memoryview]) -> None:
        """Fills `pieces`, one after the other, from its byte `start` on."""
        assert self._memory is not None, "a record was read"
        if self._file >= 0:
            fill(self._file, pieces, start)
            return
        for piece in pieces:
            piece[:] = self._memory[start : start + len(piece)]
            start += len(piece)

    def copy_from(self, pieces: Sequence[memoryview]) -> memoryview:
        """Returns a copy of `pieces`, one after the other, at its start."""
        copied = self.take(sum(map(len, pieces)))
        if self._file >= 0:
            write(self._file, pieces, 0)
            return copied
        start = 0
        for piece in pieces:
            copied[start : start + len(piece)] = piece
            start += len(piece)
        return copied

    def close(self) -> None:
        """Gives the memory back."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._memory = -1, None


class RecordReader:
    """Reads from the extents of one directory, which it keeps open until `close`. Any number of threads may read."""

    def __init__(self, directory: StoreDirectory, mac: RecordMac) -> None:
        self._directory, self._mac = directory, mac
        self.num_records = 0
        """Records that were read, whole, in part or with an error."""
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, extent: str, offset: int, header: RecordHeader, buffer: RecordBuffer) -> int:
        """Reads the record at `offset`, which must be the one of `header`, into `buffer`. Returns where its payload, as
        it is in memory, begins there. Raises InvalidRecordError."""
        codec, head, stored = self.read_stored(extent, offset, header, buffer)
        if codec == CODEC_RAW:
            return len(head)
        payload = decompress(stored, header.payload_bytes)
        buffer.take(len(payload))[:] = payload
        return 0

    def read_stored(
        self, extent: str, offset: int, header: RecordHeader, buffer: RecordBuffer
    ) -> tuple[int, memoryview, memoryview]:
        """Reads a record as `read` does, and decompresses nothing. Returns its codec, its header with tag, and its
        payload as it is stored."""
        record = buffer.take(header.record_bytes)
        try:
            num_bytes = read_into(self._open(extent), [record], offset)
        except FileNotFoundError:
            raise InvalidRecordError(GONE, f"{extent} was deleted") from None
        except OSError as e:
            self._count()
            raise InvalidRecordError("io", f"{extent} cannot be read: {e.strerror}") from None
        self._count()
        start = header.header_bytes + TAG_BYTES
        end = start + stored_bytes_of(record) if num_bytes >= start else len(record) + 1
        if num_bytes < end:
            raise InvalidRecordError("truncated", f"{extent} ends within the record at {offset}")
        head, stored = record[:start], record[start:end]
        return self._mac.check(header, head, [stored]), head, stored

    def _count(self) -> None:
        with self._lock:
            self.num_records += 1

    def _open(self, extent: str) -> int:
        with self._lock:
            descriptor = self._descriptors.get(extent)
            if descriptor is None:
                descriptor = self._descriptors[extent] = open_extent(self._directory.descriptor, extent)
            return descriptor

    def close(self) -> None:
        """Closes the extents. No thread may read."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()


OPEN_S = 600.0
"""Age at which an extent is sealed."""
REST_S = 60.0
"""Time without writes after the disk was full, or failed."""
BUSY_REST_S = 1.0
"""Time without writes while another process makes room."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreWriter:
    """The writer of one process. Used by one thread; it raises nothing."""

    def __init__(self, directory: StoreDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._extent: ExtentWriter | None = None
        self._seal_ts = 0.0
        self._rest_ts = float("-inf")
        self._rest_reason = ""
        self.last_place = "", 0
        """Extent of the last record that was written, and its offset there."""

    def append(self, header: RecordHeader, payload: Sequence[memoryview]) -> str:
        """Writes a record. Returns the reason if it was not written: full, error, or format if it is too large; ""."""
        if self._clock() < self._rest_ts:
            return self._rest_reason
        try:
            if self._extent is not None and self._extent.is_deleted:
                self._abandon()
            if self._extent is not None and not self._fits(self._extent, header):
                self._seal()
            if self._extent is None:
                self._extent = self._directory.create_extent(header.fingerprint)
                self._seal_ts = self._clock() + OPEN_S
                if not self._extent.has_room(header):
                    return "format"
            self.last_place = self._extent.name, self._extent.append(header, payload).offset
        except InvalidRecordError:
            return "format"
        except StoreFullError as e:
            return self._rest(e, "full", BUSY_REST_S if e.errno == errno.EAGAIN else REST_S)
        except OSError as e:
            self._abandon()
            if e.errno not in _NO_SPACE:
                return self._rest(e, "error", REST_S)
            with contextlib.suppress(OSError), self._directory.locked():
                self._directory.make_room(self._directory.extent_bytes)
            return self._rest(e, "full", REST_S)
        return ""

    def seconds_to_seal(self) -> float | None:
        """Returns the time after which `seal_if_old` has something to do; None: there is no open extent."""
        return None if self._extent is None else max(0.0, self._seal_ts - self._clock())

    def seal_if_old(self) -> None:
        """Seals an extent that has been open for long, so that its size no longer counts in full."""
        if self.seconds_to_seal() == 0.0:
            self.seal()

    def seal(self) -> None:
        """Seals the open extent, if there is one: at the end, or for another namespace."""
        try:
            self._seal()
        except OSError as e:
            self._rest(e, "error", REST_S)

    def _fits(self, extent: ExtentWriter, header: RecordHeader) -> bool:
        return extent.fingerprint == header.fingerprint and extent.has_room(header)

    def _seal(self) -> None:
        extent, self._extent = self._extent, None
        if extent is not None:
            extent.seal()

    def _abandon(self) -> None:
        extent, self._extent = self._extent, None
        if extent is not None:
            extent.abandon()

    def _rest(self, error: OSError, reason: str, seconds: float) -> str:
        if seconds >= REST_S:
            why = error.strerror or error
            if error.errno == errno.ENOENT:
                why = "its directory was deleted; start the server again, which makes it anew"
            logger.warning("the KV store %s is not written to for %.0f s: %s", self._directory.path, seconds, why)
        self._rest_ts, self._rest_reason = self._clock() + seconds, reason
        return reason
