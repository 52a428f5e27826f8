"""Follows which blocks of one namespace a directory holds, by their digests: for KV cache events.

The index (`index.py`) knows blocks by shorter names, and forgets what cannot be read. This is what is in the files.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.kv_store.directory import ExtentFile, StoreDirectory
from quire.kv_store.extent import NAMESPACE_DIGITS, Entry, follow, open_extent
from quire.wire.kv_peers import RecordName

NAMES_PER_REPORT = 1024

Changes = Callable[[list[RecordName], list[RecordName]], None]
"""Takes blocks that are there from now on, and blocks that are not there any more."""


@dataclass
class _Extent:
    """An extent that was read. `end`: offset after its last known record."""

    names: list[RecordName] = field(default_factory=list)
    end: int = 0
    is_sealed: bool = False


class StoreWatcher:
    """The blocks in the extents of a namespace. `index.py:StoreScanner` scans it."""

    def __init__(self, directory: StoreDirectory, fingerprint: bytes, report: Changes) -> None:
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
            descriptor = open_extent(self.directory.descriptor, file.name)
            try:
                entries = list(follow(descriptor, extent.end, self._fingerprint))
            finally:
                os.close(descriptor)
        else:
            extent.is_sealed = True
            is_ours = table.fingerprint == self._fingerprint
            entries = [entry for entry in table.entries if entry.offset >= extent.end] if is_ours else []
        extent.end = entries[-1].end if entries else extent.end
        return entries
