"""A model's packed weights, found in the cache on disk or written there while the model loads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import queue
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import quire.worker
from quire import envs
from quire.config.checkpoint import TensorInfo
from quire.config.engine import LoadConfig
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.logger import init_logger
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.packs import FRESH_PACKS, Fill, Packs, take_memory
from quire.worker.loader.stored import Stored, StoredMatrix
from quire.worker.packed_cache import GIB, Key, PackedCache, PackedFile, PackedFileWriter, max_cache_bytes

logger = init_logger(__name__)

SETTLED_S = 2.0
"""Age from which a checkpoint is known to be complete: one that changed later may still be being written."""
SPARE_DISK_BYTES = GIB
"""Free space that is left on the disk."""
WRITER_NICENESS = 10
END_S = 5.0
"""Seconds that an engine waits for its writer when it ends."""


class MismatchError(Exception):
    """A cached file holds other layers than the model asks for."""


def make_key(
    stored: Mapping[str, Stored],
    hf: HFConfig,
    load_config: LoadConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    asked: Mapping[str, str] | None = None,
) -> Key:
    """Returns the key of the packed bytes: the checkpoint's files, the model, the way it packs, and the code. `asked`
    holds further options that change the model. Raises OSError.

    A file is identified by size, inode and the times of its last changes. ctime cannot be set: a file that is
    overwritten in place is another one, whatever its mtime. Paths do not count.
    """
    files = sorted({info.file for info in _infos(stored)})
    root = Path(quire.worker.__file__).parent
    code = [file for file in root.rglob("*") if file.suffix in (".py", ".so")]
    return {
        "checkpoint": [[file.name, *identity_of(file)] for file in files],
        "config": hashlib.sha256(json.dumps(hf.raw, sort_keys=True, default=str).encode()).hexdigest(),
        "load": {name: str(value) for name, value in sorted(vars(load_config).items())},
        "dtype": str(dtype),
        **(asked or {}),
        "kernels": kernels.pack_format,
        "code": sorted([str(file.relative_to(root)), *identity_of(file)] for file in code),
    }


def identity_of(file: Path) -> list[int]:
    """Returns numbers that differ once a file is another one or was written to. Raises OSError."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def is_settled(stored: Mapping[str, Stored]) -> bool:
    """Returns True if the checkpoint has not changed lately. Raises OSError."""
    return time.time() - max(file.stat().st_ctime for file in {info.file for info in _infos(stored)}) > SETTLED_S


def _infos(stored: Mapping[str, Stored]) -> Iterator[TensorInfo]:
    """Yields every tensor of the checkpoint that is read."""
    for tensor in stored.values():
        yield from tensor.infos.values() if isinstance(tensor, StoredMatrix) else (tensor,)


class MappedPacks:
    """Gives layers the content of a file, through one read-only mapping that lives as long as any of them."""

    def __init__(self, file: PackedFile) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "not writable": nothing writes to it
            self._memory = torch.frombuffer(file.memory, dtype=torch.uint8)
        if hasattr(mmap, "MADV_WILLNEED"):
            file.memory.madvise(mmap.MADV_WILLNEED)  # read from the disk at once, not page by page on first use
        self._blobs = file.blobs
        self._names: Iterator[str] = iter(())

    def begin(self, layer: str) -> None:
        self._names = _names_of(layer)

    def take(self, num_bytes: int, fill: Fill) -> Tensor:
        """Raises MismatchError if the file does not have it."""
        name = next(self._names)
        blob = self._blobs.get(name)
        if blob is None or blob.num_bytes != num_bytes:
            raise MismatchError(f"{name} of {num_bytes} bytes is not in it")
        return self._memory[blob.offset : blob.offset + num_bytes]


class RecordedPacks:
    """Packs anew and gives every layer to a writer."""

    def __init__(self, writer: CacheWriter) -> None:
        self._writer = writer
        self._names: Iterator[str] = iter(())

    def begin(self, layer: str) -> None:
        self._names = _names_of(layer)

    def take(self, num_bytes: int, fill: Fill) -> Tensor:
        memory = take_memory(num_bytes)
        fill(memory)
        self._writer.add(next(self._names), memory)
        return memory


def _names_of(layer: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{layer}/{number}"
        number += 1


class CacheWriter(threading.Thread):
    """Writes layers to the cache while the model loads and serves. A failure is logged.

    References the memory of layers that are not written yet: call `cancel` before freeing it.
    """

    def __init__(self, cache: PackedCache, key: Key, source: str) -> None:
        super().__init__(name="PackedWeightsWriter", daemon=True)
        self._cache, self._key, self._source = cache, key, source
        self._layers: queue.SimpleQueue[tuple[str, Tensor] | None] = queue.SimpleQueue()
        self._is_cancelled = False
        self._has_ended = False
        self.start()

    def add(self, name: str, memory: Tensor) -> None:
        """Queues a layer, or drops it if writing has failed."""
        self._layers.put((name, memory))
        if self._has_ended:
            self._forget()

    def finish(self) -> None:
        """Ends the queue: no further layer follows."""
        self._layers.put(None)

    def cancel(self) -> None:
        """Stops writing and releases all memory. Waits for the chunk that is being written."""
        self._is_cancelled = True
        self._layers.put(None)
        self.join()

    def run(self) -> None:
        """The thread's body."""
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS
            )  # the priority of this thread, on Linux
        writer = None
        try:
            writer = PackedFileWriter(self._cache.path_of(self._key), self._key, self._source)
            if self._write_all(writer):
                writer.commit()
                self._cache.trim(max_cache_bytes())
                logger.info("packed weights are stored in %s", self._cache.path_of(self._key))
        except OSError as e:
            _warn_not_stored(self._cache.directory, e.strerror or str(e))
        finally:
            if writer is not None:
                writer.discard()
            self._has_ended = True
            self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._layers.get_nowait()

    def _write_all(self, writer: PackedFileWriter) -> bool:
        while not self._is_cancelled and (layer := self._layers.get()) is not None:
            name, memory = layer
            writer.add(name, memoryview(memory.numpy()))  # type: ignore[arg-type]  # an array is a buffer
        return not self._is_cancelled


def _warn_not_stored(directory: Path, reason: str) -> None:
    logger.warning(
        "packed weights are not stored in %s (%s), so that each start packs them again; set %s to a directory with "
        "room that can be written to, or --no-weight-cache",
        directory,
        reason,
        envs.CACHE_ROOT.name,
    )


class WeightCache:
    """The packed weights of one model: finds them on disk or writes them there. Owns the writer."""

    def __init__(self, model_config: ModelConfig, load_config: LoadConfig, shard: str = "") -> None:
        """`shard` names the part of the model that this worker has; empty: all."""
        self._load_config = load_config
        self._hf = model_config.hf_config
        self._asked = {  # options that change the weights: a pooling head, quantization
            "head": "" if model_config.pooling is None else model_config.pooling.head,
            "quantization": model_config.quantization or "",
        }
        if shard:
            self._asked["shard"] = shard
        is_wanted = load_config.weight_cache and max_cache_bytes() > 0
        self._cache = PackedCache.default() if is_wanted else None
        self._writer: CacheWriter | None = None
        self.mapped_bytes = 0
        """Size of the file in use: page cache, which must not be counted as free memory."""

    @contextmanager
    def packs(
        self, stored: Mapping[str, Stored] | None, dtype: torch.dtype, kernels: Kernels, *, keep: bool
    ) -> Iterator[tuple[Packs, bool]]:
        """Yields the source of memory for a model that is filled from `stored`, and True if it has all weights packed.
        With `keep`, newly packed weights are written to the cache."""
        self.cancel()
        self.mapped_bytes = 0
        if self._cache is None or stored is None or kernels.pack_format is None:
            yield FRESH_PACKS, False
            return
        try:
            key = make_key(stored, self._hf, self._load_config, dtype, kernels, self._asked)
            may_keep = keep and is_settled(stored)
        except OSError:
            yield FRESH_PACKS, False
            return
        file = self._cache.open(key)
        if file is not None:
            logger.info("packed weights of %s are mapped from %s", file.source, file.path)
            self.mapped_bytes = file.num_bytes
            yield MappedPacks(file), True
        elif may_keep and self._can_store(stored):
            yield from self._record(key, stored, dtype, kernels)
        else:
            yield FRESH_PACKS, False

    def _record(
        self, key: Key, stored: Mapping[str, Stored], dtype: torch.dtype, kernels: Kernels
    ) -> Iterator[tuple[Packs, bool]]:
        assert self._cache is not None
        source = str(next(_infos(stored)).file.parent)
        self._writer = writer = CacheWriter(self._cache, key, source)
        try:
            yield RecordedPacks(writer), False
        except BaseException:
            self.cancel()
            raise
        if make_key(stored, self._hf, self._load_config, dtype, kernels, self._asked) == key:
            writer.finish()
        else:
            self.cancel()  # the checkpoint was changed while it was read

    def _can_store(self, stored: Mapping[str, Stored]) -> bool:
        """Returns True if the cache's directory can be written to and has room; logs a warning if not."""
        assert self._cache is not None
        needed = sum(info.nbytes for info in _infos(stored)) + SPARE_DISK_BYTES
        place = self._cache.directory
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            free = shutil.disk_usage(place).free
        except OSError as e:
            _warn_not_stored(self._cache.directory, e.strerror or str(e))
            return False
        if not os.access(place, os.W_OK | os.X_OK):  # checked first: a read-only file system may be full, too
            _warn_not_stored(self._cache.directory, f"{place} cannot be written to")
            return False
        if needed > free:
            _warn_not_stored(self._cache.directory, f"{free / GIB:.1f} GiB are left of {needed / GIB:.1f} needed")
        return needed <= free

    def cancel(self) -> None:
        """Stops writing, because the weights are about to be freed."""
        if self._writer is not None:
            self._writer.cancel()
            self._writer = None

    def close(self) -> None:
        """Waits shortly for the writer to finish, then stops it."""
        if self._writer is not None:
            self._writer.join(END_S)
            self.cancel()
