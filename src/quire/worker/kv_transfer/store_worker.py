"""The worker half of the store: its threads, and the namespace of its blocks.

Loads have a few threads and are shared among them position by position; saves have one, of low priority. A namespace
(fingerprint) is computed in the background; until the report with it nothing is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import quire.worker
from quire.config.checkpoint import CheckpointIndex
from quire.config.engine import EngineConfig
from quire.config.model import resolve_dtype_name
from quire.kv_store.access import RecordReader, StoreWriter
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.fingerprint import ChangedFileError, FileDigests, HashingStoppedError, make_fingerprint
from quire.kv_store.record import RecordMac
from quire.logger import init_logger
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput, LoadResult, SaveResult
from quire.worker.kv_cache import KVCacheMemory
from quire.worker.kv_transfer.transfers import BlockBytes, Load, Namespace, Save
from quire.worker.kv_transfer.worker import Arrivals, KVConnectorWorker, Report

logger = init_logger(__name__)

SAVE_NICENESS = 10
END_S = 1.0
"""Seconds that saves which were ordered are given when the engine ends."""
KNOWN_S, HASHING_S = 10.0, 0.5
"""Longest wait for a namespace, so that the first request finds blocks: where all weights were hashed before, and where
files have to be read."""


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
        self._transfers: dict[int, Load | Save] = {}
        """Transfers that have not ended, by id."""
        self._arrivals = Arrivals()
        self._is_closed = threading.Event()
        self._io = _IOThreads(self._directory, int(extra.get("io_threads", min(2, os.cpu_count() or 1))))
        self._hasher: threading.Thread | None = None

    @property
    def report(self) -> Report:  # a property: a callback that is registered gets a namespace that is known already
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        with self._identity_lock:
            self._report = report
            if self._identity is not None:
                report(self._identity)

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        is_first = self._memory is None
        self._memory, self._blocks = memory, BlockBytes.of_memory(memory)
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
            task = Load(load, self._namespace, reader, self._end)
            self._begin(load.load_id, task)
            self._io.submit_load(task, len(load.keys))
        for save in orders.saves:
            write = Save(save, self._namespace, self._end)
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
            if isinstance(task, Load):
                task.cancel()
        if self._hasher is not None:
            self._hasher.join()
        if self._io.stop(END_S):
            self._directory.close()  # a thread that hangs in a system call keeps it

    def _begin(self, transfer_id: int, task: Load | Save) -> None:
        self._arrivals.add(transfer_id)
        self._transfers[transfer_id] = task

    def _cancel(self, transfer_id: int) -> None:
        task = self._transfers.get(transfer_id)
        if task is not None:
            task.cancel()
        elif not self._arrivals.has(transfer_id):
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
        takes_long = threading.Event()
        args = (self._generation, self._model_dir, self._loaded_ns, takes_long)
        self._hasher = threading.Thread(target=self._hash, args=args, name="kv-store-hash", daemon=True)
        self._hasher.start()
        takes_long.wait(KNOWN_S)

    def _hash(self, generation: int, model_dir: Path, loaded_ns: int, takes_long: threading.Event) -> None:
        """Computes a fingerprint and reports it. Sets `takes_long` at its end, or when files are still being read."""
        end_ts = time.monotonic() + HASHING_S

        def is_stopped() -> bool:
            if not takes_long.is_set() and time.monotonic() >= end_ts:
                takes_long.set()
                _lower_priority()
            return self._is_closed.is_set()

        try:
            self._identify(generation, model_dir, loaded_ns, is_stopped)
        finally:
            takes_long.set()

    def _identify(self, generation: int, model_dir: Path, loaded_ns: int, is_stopped: Callable[[], bool]) -> None:
        assert self._memory is not None
        try:
            digests = FileDigests(self._directory.path)
            fingerprint = compute_fingerprint(self.config, self._memory, model_dir, digests, loaded_ns, is_stopped)
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
        self.loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self.saves: queue.Queue[Save | Namespace | None] = queue.Queue()
        """A namespace stands for the order to delete its records."""
        self._directory = directory
        self._is_stopping = False
        targets = [self._run_loads] * num_load_threads + [self._run_saves]
        self._threads = [threading.Thread(target=t, name="kv-store", daemon=True) for t in targets]
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
        for thread in self._threads:
            thread.join(max(0.1, end_ts - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_loads(self) -> None:
        buffer = bytearray()
        while (task := self.loads.get()) is not None:
            task.run_share(buffer)
            del task  # it holds the memory of the KV cache, which may be released now

    def _run_saves(self) -> None:
        _lower_priority()
        writer = StoreWriter(self._directory)
        task: Save | Namespace | None
        while not self._is_stopping:
            try:
                task = self.saves.get(timeout=writer.seconds_to_seal())
            except queue.Empty:
                _guard(writer.seal_if_old)
                continue
            if task is None:
                break
            if isinstance(task, Save):
                task.run(writer)
            else:
                _guard(writer.seal)
                _guard(partial(self._delete, task.fingerprint))
            del task
        _guard(writer.seal)

    def _delete(self, fingerprint: bytes) -> None:
        """Deletes the sealed extents of a namespace."""
        for extent in self._directory.list_extents():
            if fingerprint.hex().startswith(extent.namespace):
                self._directory.evict(extent)


def _guard(action: Callable[[], None]) -> None:
    """Logs an error: a thread that has other work goes on."""
    try:
        action()
    except Exception:
        logger.exception("the KV store failed")


def _lower_priority() -> None:
    """Makes this thread give way to the engine's."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVE_NICENESS)


# -- identity -------------------------------------------------------------------------------------------------------


def compute_fingerprint(
    config: EngineConfig,
    memory: KVCacheMemory,
    model_dir: Path,
    digests: FileDigests,
    loaded_ns: int,
    is_stopped: Callable[[], bool],
) -> bytes:
    """Returns the fingerprint of blocks that are computed with the weights of `model_dir`, which were read after
    `loaded_ns`. Hashes weights that were not hashed before.

    Raises OSError, and what `FileDigests.digest_files` raises.
    """
    model, drafting = config.model_config, config.speculative_config.drafting
    weights: dict[str, Any] = {"seed": model.seed}  # of random weights
    if config.load_config.load_format != "dummy":
        weights = {"model": _digest_weights(model_dir, digests, loaded_ns, is_stopped)}
    if drafting is not None and drafting.model is not None:
        draft_dir = drafting.model.model_dir
        weights["drafter"] = _digest_weights(draft_dir, digests, loaded_ns, is_stopped)
        weights["drafter_config"] = drafting.model.hf_config.raw
    facts = {
        "weights": weights,
        "config": model.hf_config.raw,
        "dtype": resolve_dtype_name(model, "cpu"),
        "quantization": model.quantization,
        "implementation": model.implementation.name,
        "attention": memory.backend.name,
        **memory.backend.kernels.identity,
        "code": _digest_code(),
        "layers": [_describe_layer(memory, name) for name in memory.layer_groups],
    }
    return make_fingerprint(json.loads(json.dumps(facts, default=str)))


def _describe_layer(memory: KVCacheMemory, name: str) -> list[Any]:
    group, keys = memory.layer_groups[name], memory.caches[name].key
    return [name, group, repr(memory.specs[group]), str(keys.dtype), list(keys.shape[1:])]


def _digest_weights(
    directory: Path, digests: FileDigests, loaded_ns: int, is_stopped: Callable[[], bool]
) -> dict[str, str]:
    files = sorted({info.file for info in CheckpointIndex.from_dir(directory).tensors.values()})
    return digests.digest_files(files, loaded_ns, is_stopped)


def _digest_code() -> str:
    """Returns the digest of the code that computes."""
    digest = hashlib.sha256()
    root = Path(quire.worker.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(b"%s\n%s" % (str(file.relative_to(root)).encode(), hashlib.sha256(file.read_bytes()).digest()))
    return digest.hexdigest()
