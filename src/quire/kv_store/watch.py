"""Follows which blocks of one namespace a directory holds, by their digests: for KV cache events.

The index (`index.py`) knows blocks by shorter names, and forgets what cannot be read. This is what is in the files.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import itemgetter

from quire.kv_store.directory import ExtentFile, StoreDirectory
from quire.kv_store.extent import NAMESPACE_DIGITS, Entry, follow
from quire.wire.kv_peers import MAX_CHANGES, Changes, Cursor, RecordName

NAMES_PER_REPORT = 1024

MAX_REMOVED = 1 << 16
"""Number of removed blocks that are remembered, for clients that read on."""

Report = Callable[[list[RecordName], list[RecordName]], None]
"""Takes blocks that are there from now on, and blocks that are not there any more."""


@dataclass
class _Extent:
    """An extent that was read. `end`: offset after its last known record."""

    names: list[RecordName] = field(default_factory=list)
    end: int = 0
    is_sealed: bool = False


class StoreWatcher:
    """The blocks in the extents of a namespace. `index.py:StoreScanner` scans it."""

    def __init__(self, directory: StoreDirectory, fingerprint: bytes, report: Report) -> None:
        self.directory, self._fingerprint, self._report = directory, fingerprint, report
        self._namespace = fingerprint.hex()[:NAMESPACE_DIGITS]
        self._extents: dict[tuple[str, int], _Extent] = {}
        """Extents by name and inode."""
        self._counts = Counter[RecordName]()
        """Number of records of each block."""

    def scan(self) -> None:
        """Reads what was written since the last scan, forgets what is gone, and reports both. Raises OSError."""
        files = [file for file in self.directory.list_extents() if file.namespace == self._namespace]
        was_there: dict[RecordName, bool] = {}
        """Blocks that were touched, and True for those that were there before."""
        present = {(file.name, file.inode) for file in files}
        for key in [key for key in self._extents if key not in present]:
            for name in self._extents.pop(key).names:
                was_there.setdefault(name, True)
                self._counts[name] -= 1
        for file in files:
            extent = self._extents.setdefault((file.name, file.inode), _Extent())
            with contextlib.suppress(OSError):  # deleted since it was listed, or unreadable
                for entry in [] if extent.is_sealed else self._read(file, extent):
                    name = entry.group, entry.digest
                    was_there.setdefault(name, self._counts[name] > 0)
                    extent.names.append(name)
                    self._counts[name] += 1
        added = [name for name, was in was_there.items() if not was and self._counts[name] > 0]
        removed = [name for name, was in was_there.items() if was and not self._counts[name]]
        self._counts = +self._counts if removed else self._counts
        for start in range(0, max(len(added), len(removed)), NAMES_PER_REPORT):
            stop = start + NAMES_PER_REPORT
            self._report(added[start:stop], removed[start:stop])

    def _read(self, file: ExtentFile, extent: _Extent) -> list[Entry]:
        """Returns the records that were not known."""
        table = self.directory.load_table(file)
        if table is None:
            with self.directory.opened(file.name) as descriptor:
                entries = list(follow(descriptor, extent.end, self._fingerprint))
        else:
            extent.is_sealed = True
            is_ours = table.fingerprint == self._fingerprint
            entries = [entry for entry in table.entries if entry.offset >= extent.end] if is_ours else []
        extent.end = entries[-1].end if entries else extent.end
        return entries


class ChangeLog:
    """Blocks of a namespace that were added and removed, each with a number, from which a client reads on. Memory is
    that of the blocks that are there, and of MAX_REMOVED. Callable from any thread.

    Numbers begin with the time, so that those of an earlier log are too old for this one.
    """

    def __init__(self) -> None:
        self._first = self._last = self._oldest = int(time.time() * 1e6)
        """Numbers before the first change, of the last change, and of the last removal that is forgotten."""
        self._numbers: dict[RecordName, int] = {}
        """Numbers of the blocks that are there."""
        self._added: list[tuple[int, RecordName]] = []
        """Blocks that were added, in order; some may have been removed since."""
        self._removed: deque[tuple[int, RecordName]] = deque()
        self._lock = threading.Lock()

    def add(self, added: Sequence[RecordName], removed: Sequence[RecordName]) -> None:
        """Adds changes, the removed blocks first."""
        with self._lock:
            for name in removed:
                self._last += 1
                self._numbers.pop(name, None)
                self._removed.append((self._last, name))
            while len(self._removed) > MAX_REMOVED:
                self._oldest, _ = self._removed.popleft()
            for name in added:
                self._last += 1
                self._numbers[name] = self._last
                self._added.append((self._last, name))
            if len(self._added) > 2 * len(self._numbers) + MAX_CHANGES:
                self._added = [one for one in self._added if self._is_there(one)]

    def read(self, cursor: Cursor) -> Changes:
        """Returns the changes since a cursor. One block may be added again that a client has: that it was removed
        between is left out."""
        with self._lock:
            after, removed_after = cursor
            is_new = after < self._first or removed_after < self._oldest or max(cursor) > self._last
            if is_new:
                after, removed_after = self._first, self._last
            start = bisect_right(self._added, after, key=itemgetter(0))
            later = (self._added[index] for index in range(start, len(self._added)))
            added = list(islice(filter(self._is_there, later), MAX_CHANGES + 1))
            late = takewhile(lambda one: one[0] > removed_after, reversed(self._removed))
            removed = list(late)[::-1][: MAX_CHANGES + 1]
            ends = [one[MAX_CHANGES - 1][0] if len(one) > MAX_CHANGES else self._last for one in (added, removed)]
            return Changes(
                [name for _, name in added[:MAX_CHANGES]],
                [name for _, name in removed[:MAX_CHANGES] if name not in self._numbers],
                (ends[0], ends[1]),
                is_new,
                len(added) > MAX_CHANGES or len(removed) > MAX_CHANGES,
            )

    def _is_there(self, change: tuple[int, RecordName]) -> bool:
        return self._numbers.get(change[1]) == change[0]
