"""Loads and saves of the store: records to blocks of the KV cache, and back. A record passes through a buffer of its
thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from quire.kv_store.access import GONE, RecordBuffer, RecordReader, StoreWriter
from quire.kv_store.codec import compress
from quire.kv_store.record import CODEC_PLANES, InvalidRecordError, RecordHeader, make_header, seal_extra_keys
from quire.logger import init_logger
from quire.wire.kv_transfer import (
    BlockKey,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SaveOrder,
    SaveResult,
)
from quire.worker.kernels.packs import commit_memory
from quire.worker.kv_cache import KVCacheMemory
from quire.worker.kv_transfer.worker import Report, outcome_of

logger = init_logger(__name__)

LATE_S = 2.0
"""Age at which a save gives way to those that wait behind it: the store is slower than the engine."""
HURRY_S = 0.2
"""Age from which on a save does not give way to the engine any more."""
PROGRESS_S = 0.25
"""A load that goes on for longer is reported so often."""
NO_PLACE = -1
COMMITTED, MIN_RUN = 256, 16
"""Positions of a load whose memory is mapped at once, and blocks that must follow one another in memory for it."""
Written = Callable[[RecordHeader, str, int], None]
"""Takes a record that was written: its header, extent and offset there."""


class BlockBytes:
    """The bytes of all blocks, by group."""

    def __init__(
        self, parts: list[list[npt.NDArray[np.uint8]]], element_bytes: Mapping[int, int] | None = None
    ) -> None:
        """`parts`, per group: `AttentionBackend.block_views` of each layer in order. `element_bytes`, of a group's
        index: of a number in its blocks."""
        self._parts = parts
        self._element_bytes = element_bytes or {}
        self.payload_bytes = [sum(part.shape[1] for part in group) for group in parts]
        """Bytes of a block, per group."""
        self._memory = [
            [
                (size, [part.reshape(-1).data for part in alike])
                for size, alike in groupby(group, key=lambda part: part.shape[1])
            ]
            if all(part.flags.c_contiguous for part in group)
            else None
            for group in parts
        ]
        """Bytes of a part in a block, and the memory of all parts with as many that follow one another: cutting one
        slice from each takes a third of the time of rows. None: not in one piece."""

    @staticmethod
    def of_memory(memory: KVCacheMemory) -> BlockBytes:
        """Returns the bytes of a KV cache."""
        parts: list[list[npt.NDArray[np.uint8]]] = [[] for _ in memory.specs]
        for name, group in memory.layer_groups.items():
            parts[group] += memory.backend.block_views(memory.caches[name])
        sizes = {group: memory.caches[name].key.element_size() for name, group in memory.layer_groups.items()}
        return BlockBytes(parts, sizes)

    def pieces(self, group: int, block_id: int) -> list[memoryview]:
        """Returns the memory of one block of a group: keys and values of each layer in order."""
        memory = self._memory[group]
        if memory is None:
            return [part[block_id].data for part in self._parts[group]]
        pieces: list[memoryview] = []
        for size, parts in memory:
            place = slice(block_id * size, (block_id + 1) * size)
            pieces += [data[place] for data in parts]
        return pieces

    def commit(self, group: int, block_ids: Sequence[int]) -> None:
        """Has the system map the memory of blocks that are about to be written, of each run of them in one call: a page
        at a time takes several times as long, and two threads wait for each other."""
        memory = self._memory[group]
        if memory is None:
            return
        for _, run in groupby(enumerate(block_ids), key=lambda place: place[1] - place[0]):
            ids = [block_id for _, block_id in run]
            if len(ids) >= MIN_RUN:
                for size, parts in memory:
                    for data in parts:
                        commit_memory(data[ids[0] * size : (ids[-1] + 1) * size])

    def copy_in(self, group: int, block_id: int, payload: memoryview) -> None:
        """Sets the bytes of one block of a group: keys and values of each layer in order."""
        start = 0
        for piece in self.pieces(group, block_id):
            piece[:] = payload[start : start + len(piece)]
            start += len(piece)

    def copy_out(self, group: int, block_id: int) -> memoryview:
        """Returns a copy of the bytes of one block of a group. A stage without layers of the group has none."""
        return memoryview(b"".join(self.pieces(group, block_id)))

    def compress(self, group: int, payload: memoryview) -> bytes | None:
        """Returns a block's bytes, compressed; None: they do not become less."""
        return compress(payload, self._element_bytes.get(group, 1))


class Namespace:
    """Makes the records of one fingerprint, and of one memory."""

    def __init__(self, fingerprint: bytes, key: bytes, blocks: BlockBytes, *, compresses: bool = False) -> None:
        """`compresses`: payloads are stored with codec 1 if that makes them smaller."""
        self.fingerprint, self.blocks = fingerprint, blocks
        self._key, self._compresses = key, compresses

    def header_of(self, group: int, key: BlockKey) -> RecordHeader:
        """Returns the header that the record of a block has."""
        extra_keys = seal_extra_keys(self._key, key.extra_keys)
        size = self.blocks.payload_bytes[group]
        return make_header(self.fingerprint, key.digest, key.parent, group, key.token_ids, size, extra_keys)

    def record_of(self, block: SavedBlock, buffer: RecordBuffer | None = None) -> tuple[RecordHeader, memoryview]:
        """Returns the header of a block's record, and a copy of its payload as it is stored: in `buffer`, until that is
        used again, or in memory of its own."""
        header, place = self.header_of(block.group_id, block.key), (block.group_id, block.block_id)
        payload = self.blocks.copy_out(*place) if buffer is None else buffer.copy_from(self.blocks.pieces(*place))
        stored = self.blocks.compress(block.group_id, payload) if self._compresses else None
        if stored is None:
            return header, payload
        return replace(header, codec=CODEC_PLANES, compressed_bytes=len(stored)), memoryview(stored)


@dataclass
class _Positions:
    """The positions of a load that are being read, and will be."""

    stop: int
    """First position that is not read: the end, or one that cannot be used."""
    next: int = 0
    taken: set[int] = field(default_factory=set)
    """Positions that are being read."""
    reason: str = ""
    """Reason for which position `stop` cannot be used."""

    @property
    def num_verified(self) -> int:
        """Leading positions that were read."""
        return min(min(self.taken, default=self.next), self.stop)

    def take(self) -> int | None:
        """Returns the next position to read; None: there is none."""
        if self.next >= self.stop:
            return None
        self.taken.add(self.next)
        self.next += 1
        return self.next - 1

    def end(self, position: int, reason: str) -> None:
        """Notes that a position was read; `reason`: for which it cannot be used."""
        self.taken.discard(position)
        if reason and position < self.stop:
            self.stop, self.reason = position, reason


class Load:
    """A load that several threads share. Positions are taken in order; the first that fails ends it."""

    def __init__(
        self, order: LoadOrder, rank: int, namespace: Namespace | None, reader: RecordReader, report: Report
    ) -> None:
        """`rank`: the worker, whose part of each block is read."""
        self.order = order
        self._namespace, self._reader, self._report = namespace, reader, report
        self._lock = threading.Lock()
        self._positions = _Positions(len(order.keys))
        self._num_active = 0
        self._is_cancelled = self._is_reported = False
        self._num_bytes, self._start_ts, self._progress_ts = 0, 0.0, 0.0
        self._num_accepted, self._num_rejected = 0, Counter[str]()
        parts = (order.params or {}).get("parts", ())
        part = parts[rank] if rank < len(parts) else {}
        self._extents: Sequence[str] = part.get("extents", ())
        self._places: Sequence[Sequence[int]] = part.get("places", ())
        """Per group, of each position: the extent's index and the offset in it, or NO_PLACE."""

    def run_share(self, buffer: RecordBuffer) -> None:
        """Reads positions until there are none left; each record by way of `buffer`."""
        with self._lock:
            if self._is_reported:
                return
            self._num_active += 1
            if not self._start_ts:
                self._start_ts = self._progress_ts = time.monotonic()
        while (position := self._take()) is not None:
            if position % COMMITTED == 0 and self._namespace is not None:
                for group, block_ids in enumerate(self.order.block_ids):
                    self._namespace.blocks.commit(group, block_ids[position : position + COMMITTED])
            self._note_read(position, self._read(position, buffer))
        with self._lock:
            self._num_active -= 1
            self._finish_if_idle()

    def cancel(self) -> None:
        """Ends the load after the positions that are being read."""
        with self._lock:
            self._is_cancelled = True
            self._finish_if_idle()

    def _take(self) -> int | None:
        with self._lock:
            return None if self._is_cancelled else self._positions.take()

    def _note_read(self, position: int, reason: str) -> None:
        """Notes that a position was read; `reason`: for which it cannot be used."""
        now = time.monotonic()
        with self._lock:
            self._positions.end(position, reason)
            if now - self._progress_ts < PROGRESS_S:
                return
            self._progress_ts = now
            num_verified = self._positions.num_verified
        self._report(KVConnectorOutput(progress={self.order.load_id: num_verified}))

    def _read(self, position: int, buffer: RecordBuffer) -> str:
        """Reads the blocks of a position. Returns the reason for which they cannot be used, or ""."""
        key, namespace = self.order.keys[position], self._namespace
        if namespace is None:
            return "key"
        is_proven = False
        try:
            for group, block_ids in enumerate(self.order.block_ids):
                if block_ids[position]:
                    start = self._read_record(namespace, group, position, buffer)
                    buffer.copy_to(start, namespace.blocks.pieces(group, block_ids[position]))
                    is_proven = True
            if not is_proven:
                self._prove_identity(namespace, position, buffer)
        except InvalidRecordError as e:
            logger.debug("block %s of load %d: %s", key.digest.hex()[:16], self.order.load_id, e)
            return e.reason
        except Exception:
            logger.exception("load %d failed", self.order.load_id)
            return "io"
        return ""

    def _prove_identity(self, namespace: Namespace, position: int, buffer: RecordBuffer) -> None:
        """Compares the record of a block that no group needs. Raises InvalidRecordError."""
        for group, places in enumerate(self._places):
            if places[position] != NO_PLACE:
                self._read_record(namespace, group, position, buffer)
                return
        raise InvalidRecordError(GONE, "no record proves the block")

    def _read_record(self, namespace: Namespace, group: int, position: int, buffer: RecordBuffer) -> int:
        """Reads a group's record. Returns where its payload begins in `buffer`. Raises InvalidRecordError."""
        place = self._places[group][position]
        if place == NO_PLACE:
            raise InvalidRecordError(GONE, "the record is not in the index any more")
        header = namespace.header_of(group, self.order.keys[position])
        try:
            start = self._reader.read(self._extents[place >> 32], place & 0xFFFFFFFF, header, buffer)
        except InvalidRecordError as e:
            with self._lock:
                self._num_rejected[e.reason] += e.reason != GONE
            raise
        with self._lock:
            self._num_accepted += 1
            self._num_bytes += header.record_bytes
        return start

    def _finish_if_idle(self) -> None:
        """Reports the end once no thread reads, and none will. The caller holds the lock."""
        positions = self._positions
        is_over = self._is_cancelled or positions.next >= positions.stop
        if self._num_active or self._is_reported or not is_over:
            return
        self._is_reported = True
        self._reader.close()
        num_verified, reason = positions.num_verified, positions.reason
        outcome = outcome_of(num_verified, len(self.order.keys), reason)
        seconds = time.monotonic() - self._start_ts if self._start_ts else 0.0
        result = LoadResult(self.order.load_id, num_verified, outcome, self._num_bytes, seconds, reason)
        result.num_records, result.num_accepted = self._reader.num_records, self._num_accepted
        result.num_rejected = dict(+self._num_rejected)
        self._report(KVConnectorOutput(loads=[result]))


class Save:
    """A save. Blocks are written in order."""

    def __init__(self, order: SaveOrder, namespace: Namespace | None, report: Report, on_written: Written) -> None:
        self.order = order
        self._namespace, self._report, self._on_written = namespace, report, on_written
        self._is_cancelled = False
        self._came_at = time.monotonic()
        self._num_saved = self._num_bytes = 0
        self._seconds = 0.0

    def cancel(self) -> None:
        """Ends the save after the block that is being written."""
        self._is_cancelled = True

    def run(
        self,
        writer: StoreWriter,
        buffer: RecordBuffer,
        is_awaited: Callable[[], bool] = lambda: False,
        *,
        is_patient: bool = False,
    ) -> bool:
        """Writes the blocks and reports the end. `is_awaited`: returns whether another save waits for this one.

        Returns False, without a report, if `is_patient` and the save is too old for that: it is to be run again, on a
        thread that is not."""
        start_ts = time.monotonic()
        reason = "" if self._namespace is not None else "error"
        for index in range(self._num_saved, len(self.order.blocks)):
            if self._is_cancelled or self._namespace is None:
                break
            age = time.monotonic() - self._came_at
            if age >= LATE_S and is_awaited():
                reason = "rate"
                break
            if is_patient and age >= HURRY_S:
                self._seconds += time.monotonic() - start_ts
                return False
            try:
                header, stored = self._namespace.record_of(self.order.blocks[index], buffer)
                reason = writer.append(header, [stored])
            except Exception:
                logger.exception("save %d failed", self.order.save_id)
                reason = "error"
            if reason:
                break
            self._on_written(header, *writer.last_place)
            self._num_saved += 1
            self._num_bytes += header.record_bytes
        self._seconds += time.monotonic() - start_ts
        self._report_end(reason)
        return True

    def _report_end(self, reason: str) -> None:
        num_saved = self._num_saved
        outcome = outcome_of(num_saved, len(self.order.blocks), reason)
        result = SaveResult(self.order.save_id, num_saved, outcome, self._num_bytes, self._seconds, reason)
        self._report(KVConnectorOutput(saves=[result]))
