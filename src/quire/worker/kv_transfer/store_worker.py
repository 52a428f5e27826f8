"""The worker half of the store: its threads.

Loads have a few threads and are shared among them position by position. Saves have one, of low priority, which leaves
what has become old to another of the engine's priority: beside steps that follow one another it has hardly a turn.
Raising the priority of a thread again takes rights that few users have.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.kv_store.access import RecordBuffer, RecordReader, StoreWriter
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.index import StoreScanner
from quire.kv_store.record import RecordMac
from quire.kv_store.watch import StoreWatcher
from quire.logger import init_logger
from quire.wire.kv_peers import DROP_S, DROPPED
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput, SaveOrder
from quire.worker.kv_transfer.audit import Audit
from quire.worker.kv_transfer.record_worker import RecordWorker, lower_priority
from quire.worker.kv_transfer.transfers import Load, Save, Written

logger = init_logger(__name__)

END_S = 1.0
"""Seconds that saves which were ordered are given when the engine ends."""


class StoreWorker(RecordWorker):
    """Reads and writes the records of a directory."""

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        extra = config.kv_transfer_config.kv_connector_extra_config
        directory = StoreDirectory.open(Path(extra["path"]).expanduser(), extra["max_bytes"])
        super().__init__(config, rank, directory)
        self._mac = RecordMac(directory.key)
        self.on_written: Written = lambda header, extent, offset: None
        """Takes each record that was written. It must not raise."""
        self._io = _IOThreads(directory, int(extra.get("io_threads", min(2, os.cpu_count() or 1))))

    def start(self, orders: KVConnectorMetadata) -> None:
        for transfer_id in orders.cancels:
            self.cancel(transfer_id)
        for load in orders.loads:
            reader = RecordReader(self.directory, self._mac)
            task = Load(load, self.rank, self.namespace, reader, self.end)
            self.begin(load.load_id, task)
            self._io.submit_load(task, len(load.keys))
        for save in orders.saves:
            write = self._make_save(save)
            self.begin(save.save_id, write)
            self._io.saves.put(write)
        if orders.params and "drop" in orders.params:
            self._drop_records(orders.params["drop"])

    def _drop_records(self, number: int) -> None:
        """Deletes the records of this namespace, and reports the outcome."""
        namespace, place = self.namespace, str(self.directory.path)

        def report(outcome: str) -> None:
            self._report(KVConnectorOutput(info={"dropped": [number, {place: outcome}]}))

        if namespace is None:
            report("the namespace is not known yet")
        else:
            self._io.saves.put(_Drop(namespace.fingerprint, self.directory, report))

    def make_watcher(self, fingerprint: bytes, report: Callable[..., None]) -> StoreScanner:
        return StoreScanner(StoreWatcher(self.directory, fingerprint, report))

    def _make_save(self, order: SaveOrder) -> Save | Audit:
        if order.audit is None:
            return Save(order, self.namespace, self.end, self.on_written)
        reader = RecordReader(self.directory, self._mac)
        return Audit(order, self.rank, self.namespace, reader, self.directory.remove, self.end)

    def end_all(self) -> None:
        for task in list(self.transfers.values()):
            if isinstance(task, Load):
                task.cancel()

    def stop_threads(self) -> bool:
        return self._io.stop(END_S)


class _Drop:
    """An order to delete the records of a namespace. Reports the outcome within DROP_S."""

    def __init__(self, fingerprint: bytes, directory: StoreDirectory, report: Callable[[str], None]) -> None:
        self._fingerprint, self._directory, self._report = fingerprint, directory, report
        self._has_ended = threading.Lock()
        """Locked by the one that reports the outcome, and never released: a disk may answer after DROP_S, too."""
        self._timer = threading.Timer(DROP_S, self._end, (f"not within {DROP_S:.0f} s",))
        self._timer.daemon = True
        self._timer.start()

    def run(self) -> None:
        """Deletes the records."""
        outcome = "an error of this engine"
        try:
            self._directory.remove_namespace(self._fingerprint)
            outcome = DROPPED
        except OSError as e:
            outcome = f"its disk fails: {e.strerror}"
        finally:
            self._timer.cancel()
            self._end(outcome)

    def _end(self, outcome: str) -> None:
        if self._has_ended.acquire(blocking=False):
            self._report(outcome)


class _IOThreads:
    """The threads of loads and of saves."""

    def __init__(self, directory: StoreDirectory, num_load_threads: int) -> None:
        self.loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self.saves: queue.Queue[Save | Audit | _Drop | None] = queue.Queue()
        self._hurried: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        """Saves that have become old, for the thread of the engine's priority."""
        self._written: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One entry for each save that this thread has ended."""
        self._writer, self._buffer = StoreWriter(directory), RecordBuffer()
        """Used by the thread of saves, or by the one that it waits for."""
        self._directory = directory
        self._is_stopping = False
        targets = [self._run_loads] * num_load_threads + [self._run_saves]
        self._threads = [threading.Thread(target=t, name="kv-store", daemon=True) for t in targets]
        self._hurrying = threading.Thread(target=self._run_hurried, name="kv-store-hurry", daemon=True)
        self._hurrying.start()
        for thread in self._threads:
            thread.start()

    def submit_load(self, task: Load, num_positions: int) -> None:
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
        self._hurried.put(None)
        threads = [*self._threads, self._hurrying]
        for thread in threads:
            thread.join(max(0.1, end_ts - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run_loads(self) -> None:
        buffer = RecordBuffer()
        while (task := self.loads.get()) is not None:
            task.run_share(buffer)
            del task  # it holds the memory of the KV cache, which may be released now
        buffer.close()

    def _run_saves(self) -> None:
        lower_priority()
        writer = self._writer
        task: Save | Audit | _Drop | None
        while not self._is_stopping:
            try:
                task = self.saves.get(timeout=writer.seconds_to_seal())
            except queue.Empty:
                _guard(writer.seal_if_old)
                continue
            if task is None:
                break
            if isinstance(task, Save):
                if not task.run(writer, self._buffer, self._is_awaited, is_patient=True):
                    self._hurried.put(task)
                    self._written.get()
            elif isinstance(task, Audit):
                task.run()
            else:
                _guard(writer.seal)
                _guard(task.run)
            del task
        _guard(writer.seal)
        self._buffer.close()

    def _run_hurried(self) -> None:
        while (task := self._hurried.get()) is not None:
            _guard(partial(task.run, self._writer, self._buffer, self._is_awaited))
            del task
            self._written.put(None)

    def _is_awaited(self) -> bool:
        return not self.saves.empty()


def _guard(action: Callable[[], object]) -> None:
    """Logs an error: a thread that has other work goes on."""
    try:
        action()
    except Exception:
        logger.exception("the KV store failed")
