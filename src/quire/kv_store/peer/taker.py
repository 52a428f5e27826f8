"""Takes records that clients put into a directory that is served.

A thread of its own checks and writes: whatever the disk does, blocks are sent meanwhile. What waits for it is bounded
by bytes; beyond them records are refused at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from quire.kv_store.access import StoreWriter
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import NAMESPACE_DIGITS
from quire.kv_store.record import TAG_BYTES, InvalidRecordError, RecordHeader, RecordMac, decode_header
from quire.kv_store.write_limits import SAVED_S, WriteBudget
from quire.logger import init_logger
from quire.wire.kv_peers import DROPPED, RecordName

logger = init_logger(__name__)

MAX_WAITING_BYTES = 256 << 20
"""Most bytes of records that wait to be written."""
MAX_WRITERS = 4
"""Most extents that are open at once: each counts in full. Workers of an engine have one each."""
END_S = 1.0
SLICE_EXTENTS = 8
"""Extents of a namespace that are deleted at once: to delete one takes some milliseconds."""


class _Put(NamedTuple):
    """A record that has arrived."""

    fingerprint: bytes
    """Namespace that the client has named."""
    frames: Sequence[bytes]
    """Header with tag, and the parts of the payload. Empty: there was no memory for it."""
    is_there: Callable[[RecordName], bool]
    report: Callable[[str], None]
    """Takes the outcome, on any thread."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return sum(map(len, self.frames))


class _Drop(NamedTuple):
    """An order to delete all records of a namespace."""

    fingerprint: bytes
    scan: Callable[[], None]
    """Makes the index that is asked forget what is gone."""
    report: Callable[[str], None]


class RecordTaker:
    """Owns the extents that are written. `put` is called on one thread."""

    def __init__(self, directory: StoreDirectory, max_bytes_per_s: int) -> None:
        self._directory, self._mac = directory, RecordMac(directory.key)
        self._budget = WriteBudget(max_bytes_per_s)
        self._writers: dict[bytes, StoreWriter] = {}
        """Writers by fingerprint; the one that was used longest ago first."""
        self._written: dict[tuple[bytes, RecordName], float] = {}
        """Records that were written lately, and when: a scan may not have found them yet. The oldest first."""
        self._drops: dict[bytes, tuple[Iterator[bool], list[_Put | _Drop]]] = {}
        """Drops that have begun, by fingerprint, and the orders for each namespace that wait for their end."""
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()
        self._puts: queue.SimpleQueue[_Put | _Drop | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-put-take", daemon=True)
        self._thread.start()

    def put(
        self,
        fingerprint: bytes,
        frames: Sequence[bytes],
        is_there: Callable[[RecordName], bool],
        report: Callable[[str], None],
    ) -> None:
        """Takes a record in: header with tag, and the parts of its payload. `report` takes the outcome later, of each
        record in order. `is_there` returns whether the directory has a block of this fingerprint."""
        put = _Put(fingerprint, frames, is_there, report)
        with self._lock:
            if self._num_waiting_bytes + put.num_bytes > MAX_WAITING_BYTES:
                put = put._replace(frames=())
            self._num_waiting_bytes += put.num_bytes
        self._puts.put(put)

    def drop(self, fingerprint: bytes, scan: Callable[[], None], report: Callable[[str], None]) -> None:
        """Deletes all records of a fingerprint, those that were put before it too. `scan` is called then, before
        `report` takes the outcome."""
        self._puts.put(_Drop(fingerprint, scan, report))

    def close(self) -> None:
        """Seals what is open. Records that wait are not written. A thread that hangs in a system call is left."""
        self._is_stopping = True
        self._puts.put(None)
        self._thread.join(END_S)

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                order = self._puts.get(timeout=0.0 if self._drops else self._seconds_to_seal())
            except queue.Empty:
                for writer in self._writers.values():
                    writer.seal_if_old()
            else:
                if order is None:
                    break
                self._carry_out(order)
                del order
            if self._drops:
                self._go_on_dropping()
        for writer in self._writers.values():
            writer.seal()

    def _carry_out(self, order: _Put | _Drop) -> None:
        if order.fingerprint in self._drops:
            self._drops[order.fingerprint][1].append(order)
        elif isinstance(order, _Drop):
            self._drops[order.fingerprint] = self._drop(order), []
        else:
            order.report(self._take(order))
            with self._lock:
                self._num_waiting_bytes -= order.num_bytes

    def _seconds_to_seal(self) -> float | None:
        times = [seconds for writer in self._writers.values() if (seconds := writer.seconds_to_seal()) is not None]
        return min(times, default=None)

    def _take(self, put: _Put) -> str:
        """Returns the outcome of a record."""
        if not put.frames:
            return "rate"
        try:
            header = self._check(put)
        except InvalidRecordError as e:
            logger.warning("a record that a client has put is refused: %s", e)
            return e.reason
        except Exception:
            logger.exception("a record that a client has put is refused")
            return "error"
        name = put.fingerprint, (header.group, header.digest)
        self._forget_old()
        if name in self._written or put.is_there(name[1]):
            return "present"
        if not self._budget.take(header.record_bytes):
            return "rate"
        reason = self._writer_of(put.fingerprint).append(header, [memoryview(frame) for frame in put.frames[1:]])
        if not reason:
            self._written[name] = time.monotonic()
        return reason or "stored"

    def _drop(self, order: _Drop) -> Iterator[bool]:
        """Deletes the records of a namespace. Yields between some extents and the next."""
        writer, namespace = self._writers.pop(order.fingerprint, None), order.fingerprint.hex()[:NAMESPACE_DIGITS]
        if writer is not None:
            writer.seal()
        self._written = {name: ts for name, ts in self._written.items() if name[0] != order.fingerprint}
        try:
            names = self._directory.list_namespace(order.fingerprint)
            for first in range(0, len(names), SLICE_EXTENTS):
                for name in names[first : first + SLICE_EXTENTS]:
                    self._directory.remove(name)
                yield True
            order.scan()
        except Exception as e:
            logger.warning("the records of %s are not dropped: %s", namespace, e)
            order.report("error")
        else:
            logger.info("a client has dropped %s: %d extents", namespace, len(names))
            order.report(DROPPED)

    def _go_on_dropping(self) -> None:
        """Deletes some extents, so that records of other namespaces are written in between."""
        fingerprint, (drop, later) = next(iter(self._drops.items()))
        if not next(drop, False):
            del self._drops[fingerprint]
            for order in later:
                self._carry_out(order)

    def _check(self, put: _Put) -> RecordHeader:
        """Returns the header of a record that is one. No length that it names is trusted: they must be those of the
        frames. Raises InvalidRecordError."""
        head, *pieces = [memoryview(frame) for frame in put.frames]
        header = decode_header(head)
        if header.header_bytes + TAG_BYTES != len(head) or header.stored_bytes != sum(map(len, pieces)):
            raise InvalidRecordError("format", "it has other lengths than its header says")
        if header.fingerprint != put.fingerprint:
            raise InvalidRecordError("key", "it is of another namespace than its client's")
        self._mac.check_tag(head, pieces)
        return header

    def _writer_of(self, fingerprint: bytes) -> StoreWriter:
        writer = self._writers.pop(fingerprint, None)
        if writer is None:
            if len(self._writers) >= MAX_WRITERS:
                self._writers.pop(next(iter(self._writers))).seal()
            writer = StoreWriter(self._directory)
        self._writers[fingerprint] = writer  # behind all others
        return writer

    def _forget_old(self) -> None:
        oldest = time.monotonic() - SAVED_S
        while self._written and (first := next(iter(self._written.items())))[1] < oldest:
            del self._written[first[0]]
