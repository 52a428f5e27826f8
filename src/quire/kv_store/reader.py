"""Reads records into the memory of their blocks, and proves them before they are used."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import open_extent, read_into
from quire.kv_store.record import TAG_BYTES, InvalidRecordError, RecordHeader, RecordMac

GONE = "gone"
"""Reason for a record whose extent was deleted: a miss, no damage."""


class RecordReader:
    """Reads from the extents of one directory, which it keeps open until `close`. Any number of threads may read."""

    def __init__(self, directory: StoreDirectory, mac: RecordMac) -> None:
        self._directory, self._mac = directory, mac
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, extent: str, offset: int, header: RecordHeader, payload: Sequence[memoryview]) -> None:
        """Fills `payload` with that of the record at `offset`, which must be the one of `header`.

        Raises InvalidRecordError: the memory may then hold anything.
        """
        try:
            descriptor = self._open(extent)
            expected = header.encode()
            head = memoryview(bytearray(len(expected) + TAG_BYTES))
            num_bytes = read_into(descriptor, [head, *payload], offset)
        except FileNotFoundError:
            raise InvalidRecordError(GONE, f"{extent} was deleted") from None
        except OSError as e:
            raise InvalidRecordError("io", f"{extent} cannot be read: {e.strerror}") from None
        if num_bytes != header.record_bytes:
            raise InvalidRecordError("truncated", f"{extent} ends within the record at {offset}")
        self._mac.check(expected, head[:-TAG_BYTES], head[-TAG_BYTES:], payload)

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
