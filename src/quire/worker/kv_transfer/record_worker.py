"""Parts of all worker halves that move records: the namespace of their blocks, and which transfers have not ended.

A namespace (fingerprint) is computed in the background; until the report with it nothing is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import quire.worker
from quire.config.checkpoint import CheckpointIndex
from quire.config.engine import EngineConfig
from quire.config.model import resolve_dtype_name
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.fingerprint import ChangedFileError, FileDigests, HashingStoppedError, make_fingerprint
from quire.logger import init_logger
from quire.wire.kv_transfer import KVConnectorOutput
from quire.worker.kv_cache import KVCacheMemory
from quire.worker.kv_transfer.transfers import BlockBytes, Namespace
from quire.worker.kv_transfer.worker import KVConnectorWorker, Report

logger = init_logger(__name__)

LOW_PRIORITY, HASHING_PRIORITY = 19, 10
"""Niceness of threads that give way to the engine's, and of the one that hashes weights, for which others wait."""
KNOWN_S, HASHING_S = 10.0, 0.5
"""Longest wait for a namespace, so that the first request finds blocks: where all weights were hashed before, and where
files have to be read."""


class Watcher(Protocol):
    """A thread that follows which blocks a store holds, and reports the changes."""

    def stop(self) -> bool:
        """Ends the thread. Returns False if it hangs."""


class Transfer(Protocol):
    """A transfer that has not ended."""

    def cancel(self) -> None:
        """Ends it soon."""


class RecordWorker(KVConnectorWorker):
    """Knows the namespace and the transfers of one engine. `start` and `close` are called by the worker's thread."""

    what = "the KV store"
    """Name in messages."""

    def __init__(self, config: EngineConfig, rank: int, directory: StoreDirectory) -> None:
        """`directory`: of the key, and of the digests of files."""
        self._identity: KVConnectorOutput | None = None
        """Report of the namespace that is known, for a callback that is registered later."""
        self._identity_lock = threading.Lock()
        super().__init__(config, rank)
        self.directory = directory
        self.namespace: Namespace | None = None
        self.transfers: dict[int, Transfer] = {}
        """Transfers that have not ended, by id."""
        self._model_dir, self._loaded_ns = config.model_config.model_dir, time.time_ns()
        self._former_dir = self._model_dir
        """Directory of the weights before these."""
        self._generation = 0
        """Number of times that the weights were replaced."""
        self._blocks: BlockBytes | None = None
        self._memory: KVCacheMemory | None = None
        self.is_closed = threading.Event()
        self._hasher: threading.Thread | None = None
        self._watcher: Watcher | None = None
        """Follows the store, for KV cache events."""
        self._watch_lock = threading.Lock()

    @property
    def report(self) -> Report:  # a property: a callback that is registered gets a namespace that is known already
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        with self._identity_lock:
            self._report, identity = report, self._identity
            if identity is not None:
                report(identity)
        if identity is not None and identity.info is not None:
            self.watch(identity.info["fingerprint"], identity.info["generation"])

    def register_kv_caches(self, memory: KVCacheMemory) -> None:
        is_first = self._memory is None
        self._memory, self._blocks = memory, BlockBytes.of_memory(memory)
        if is_first:
            self._begin_hashing()
        elif self.namespace is not None:
            self.namespace = self._make_namespace(self.namespace.fingerprint, self._blocks)

    def _make_namespace(self, fingerprint: bytes, blocks: BlockBytes) -> Namespace:
        compresses = self.config.kv_transfer_config.kv_store_compress
        return Namespace(fingerprint, self.directory.key, blocks, compresses=compresses)

    def set_weights(self, path: str) -> None:
        self._former_dir = self._model_dir
        self._take_weights(Path(path), self._generation + 1)

    def undo_weights(self) -> None:
        self._take_weights(self._former_dir, self._generation - 1)

    def _take_weights(self, directory: Path, generation: int) -> None:
        self._model_dir, self._loaded_ns, self._generation = directory, time.time_ns(), generation
        self.namespace = self._identity = None
        self._begin_hashing()

    def close(self) -> None:
        if self.is_closed.is_set():
            return
        self.is_closed.set()
        self._report = lambda output: None
        self.end_all()
        if self._hasher is not None:
            self._hasher.join()
        is_watcher_ended = self._stop_watching()
        if self.stop_threads() and is_watcher_ended:
            self.directory.close()  # a thread that hangs in a system call keeps it

    @abstractmethod
    def end_all(self) -> None:
        """Begins to end transfers: the engine ends."""

    @abstractmethod
    def stop_threads(self) -> bool:
        """Ends all threads. Returns False if one hangs."""

    def describe(self) -> dict[str, Any]:
        """Returns what the scheduler half needs to know besides the namespace."""
        return {}

    @abstractmethod
    def make_watcher(self, fingerprint: bytes, report: Callable[..., None]) -> Watcher:
        """Returns a watcher of a namespace. `report` takes changes: the parameters of `StoredBlocks.update`."""

    def watch(self, fingerprint: bytes, generation: int) -> None:
        """Follows a namespace from now on, on any thread, and reports all of it. Ends what was followed before."""
        if not self.config.kv_transfer_config.kv_connector_extra_config.get("publish_store"):
            return
        with self._watch_lock:
            self._stop_watching()
            if not self.is_closed.is_set():
                self._watcher = self.make_watcher(fingerprint, partial(self._report_changes, generation))

    def _report_changes(self, generation: int, *changes: Any) -> None:
        self._report(KVConnectorOutput(info={"watched": list(changes), "generation": generation}))

    def _stop_watching(self) -> bool:
        """Returns False if the watcher hangs."""
        watcher, self._watcher = self._watcher, None
        return watcher is None or watcher.stop()

    # -- transfers ---------------------------------------------------------------------------------------------

    def begin(self, transfer_id: int, task: Transfer) -> None:
        """Notes an order that has arrived."""
        self.arrivals.add(transfer_id)
        self.transfers[transfer_id] = task

    def cancel(self, transfer_id: int) -> None:
        """Ends a transfer soon; one that never arrived is answered at once."""
        task = self.transfers.get(transfer_id)
        if task is not None:
            task.cancel()
        else:
            self.answer_if_lost(transfer_id)

    def end(self, output: KVConnectorOutput) -> None:
        """Takes the report of a transfer, on its thread."""
        for load in output.loads:
            self.transfers.pop(load.load_id, None)
        for save in output.saves:
            self.transfers.pop(save.save_id, None)
        self._report(output)

    # -- the namespace -----------------------------------------------------------------------------------------

    def _begin_hashing(self) -> None:
        """Computes the fingerprint in the background. It is there at once if the files are known."""
        if self._hasher is not None:
            self._hasher.join()
        takes_long = threading.Event()
        args = (self._generation, self._model_dir, self._loaded_ns, takes_long)
        self._hasher = threading.Thread(target=self._hash, args=args, name="kv-hash", daemon=True)
        self._hasher.start()
        takes_long.wait(KNOWN_S)

    def _hash(self, generation: int, model_dir: Path, loaded_ns: int, takes_long: threading.Event) -> None:
        """Computes a fingerprint and reports it. Sets `takes_long` at its end, or when files are still being read."""
        end_ts = time.monotonic() + HASHING_S

        def is_stopped() -> bool:
            if not takes_long.is_set() and time.monotonic() >= end_ts:
                takes_long.set()
                lower_priority(HASHING_PRIORITY)
            return self.is_closed.is_set()

        try:
            self._identify(generation, model_dir, loaded_ns, is_stopped)
        finally:
            takes_long.set()

    def _identify(self, generation: int, model_dir: Path, loaded_ns: int, is_stopped: Callable[[], bool]) -> None:
        assert self._memory is not None
        try:
            digests = FileDigests(self.directory.path)
            fingerprint = compute_fingerprint(
                self.config, self.rank, self._memory, model_dir, digests, loaded_ns, is_stopped
            )
        except HashingStoppedError:
            return
        except (OSError, ChangedFileError) as e:
            logger.warning("%s %s is not used: %s; start again to use it", self.what, self.directory.path, e)
            return
        except Exception:
            logger.exception("%s %s is not used: its namespace is not known", self.what, self.directory.path)
            return
        assert self._blocks is not None
        info = {
            "fingerprint": fingerprint,
            "generation": generation,
            "payload_bytes": self._blocks.payload_bytes,
            **self.describe(),
        }
        logger.info("%s %s: namespace %s", self.what, self.directory.path, fingerprint.hex()[:16])
        with self._identity_lock:
            self.namespace = self._make_namespace(fingerprint, self._blocks)
            self._identity = KVConnectorOutput(info=info)
            self._report(self._identity)
        self.watch(fingerprint, generation)


def lower_priority(niceness: int = LOW_PRIORITY) -> None:
    """Makes this thread give way to the engine's, and not interrupt one when it wakes up: the other threads of a step
    would wait for that one."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
        if sys.platform == "linux":
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


# -- identity -------------------------------------------------------------------------------------------------------


def compute_fingerprint(
    config: EngineConfig,
    rank: int,
    memory: KVCacheMemory,
    model_dir: Path,
    digests: FileDigests,
    loaded_ns: int,
    is_stopped: Callable[[], bool],
) -> bytes:
    """Returns the fingerprint of a worker's part of blocks that are computed with the weights of `model_dir`, which
    were read after `loaded_ns`. Hashes weights that were not hashed before.

    Raises OSError, and what `FileDigests.digest_files` raises.
    """
    model, drafting = config.model_config, config.speculative_config.drafting
    parallel = config.parallel_config
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
        "part": [rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
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
