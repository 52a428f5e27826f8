"""The records of one namespace in a directory, in memory: a look-up reads no file.

The directory is scanned each second. An entry that leads nowhere, because its extent was deleted since, is a miss. Each
worker of an engine has a namespace of its own, for its part of each block: a block is there if all parts are.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.kv_store.directory import ExtentFile, StoreDirectory
from quire.kv_store.extent import NAMESPACE_DIGITS, Entry, Table, follow
from quire.kv_store.watch import StoreWatcher
from quire.logger import init_logger

logger = init_logger(__name__)

SCAN_INTERVAL_S = 1.0
END_S = 1.0
USE_INTERVAL_S = 60.0
"""An extent's use is noted in the file system at most this often."""
DIGEST_WORDS = 4
_MASK, _SPREAD = (1 << 60) - 1, 0x9E3779B97F4A7C15


class Place(NamedTuple):
    """Position of a record."""

    extent: str
    offset: int


@dataclass
class _Known:
    """An extent that was read. `end`: offset after its last known record."""

    file: ExtentFile
    keys: array[int] = field(default_factory=lambda: array("Q"))
    """Keys (`_key_of`) of a sealed extent's blocks, sorted."""
    offsets: array[int] = field(default_factory=lambda: array("I"))
    """Offsets of the records, parallel to `keys`."""
    recent: dict[int, int] = field(default_factory=dict)
    """Offsets by key, of an open extent."""
    end: int = 0
    is_sealed: bool = False
    noted_ts: float = float("-inf")

    def find(self, key: int) -> int | None:
        """Returns the offset of a block's record."""
        offset = self.recent.get(key)
        if offset is not None:
            return offset
        place = bisect_left(self.keys, key)
        return self.offsets[place] if place < len(self.keys) and self.keys[place] == key else None


class StoreIndex:
    """The records of the namespace of `fingerprint`. `find`, `forget` and `note_use` may be called from any thread."""

    def __init__(self, directory: StoreDirectory, fingerprint: bytes) -> None:
        self.directory, self.fingerprint = directory, fingerprint
        self.num_bytes = 0
        """Bytes of all extents of the directory at the last scan."""
        self._namespace = fingerprint.hex()[:NAMESPACE_DIGITS]
        self._places: dict[int, int] = {}
        """`_key_of` a block to the number of its extent: an object that all of these blocks share."""
        self._known: dict[int, _Known] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        """Name and inode to number."""
        self._next_number = 0
        self._used: set[int] = set()
        self._scan_lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Number of records that can be found."""
        return len(self._places)

    def find(self, digest: bytes, group: int) -> Place | None:
        """Returns where the record of a block is, or None."""
        key = _key_of(digest, group)
        known = self._known.get(self._places.get(key, -1))
        offset = None if known is None else known.find(key)
        return None if known is None or offset is None else Place(known.file.name, offset)

    def contains(self, digest: bytes, group: int) -> bool:
        """Returns whether there is a record of a block."""
        return _key_of(digest, group) in self._places

    def has_none(self, digests: Sequence[bytes], group: int) -> bool:
        """Returns whether there is a record of none of the blocks: `contains` of all, at a tenth of the cost."""
        starts = memoryview(b"".join(digests)).cast("Q")[::DIGEST_WORDS]
        if group:
            keys = [(start ^ group * _SPREAD) & _MASK for start in starts]
        else:
            keys = [start & _MASK for start in starts]
        return self._places.keys().isdisjoint(keys)

    def forget(self, digest: bytes, group: int) -> None:
        """Drops an entry whose record could not be used, so that the block is stored again."""
        self._places.pop(_key_of(digest, group), None)

    def forget_all(self) -> None:
        """Drops all entries. Extents that were read are not read again."""
        self._places.clear()

    def note_use(self, digest: bytes, group: int) -> None:
        """Records that a block was used; the next scan notes it in the file system."""
        number = self._places.get(_key_of(digest, group))
        if number is not None:
            self._used.add(number)

    def scan(self) -> None:
        """Reads what was written since the last scan, and forgets what is gone. Callable from any thread. Raises
        OSError."""
        with self._scan_lock:
            self.take_extents(self.directory.list_extents())

    def take_extents(self, extents: Sequence[ExtentFile]) -> None:
        """Does what `scan` does, with a list of all extents. One thread at a time may call it."""
        files = sorted(extents, key=lambda file: file.written_ns)  # the newest copy is found
        self.num_bytes = sum(file.num_bytes for file in files)
        present = {(file.name, file.inode) for file in files}
        for name_and_inode, number in list(self._numbers.items()):
            if name_and_inode not in present:
                del self._numbers[name_and_inode]
                self._drop(number)
        for file in files:
            with contextlib.suppress(OSError):  # deleted since it was listed, or unreadable
                self._read(file)
        self._write_uses()

    def _read(self, file: ExtentFile) -> None:
        if file.namespace != self._namespace:
            if not self.directory.is_sealed(file):
                self.directory.seal_if_orphan(file)
            return
        number = self._numbers.get((file.name, file.inode))
        if number is None:
            number = self._next_number
            self._next_number += 1
            self._numbers[file.name, file.inode] = number
            self._known[number] = _Known(file)
        known = self._known[number]
        if known.is_sealed:
            return
        table = self.directory.load_table(file)
        if table is not None:
            if table.fingerprint == self.fingerprint:
                self._add_table(number, table)
            known.is_sealed = True
            return
        with self.directory.opened(file.name) as descriptor:
            self._add(number, list(follow(descriptor, known.end, self.fingerprint)))
        self.directory.seal_if_orphan(file)

    def _add(self, number: int, entries: list[Entry]) -> None:
        known = self._known[number]
        for entry in entries:
            key = _key_of(entry.digest, entry.group)
            known.recent[key] = entry.offset
            self._places[key] = number
            known.end = entry.end

    def _add_table(self, number: int, table: Table) -> None:
        """Adds the records of a sealed extent that are not known yet, all at once."""
        import numpy as np  # commands that read no table need not load it

        of_entry = "start", "rest", "group", "head_bytes", "offset", "payload"
        types = "=u8", "V24", "<u4", "<u4", "<u8", "<u8"  # `start`: the first 8 bytes of the digest
        columns = np.frombuffer(table.data, np.dtype(list(zip(of_entry, types, strict=True))))
        known = self._known[number]
        keys = (columns["start"] ^ columns["group"].astype(np.uint64) * np.uint64(_SPREAD)) & np.uint64(_MASK)
        order = np.argsort(keys)
        known.offsets = array("I", columns["offset"][order].astype(np.uint32).tobytes())
        known.keys = array("Q", keys[order].tobytes())
        self._places.update(dict.fromkeys(keys[columns["offset"] >= known.end].tolist(), number))
        known.recent = {}

    def _drop(self, number: int) -> None:
        known = self._known.pop(number)
        for key in (*known.keys, *known.recent):
            if self._places.get(key) == number:
                self._places.pop(key, None)

    def _write_uses(self) -> None:
        now = time.monotonic()
        for number in list(self._used):
            known = self._known.get(number)
            if known is None or now - known.noted_ts < USE_INTERVAL_S:
                continue
            self._used.discard(number)
            known.noted_ts = now
            with contextlib.suppress(OSError):
                self.directory.note_use(known.file, time.time_ns())


class PartsIndex:
    """The blocks of one engine: those of which each of its workers has a record. Methods as of `StoreIndex`."""

    def __init__(self, directory: StoreDirectory, fingerprints: Sequence[bytes]) -> None:
        """`fingerprints`: of the workers, by rank."""
        self.directory = directory
        self.parts = [StoreIndex(directory, fingerprint) for fingerprint in fingerprints]
        self.counts = 0, 0
        """Number of records of the worker that has least, and bytes of all extents of the directory at the last scan:
        the same object until they change, which costs less to see."""
        self._scan_lock = threading.Lock()

    def find(self, digest: bytes, group: int) -> list[Place] | None:
        """Returns where the records of a block are, by rank, or None if one is missing."""
        places = [part.find(digest, group) for part in self.parts]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) else None

    def contains(self, digest: bytes, group: int) -> bool:
        """Returns whether there are all records of a block."""
        if len(self.parts) == 1:  # nearly always; a generator costs more than the look-up
            return self.parts[0].contains(digest, group)
        return all(part.contains(digest, group) for part in self.parts)

    def has_none(self, digests: Sequence[bytes], group: int) -> bool:
        """Returns True if a worker has a record of none of the blocks, so that `contains` is False for all."""
        return any(part.has_none(digests, group) for part in self.parts)

    def forget(self, digest: bytes, group: int) -> None:
        """Drops the entries of a block: which of its records could not be used is not known."""
        for part in self.parts:
            part.forget(digest, group)
        self._count()

    def forget_all(self) -> None:
        """Drops all entries."""
        for part in self.parts:
            part.forget_all()
        self._count()

    def _count(self) -> None:
        counts = min(part.num_blocks for part in self.parts), self.parts[0].num_bytes
        if counts != self.counts:
            self.counts = counts

    def note_use(self, digest: bytes, group: int) -> None:
        """Records that a block was used."""
        for part in self.parts:
            part.note_use(digest, group)

    def scan(self) -> None:
        """Reads what was written since the last scan. Raises OSError."""
        with self._scan_lock:
            extents = self.directory.list_extents()
            for part in self.parts:
                part.take_extents(extents)
            self._count()


def _key_of(digest: bytes, group: int) -> int:
    """Returns the name of a block in the index: a small integer. A record that another block's name leads to is
    rejected when it is read, as any that is not the one that was asked for."""
    return (int.from_bytes(digest[:8], sys.byteorder) ^ group * _SPREAD) & _MASK


class StoreScanner:
    """Scans a directory each second in a thread of its own."""

    def __init__(self, index: StoreIndex | PartsIndex | StoreWatcher, interval_s: float = SCAN_INTERVAL_S) -> None:
        self._index, self._interval_s = index, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-store-scan", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Ends the thread. Returns False if it hangs in a system call: it is left behind."""
        self._stopped.set()
        self._thread.join(END_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        was_readable = True
        while True:
            try:
                self._index.scan()
                was_readable = True
            except OSError as e:
                if was_readable:
                    logger.warning("the KV store %s cannot be read: %s", self._index.directory.path, e.strerror)
                was_readable = False
            if self._stopped.wait(self._interval_s):
                return
