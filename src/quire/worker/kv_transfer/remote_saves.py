"""Puts records to a block server that takes them (`quire kv-store serve --allow-writes`), on a thread of its own.

There are two kinds. An engine without a directory saves blocks there: they are pinned until their save has ended, and
while the server cannot be used the scheduler half orders none. An engine with a directory has written its blocks
already: their records wait in a bounded queue, and are read from the directory when it is their turn. They wait for a
server that is away, too.

Whatever the server does costs a bound: an answer may take SILENCE_S, and a server with a fault rests
(`kv_store/rests.py`). It is tried again without any record. What it has not answered for is put again then: the engine
orders such blocks anew if they are still in memory, and such records go back into their queue. Records at which a
server fails MAX_FAULTS times are given up.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from quire.kv_store.access import RecordBuffer, RecordReader
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.peer.client import PeerClient, PeerConnection, PeerError, Record, retry_stale
from quire.kv_store.record import InvalidRecordError, RecordHeader, RecordMac
from quire.kv_store.rests import MAX_REST_S, Rests
from quire.logger import init_logger
from quire.wire.kv_peers import MAX_KEYS
from quire.wire.kv_transfer import (
    AWAY,
    REMOTE_SAVE_OUTCOMES,
    KVConnectorOutput,
    SaveOrder,
    SaveResult,
)
from quire.worker.kv_transfer.record_worker import lower_priority
from quire.worker.kv_transfer.transfers import LATE_S, PROGRESS_S, Namespace
from quire.worker.kv_transfer.worker import Report, outcome_of

logger = init_logger(__name__)

MAX_COPIES = 1 << 13
"""Most records of a directory that wait to be put."""
MAX_BATCH = 64
"""Most records of a directory that are put at once."""
MAX_FAULTS = 3
"""Faults of the server while records are put, with none that it has taken between them, after which they are not put
again: one of them may be the cause."""
DONE = ("stored", "present")
ServerState = Literal["open", "away", "closed"]
"""open: records are taken. away: it has failed, and is tried again. closed: it takes none."""


class Batch(ABC):
    """Records that are put together. Used by one thread, but for `is_cancelled`."""

    headers: Sequence[RecordHeader]
    is_cancelled = False

    @abstractmethod
    def read(self, index: int) -> Record | None:
        """Returns a record, in memory that is not written any more; None: it is gone."""

    def end(self, outcomes: Sequence[str]) -> None:
        """Takes the outcome of each record."""
        return


class RemoteSave(Batch):
    """A save whose blocks are put from the engine's memory."""

    def __init__(self, order: SaveOrder, namespace: Namespace, mac: RecordMac, report: Report) -> None:
        self.order, self._namespace, self._mac, self._report = order, namespace, mac, report
        self.headers = [namespace.header_of(block.group_id, block.key) for block in order.blocks]
        self.came_at = time.monotonic()

    def cancel(self) -> None:
        """Ends the save soon."""
        self.is_cancelled = True

    def read(self, index: int) -> Record | None:
        header, stored = self._namespace.record_of(self.order.blocks[index])
        head = header.encode()
        return head + self._mac.tag(head, [stored]), stored

    def end(self, outcomes: Sequence[str]) -> None:
        num_saved = next((i for i, outcome in enumerate(outcomes) if outcome not in DONE), len(outcomes))
        reason = outcomes[num_saved] if num_saved < len(outcomes) else ""
        named = {"": "", "pins": "", "full": "full", "rate": "rate", AWAY: AWAY}.get(reason, "error")
        outcome = outcome_of(num_saved, len(outcomes), named)
        result = SaveResult(self.order.save_id, num_saved, outcome, reason=named)
        result.num_present = sum(outcome == "present" for outcome in outcomes[:num_saved])
        result.num_bytes = sum(
            header.record_bytes
            for header, one in zip(self.headers[:num_saved], outcomes, strict=False)
            if one == "stored"
        )
        result.seconds = time.monotonic() - self.came_at
        self._report(KVConnectorOutput(saves=[result]))


class _Copies(Batch):
    """Records of a directory."""

    def __init__(self, directory: StoreDirectory, records: Sequence[tuple[RecordHeader, str, int]]) -> None:
        self.records = records
        self.headers = [header for header, _, _ in records]
        self._reader = RecordReader(directory, RecordMac(directory.key))
        self._buffer = RecordBuffer()

    def read(self, index: int) -> Record | None:
        header, extent, offset = self.records[index]
        try:
            _, head, stored = self._reader.read_stored(extent, offset, header, self._buffer)
        except InvalidRecordError as e:
            logger.debug("a record is not copied: %s", e)
            return None
        return bytes(head), memoryview(bytes(stored))

    def end(self, outcomes: Sequence[str]) -> None:
        self._reader.close()
        self._buffer.close()


@dataclass
class _Counts:
    """Numbers of records."""

    num_waiting: int = 0
    num_begun: int = 0
    """Number since the last report, as the outcomes."""
    outcomes: Counter[str] = field(default_factory=Counter)
    reported_ts: float = float("-inf")


class RemoteSaver:
    """Puts batches of records to one server."""

    def __init__(
        self,
        client: PeerClient,
        address: str,
        directory: StoreDirectory | None,
        report_state: Callable[[ServerState], None],
        report_counts: Callable[[dict[str, Any]], None],
    ) -> None:
        """`directory`: of the records that are copied; None: there are only saves.

        `report_state` takes what the server is from now on. `report_counts` takes the numbers of records that were to
        be put and that have ended by outcome, since the last time, and of those that wait."""
        self._client, self._address, self._directory = client, address, directory
        self._report_state, self._report_counts = report_state, report_counts
        self._rests = Rests()
        self._state: ServerState | None = None
        """None: it was not asked yet."""
        self._fingerprint: bytes | None = None
        """Namespace of the last records; None: none is known."""
        self._saves: deque[RemoteSave] = deque()
        self._copies: deque[tuple[RecordHeader, str, int]] = deque()
        self._batch: _Copies | None = None
        """Records of the directory that are being put."""
        self._counts = _Counts()
        self._num_faults = 0
        """Faults of the server while records were put, since it has taken one."""
        self._lock = threading.Condition()
        """Guards all that other threads touch, and wakes the thread."""
        self._stop_at: float | None = None
        """Time at which everything ends; None: the engine goes on."""
        self._thread = threading.Thread(target=self._run, name="kv-put", daemon=True)
        self._thread.start()

    # -- of other threads --------------------------------------------------------------------------------------

    def begin(self, fingerprint: bytes) -> None:
        """Asks the server whether it takes records of a namespace, and reports its state."""
        with self._lock:
            self._fingerprint, self._state = fingerprint, None
            self._lock.notify()

    def put(self, save: RemoteSave) -> None:
        """Begins a save."""
        with self._lock:
            self._saves.append(save)
            self._counts.num_begun += len(save.headers)
            self._counts.num_waiting += len(save.headers)
            self._lock.notify()

    def copy(self, header: RecordHeader, extent: str, offset: int) -> None:
        """Puts a record that was written to the directory, some time later, unless the server takes none."""
        with self._lock:
            if self._state == "closed":
                return
            self._counts.num_begun += 1
            if len(self._copies) >= MAX_COPIES:
                self._counts.outcomes["rate"] += 1
                return
            self._counts.num_waiting += 1
            self._copies.append((header, extent, offset))
            self._lock.notify()

    def forget_copies(self, deadline: float) -> None:
        """Forgets the records of the directory, and waits until none of them is being put, or until `deadline`: those
        at the server are to be dropped, and none may come after."""
        with self._lock:
            self._counts.outcomes["gone"] += len(self._copies)
            self._counts.num_waiting -= len(self._copies)
            self._copies.clear()
            batch = self._batch
            if batch is not None:
                batch.is_cancelled = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._batch is not batch or batch is None, deadline - time.monotonic())

    def stop(self, deadline: float) -> bool:
        """Ends the thread: until `deadline` it goes on. Returns False if it hangs."""
        with self._lock:
            self._stop_at = deadline if self._stop_at is None else self._stop_at
            self._lock.notify()
        self._thread.join(max(0.1, deadline + 0.1 - time.monotonic()))
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._directory is not None:
            lower_priority()  # no block is pinned meanwhile
        while (task := self._await_task()) is not None:
            task()
            with self._lock:
                self._batch = None
                self._lock.notify_all()
            self._send_counts()
            del task  # it holds the memory of the KV cache, which may be released now

    def _await_task(self) -> Callable[[], None] | None:
        """Returns what is to be done next: a batch is put, or the server is tried. None: the engine ends."""
        with self._lock:
            while True:
                is_awaited = bool(self._saves or (self._copies and self._state != "away"))
                if self._is_over() or (self._stop_at is not None and not is_awaited):
                    return None
                is_open = self._state in ("open", None)
                left = None if is_open else self._rests.seconds_left(self._address, time.monotonic())
                if self._fingerprint is not None and (self._state is None or left == 0.0):
                    return self._try
                if self._saves:
                    return partial(self._put, self._saves.popleft())
                if is_awaited and self._directory is not None:
                    self._batch = self._take_copies(self._directory)
                    return partial(self._put, self._batch)
                self._lock.wait(left)

    def _take_copies(self, directory: StoreDirectory) -> _Copies:
        """Returns the next records, of one namespace. The caller holds the lock."""
        records = [self._copies.popleft()]
        fingerprint = records[0][0].fingerprint
        while self._copies and len(records) < MAX_BATCH and self._copies[0][0].fingerprint == fingerprint:
            records.append(self._copies.popleft())
        return _Copies(directory, records)

    def _is_over(self) -> bool:
        return self._stop_at is not None and time.monotonic() >= self._stop_at

    def _try(self) -> None:
        """Asks what the server is, without a record."""
        assert self._fingerprint is not None
        fingerprint = self._fingerprint
        try:
            with self._client.connect(self._address, fingerprint, is_cancelled=self._is_over) as peer:
                peer.have([])
                takes_records = peer.takes_records
        except PeerError as e:
            if e.reason != "stale":  # a connection from before its restart, of which there are few
                self._note_fault(e)
        else:
            self._set_state("open" if takes_records else "closed")

    def _put(self, batch: Batch) -> None:
        """Puts the records, as far as the server takes them."""
        outcomes, left = [""] * len(batch.headers), "error"
        try:
            if self._state == "closed":
                left = "refused"
            elif self._state == "away":
                left = AWAY
            else:
                left = retry_stale(partial(self._put_all, batch, outcomes))
        except PeerError as e:
            if e.reason == "cancelled":
                left = "pins"
            else:
                left = self._end_put(outcomes)
                self._note_fault(e)
        except Exception:
            logger.exception("records were not put")
        outcomes = [outcome or left for outcome in outcomes]
        ended = self._take_back(batch, outcomes) if isinstance(batch, _Copies) else outcomes
        with self._lock:
            self._counts.outcomes.update(ended)
            self._counts.num_waiting -= len(ended)
        batch.end(outcomes)

    def _end_put(self, outcomes: Sequence[str]) -> str:
        """Returns the outcome of the records that a server with a fault has not answered for."""
        self._num_faults = 1 if "stored" in outcomes else self._num_faults + 1
        if self._num_faults < MAX_FAULTS:
            return AWAY
        self._num_faults = 0
        return "error"

    def _take_back(self, copies: _Copies, outcomes: Sequence[str]) -> list[str]:
        """Puts records that are to be put again back into the queue, before those that came since. Returns the outcomes
        of the others; what there is no room for is the newest. Those that were cancelled are gone."""
        if copies.is_cancelled:
            return ["gone" if outcome in (AWAY, "pins") else outcome for outcome in outcomes]
        back = [record for record, outcome in zip(copies.records, outcomes, strict=True) if outcome == AWAY]
        with self._lock:
            self._copies.extendleft(reversed(back))
            num_dropped = max(0, len(self._copies) - MAX_COPIES)
            for _ in range(num_dropped):
                self._copies.pop()
        return [outcome for outcome in outcomes if outcome != AWAY] + ["rate"] * num_dropped

    def _put_all(self, batch: Batch, outcomes: list[str]) -> str:
        """Sets the outcomes of records that are answered. Returns that of the others. Raises PeerError."""

        def is_cancelled() -> bool:
            return batch.is_cancelled or self._is_over()

        fingerprint = batch.headers[0].fingerprint
        with self._client.connect(self._address, fingerprint, is_cancelled=is_cancelled) as peer:
            if not peer.takes_records:
                self._set_state("closed")
                return "refused"
            wanted = [i for i, outcome in enumerate(outcomes) if not outcome]
            for index in _find_present(peer, batch, wanted):
                outcomes[index] = "present"
            records = self._read(batch, [i for i in wanted if not outcomes[i]], outcomes)
            for index, outcome in peer.put(records):
                outcomes[index] = outcome if outcome in REMOTE_SAVE_OUTCOMES else "error"
            self._rests.note_good(self._address)
        if "stored" in outcomes:
            self._num_faults = 0
        if is_cancelled():
            return "pins"
        return next((outcome for outcome in outcomes if outcome in ("full", "rate", "error")), "rate")

    def _read(self, batch: Batch, wanted: Sequence[int], outcomes: list[str]) -> Iterator[tuple[int, Record]]:
        """Yields the records to be put, up to the first that the server has not taken, or to a cancel."""
        for index in wanted:
            is_late = isinstance(batch, RemoteSave) and time.monotonic() - batch.came_at >= LATE_S and self._saves
            if batch.is_cancelled or is_late or any(one in ("full", "rate", "error") for one in outcomes[:index]):
                return
            record = batch.read(index)
            if record is None:
                outcomes[index] = "gone"
            else:
                yield index, record

    # -- reports -----------------------------------------------------------------------------------------------

    def _note_fault(self, why: object) -> None:
        seconds = self._rests.note_fault(self._address, time.monotonic())
        if self._state != "away":
            logger.warning("nothing is stored at %s for %.0f s: %s", self._address, seconds, why)
        self._set_state("away")

    def _set_state(self, state: ServerState) -> None:
        if state == "closed":
            self._rests.begin(self._address, MAX_REST_S, time.monotonic())
        elif state == "open":
            self._rests.note_good(self._address)
        with self._lock:
            has_changed, self._state = state != self._state, state
        if has_changed:
            if state != "away":
                logger.info("blocks are stored at %s" if state == "open" else "%s takes no blocks", self._address)
            self._report_state(state)

    def _send_counts(self) -> None:
        """Reports the counts: at the end of a run of batches, and now and then in it."""
        now, counts = time.monotonic(), self._counts
        with self._lock:
            goes_on = (self._saves or self._copies) and self._state != "away" and self._stop_at is None
            if (goes_on and now - counts.reported_ts < PROGRESS_S) or not (counts.num_begun or counts.outcomes):
                return
            self._counts = _Counts(counts.num_waiting, reported_ts=now)
        self._report_counts(
            {"begun": counts.num_begun, "outcomes": dict(counts.outcomes), "waiting": counts.num_waiting}
        )


def _find_present(peer: PeerConnection, batch: Batch, wanted: Sequence[int]) -> list[int]:
    """Returns which records the server has. Raises PeerError."""
    present: list[int] = []
    for start in range(0, len(wanted), MAX_KEYS):
        part = wanted[start : start + MAX_KEYS]
        has = peer.have([(batch.headers[i].group, batch.headers[i].digest) for i in part])
        present += [i for i, is_there in zip(part, has, strict=True) if is_there]
    return present
