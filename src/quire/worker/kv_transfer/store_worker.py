"""The worker half of the store: moves the bytes of blocks between the KV cache and files of a directory.

Nothing is copied on the way: files are read into blocks and written from them, layer by layer. Loads have a few threads
and are shared among them position by position; saves have one, of low priority. A namespace (fingerprint) is computed
in the background; until the report with it nothing is asked for.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.config.engine import EngineConfig
from quire.failpoints import failpoint
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.fingerprint import ChangedFileError, FileDigests, HashingStoppedError
from quire.kv_store.reader import RecordReader
from quire.kv_store.record import InvalidRecordError, RecordHeader, RecordMac, make_header, seal_extra_keys
from quire.kv_store.writer import StoreWriter
from quire.logger import init_logger
from quire.wire.kv_transfer import (
    BlockKey,
    KVConnectorMetadata,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SaveOrder,
    SaveResult,
    TransferOutcome,
)
from quire.worker.kv_cache import KVCacheMemory
from quire.worker.kv_transfer.identity import compute_fingerprint
from quire.worker.kv_transfer.worker import KVConnectorWorker, Report

logger = init_logger(__name__)

SAVE_NICENESS = 10
PROGRESS_S = 0.25
"""A load that goes on for longer is reported so often."""
END_S = 1.0
"""Seconds that saves which were ordered are given when the engine ends."""
KNOWN_S = 0.5
"""Time to wait for a namespace: enough where the weights were hashed before, so that the first request finds blocks."""
NO_PLACE = -1


class BlockBytes:
    """The bytes of all blocks, by group."""

    def __init__(self, memory: KVCacheMemory) -> None:
        self._parts: list[list[npt.NDArray[np.uint8]]] = [[] for _ in memory.specs]
        for name, group in memory.layer_groups.items():
            self._parts[group] += memory.backend.block_views(memory.caches[name])
        self.payload_bytes = [sum(part.shape[1] for part in parts) for parts in self._parts]
        """Bytes of a block, per group."""

    def views(self, group: int, block_id: int) -> list[memoryview]:
        """Returns the bytes of one block of a group: keys and values of each layer in order."""
        return [part[block_id].data for part in self._parts[group]]


class Namespace:
    """Makes the headers of records of one fingerprint, and of one memory."""

    def __init__(self, fingerprint: bytes, key: bytes, blocks: BlockBytes) -> None:
        self.fingerprint, self.blocks = fingerprint, blocks
        self._key = key

    def header_of(self, group: int, key: BlockKey) -> RecordHeader:
        """Returns the header that the record of a block has."""
        extra_keys = seal_extra_keys(self._key, key.extra_keys)
        size = self.blocks.payload_bytes[group]
        return make_header(self.fingerprint, key.digest, key.parent, group, key.token_ids, size, extra_keys)


class _Load:
    """A load that several threads share. Positions are taken in order; the first that fails ends it."""

    def __init__(self, order: LoadOrder, namespace: Namespace | None, reader: RecordReader, report: Report) -> None:
        self.order = order
        self._namespace, self._reader, self._report = namespace, reader, report
        self._lock = threading.Lock()
        self._next, self._stop = 0, len(order.keys)
        """Next position to take, and the first that is not taken: the end, or one that failed."""
        self._taken: set[int] = set()
        """Positions that are being read."""
        self._num_active = 0
        self._is_cancelled = self._is_reported = False
        self._reason = ""
        self._num_bytes, self._start_ts, self._progress_ts = 0, 0.0, 0.0
        params = order.params or {}
        self._extents: Sequence[str] = params.get("extents", ())
        self._places: Sequence[Sequence[int]] = params.get("places", ())
        """Per group, of each position: the extent's index and the offset in it, or NO_PLACE."""

    def run_share(self) -> None:
        """Reads positions until there are none left."""
        with self._lock:
            if self._is_reported:
                return
            self._num_active += 1
            if not self._start_ts:
                self._start_ts = self._progress_ts = time.monotonic()
        while (position := self._take()) is not None:
            self._note_read(position, self._read(position))
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
            if self._is_cancelled or self._next >= self._stop:
                return None
            self._next += 1
            self._taken.add(self._next - 1)
            return self._next - 1

    def _note_read(self, position: int, reason: str) -> None:
        """Notes that a position was read; `reason`: for which it cannot be used."""
        now = time.monotonic()
        with self._lock:
            self._taken.discard(position)
            if reason and position < self._stop:
                self._stop, self._reason = position, reason
            if now - self._progress_ts < PROGRESS_S:
                return
            self._progress_ts = now
            num_verified = min(min(self._taken, default=self._next), self._stop)
        self._report(KVConnectorOutput(progress={self.order.load_id: num_verified}))

    def _read(self, position: int) -> str:
        """Reads the blocks of a position. Returns the reason for which they cannot be used, or ""."""
        key, namespace = self.order.keys[position], self._namespace
        if namespace is None:
            return "key"
        is_proven = False
        try:
            for group, block_ids in enumerate(self.order.block_ids):
                if block_ids[position]:
                    self._read_block(namespace, group, position, namespace.blocks.views(group, block_ids[position]))
                    is_proven = True
            if not is_proven:
                self._prove_identity(namespace, position)
        except InvalidRecordError as e:
            logger.debug("block %s of load %d: %s", key.digest.hex()[:16], self.order.load_id, e)
            return e.reason
        except Exception:
            logger.exception("load %d failed", self.order.load_id)
            return "io"
        return ""

    def _prove_identity(self, namespace: Namespace, position: int) -> None:
        """Compares the record of a block that no group needs. Raises InvalidRecordError."""
        for group, places in enumerate(self._places):
            if places[position] != NO_PLACE:
                size = namespace.blocks.payload_bytes[group]
                self._read_block(namespace, group, position, [memoryview(bytearray(size))])
                return
        raise InvalidRecordError("gone", "no record proves the block")

    def _read_block(self, namespace: Namespace, group: int, position: int, views: Sequence[memoryview]) -> None:
        place = self._places[group][position]
        if place == NO_PLACE:
            raise InvalidRecordError("gone", "the record is not in the index any more")
        header = namespace.header_of(group, self.order.keys[position])
        self._reader.read(self._extents[place >> 32], place & 0xFFFFFFFF, header, views)
        with self._lock:
            self._num_bytes += header.record_bytes

    def _finish_if_idle(self) -> None:
        """Reports the end once no thread reads, and none will. The caller holds the lock."""
        is_over = self._is_cancelled or self._next >= self._stop
        if self._num_active or self._is_reported or not is_over:
            return
        self._is_reported = True
        self._reader.close()
        num_verified = min(self._next, self._stop)
        outcome: TransferOutcome = "ok"
        if self._reason:
            outcome = "partial" if num_verified else "failed"
        elif num_verified < len(self.order.keys):
            outcome = "cancelled"
        seconds = time.monotonic() - self._start_ts if self._start_ts else 0.0
        result = LoadResult(self.order.load_id, num_verified, outcome, self._num_bytes, seconds, self._reason)
        self._report(KVConnectorOutput(loads=[result]))


class _Save:
    """A save. Blocks are written in order."""

    def __init__(self, order: SaveOrder, namespace: Namespace | None, report: Report) -> None:
        self.order = order
        self._namespace, self._report = namespace, report
        self._is_cancelled = False

    def cancel(self) -> None:
        """Ends the save after the block that is being written."""
        self._is_cancelled = True

    def run(self, writer: StoreWriter) -> None:
        """Writes the blocks and reports the end."""
        start_ts = time.monotonic()
        num_saved, num_bytes, reason = 0, 0, "" if self._namespace is not None else "error"
        for block in self.order.blocks:
            if self._is_cancelled or self._namespace is None:
                break
            try:
                header = self._namespace.header_of(block.group_id, block.key)
                reason = writer.append(header, self._namespace.blocks.views(block.group_id, block.block_id))
            except Exception:
                logger.exception("save %d failed", self.order.save_id)
                reason = "error"
            if reason:
                break
            num_saved += 1
            num_bytes += header.record_bytes
        outcome: TransferOutcome = "ok"
        if reason:
            outcome = "partial" if num_saved else "failed"
        elif num_saved < len(self.order.blocks):
            outcome = "cancelled"
        seconds = time.monotonic() - start_ts
        result = SaveResult(self.order.save_id, num_saved, outcome, num_bytes, seconds, reason)
        self._report(KVConnectorOutput(saves=[result]))


class StoreWorker(KVConnectorWorker):
    """Reads and writes the records of a directory. `start` and `close` are called by the worker's thread."""

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self._identity: KVConnectorOutput | None = None
        """Report of the namespace that is known, for a callback that is registered later."""
        self._identity_lock = threading.Lock()
        super().__init__(config, rank)
        extra = config.kv_transfer_config.kv_connector_extra_config
        self._directory = StoreDirectory.open(Path(extra["path"]).expanduser(), extra["max_bytes"])
        self._mac = RecordMac(self._directory.key)
        self._model_dir, self._loaded_ns = config.model_config.model_dir, time.time_ns()
        self._generation = 0
        """Number of times that the weights were replaced."""
        self._blocks: BlockBytes | None = None
        self._memory: KVCacheMemory | None = None
        self._namespace: Namespace | None = None
        self._transfers: dict[int, _Load | _Save] = {}
        """Transfers that have not ended, by id."""
        self._last_id = -1
        self._is_closed = threading.Event()
        self._io = _IOThreads(self._directory, int(extra.get("io_threads", min(2, os.cpu_count() or 1))))
        self._hasher: threading.Thread | None = None

    @property
    def report(self) -> Report:  # a property, because what is set is told the namespace
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        with self._identity_lock:
            self._report = report
            if self._identity is not None:
                report(self._identity)

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        is_first = self._memory is None
        self._memory, self._blocks = memory, BlockBytes(memory)
        if is_first:
            self._begin_hashing()
        elif self._namespace is not None:
            self._namespace = Namespace(self._namespace.fingerprint, self._directory.key, self._blocks)

    def set_weights(self, path: str) -> None:
        self._model_dir, self._loaded_ns = Path(path), time.time_ns()
        self._generation += 1
        self._namespace = self._identity = None
        self._begin_hashing()

    def start(self, orders: KVConnectorMetadata) -> None:
        for transfer_id in orders.cancels:
            self._cancel(transfer_id)
        for load in orders.loads:
            reader = RecordReader(self._directory, self._mac)
            task = _Load(load, self._namespace, reader, self._end)
            self._begin(load.load_id, task)
            self._io.submit_load(task, len(load.keys))
        for save in orders.saves:
            write = _Save(save, self._namespace, self._end)
            self._begin(save.save_id, write)
            self._io.saves.put(write)
        if orders.params and orders.params.get("reset"):
            self._io.saves.put(self._namespace)

    def close(self) -> None:
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._report = lambda output: None
        for task in list(self._transfers.values()):
            if isinstance(task, _Load):
                task.cancel()
        if self._hasher is not None:
            self._hasher.join()
        if self._io.stop(END_S):
            self._directory.close()  # a thread that hangs in a system call keeps it

    def _begin(self, transfer_id: int, task: _Load | _Save) -> None:
        self._last_id = max(self._last_id, transfer_id)
        self._transfers[transfer_id] = task

    def _cancel(self, transfer_id: int) -> None:
        task = self._transfers.get(transfer_id)
        if task is not None:
            task.cancel()
        elif transfer_id > self._last_id:
            # which of the two it would have been is not known here: the engine looks for its id in both
            load, save = LoadResult(transfer_id, 0, "unknown"), SaveResult(transfer_id, 0, "unknown")
            self._report(KVConnectorOutput(loads=[load], saves=[save]))

    def _end(self, output: KVConnectorOutput) -> None:
        """Takes the report of a transfer, on its thread."""
        for load in output.loads:
            self._transfers.pop(load.load_id, None)
        for save in output.saves:
            self._transfers.pop(save.save_id, None)
        self._report(output)

    # -- the namespace -----------------------------------------------------------------------------------------

    def _begin_hashing(self) -> None:
        """Computes the fingerprint in the background. It is there at once if the files are known."""
        if self._hasher is not None:
            self._hasher.join()
        args = (self._generation, self._model_dir, self._loaded_ns)
        self._hasher = threading.Thread(target=self._hash, args=args, name="kv-store-hash", daemon=True)
        self._hasher.start()
        self._hasher.join(KNOWN_S)

    def _hash(self, generation: int, model_dir: Path, loaded_ns: int) -> None:
        _lower_priority()
        assert self._memory is not None
        try:
            digests = FileDigests(self._directory.path)
            fingerprint = compute_fingerprint(
                self.config, self._memory, model_dir, digests, loaded_ns, self._is_closed.is_set
            )
        except HashingStoppedError:
            return
        except (OSError, ChangedFileError) as e:
            logger.warning("the KV store %s is not used: %s; start again to use it", self._directory.path, e)
            return
        except Exception:
            logger.exception("the KV store %s is not used: its namespace is not known", self._directory.path)
            return
        assert self._blocks is not None
        info = {
            "fingerprint": fingerprint,
            "generation": generation,
            "payload_bytes": self._blocks.payload_bytes,
        }
        logger.info("KV store %s: namespace %s", self._directory.path, fingerprint.hex()[:16])
        with self._identity_lock:
            self._namespace = Namespace(fingerprint, self._directory.key, self._blocks)
            self._identity = KVConnectorOutput(info=info)
            self._report(self._identity)


class _IOThreads:
    """The threads of loads and of saves."""

    def __init__(self, directory: StoreDirectory, num_load_threads: int) -> None:
        self.loads: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self.saves: queue.Queue[_Save | Namespace | None] = queue.Queue()
        """A namespace stands for the order to delete its records."""
        self._directory = directory
        self._is_stopping = False
        targets = [self._run_loads] * num_load_threads + [self._run_saves]
        self._threads = [threading.Thread(target=t, name="kv-store", daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    def submit_load(self, task: _Load, num_positions: int) -> None:
        """Begins a load, on as many threads as it has positions at most. One without any ends at once."""
        for _ in range(max(1, min(len(self._threads) - 1, num_positions))):
            self.loads.put(task)

    def stop(self, timeout_s: float) -> bool:
        """Ends all threads; saves that were ordered are written if they can be in time. Returns False if one hangs."""
        end_ts = time.monotonic() + timeout_s
        for _ in self._threads[:-1]:
            self.loads.put(None)
        self.saves.put(None)
        self._threads[-1].join(timeout_s)
        self._is_stopping = True
        for thread in self._threads:
            thread.join(max(0.1, end_ts - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_loads(self) -> None:
        while (task := self.loads.get()) is not None:
            task.run_share()

    def _run_saves(self) -> None:
        _lower_priority()
        writer = StoreWriter(self._directory)
        while not self._is_stopping:
            try:
                task = self.saves.get(timeout=writer.seconds_to_seal())
            except queue.Empty:
                writer.seal_if_old()
                continue
            if task is None:
                break
            if isinstance(task, Namespace):
                writer.seal()
                self._delete(task.fingerprint)
            else:
                task.run(writer)
        writer.seal()

    def _delete(self, fingerprint: bytes) -> None:
        """Deletes the sealed extents of a namespace."""
        with contextlib.suppress(OSError):
            for extent in self._directory.list_extents():
                if fingerprint.hex().startswith(extent.namespace) and self._directory.is_sealed(extent):
                    failpoint("kv.evict")
                    self._directory.remove(extent.name)


def _lower_priority() -> None:
    """Makes this thread give way to the engine's."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVE_NICENESS)
