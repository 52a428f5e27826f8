"""Packed adapters on disk: a file for each digest, which a later load maps instead of packing again (docs/lora.md).

A *link* leads from an adapter's files, by their config and by size, inode and times of their tensors, to its digest, so
that files which were loaded before are not even read. Files and links are made for one key: the model's sites, the
limits that adapters were checked against, the type, the kernels and the code. Any of them may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import quire.worker
from quire.config.adapter import AdapterFiles
from quire.config.lora import LoRAConfig
from quire.logger import init_logger
from quire.worker.kernels.lora import PackedLowRank
from quire.worker.kernels.native_lora import NativeLowRank
from quire.worker.loader.packed import END_S, SETTLED_S, SPARE_DISK_BYTES, WRITER_NICENESS, identity_of
from quire.worker.lora.sites import AdapterSites
from quire.worker.packed_cache import ALIGNMENT, Key, PackedCache, PackedFile, PackedFileWriter, max_cache_bytes

logger = init_logger(__name__)

SHARE = 8
"""Packed adapters take at most this part of QUIRE_WEIGHT_CACHE_GIB."""
MAX_WAITING = 4
"""Adapters that wait to be written: their memory is kept until then. Others are not written."""
INDEX, OUTLINES = "index", "outlines"
PAGES = slice(None, None, 4096)
PIECE_BYTES = 1 << 20

Head = tuple[Tensor, Tensor | None]
"""Weight and bias of a classifier that an adapter brings."""
Work = Callable[[], AbstractContextManager[None]]
"""Function whose context bounds a piece of work: see `Pace`."""


@dataclass(frozen=True)
class PackedAdapter:
    """A packed adapter, and what is known of it."""

    digest: str
    rank: int
    notes: tuple[str, ...]
    """Lines for the log."""
    packed: Mapping[str, PackedLowRank]
    """Weights by site."""
    head: Head | None = None
    invocation: tuple[int, ...] = ()
    """Tokens at whose last occurrence in a prompt it begins; empty: it applies to all tokens."""

    @property
    def num_bytes(self) -> int:
        """Size of its weights in memory."""
        head = 0 if self.head is None else sum(t.nbytes for t in self.head if t is not None)
        return head + sum(packed.num_bytes for packed in self.packed.values())


class AdapterCache:
    """Finds packed adapters of one model on disk, and writes them there on a thread of its own."""

    def __init__(
        self, cache: PackedCache, sites: AdapterSites, limits: LoRAConfig, pack_format: str, work: Work
    ) -> None:
        """`work` bounds the pieces of writing."""
        self._cache, self._sites, self._limits, self._format = cache, sites, limits, pack_format
        self._work = work
        self._queue: queue.SimpleQueue[tuple[PackedAdapter, Path, Key | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unchecked_bytes: int | None = None
        """Bytes written since the size of the directory was bounded; None: it was not yet."""

    @functools.cached_property
    def _common(self) -> Key:
        """The part that all keys have."""
        root = Path(quire.worker.__file__).parent
        code = [file for file in root.rglob("*") if file.suffix in (".py", ".so")]
        code.append(root.parent / "config" / "adapter.py")
        return {
            "sites": self._sites.fingerprint(),
            "limits": [self._limits.max_lora_rank, list(self._limits.lora_target_modules)],
            "kernels": self._format,
            "code": sorted([str(file.relative_to(root.parent)), *identity_of(file)] for file in code),
        }

    def key_of(self, files: AdapterFiles) -> Key:
        """Returns the key of the link of an adapter's files. Raises OSError."""
        status = os.fstat(files.tensors.fileno())
        tensors = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
        return {"config": hashlib.sha256(files.config).hexdigest(), "tensors": tensors, **self._common}

    # -- finding ------------------------------------------------------------------------------------------------------

    def digest_of(self, files: AdapterFiles) -> str | None:
        """Returns the digest of files that were loaded before; None if it is not known."""
        return self._cache.read_link(self.key_of(files))

    def open(self, digest: str) -> PackedAdapter | None:
        """Maps a packed adapter, and reads its pages in; None if there is no valid one."""
        file = self._cache.open({"adapter": digest, **self._common})
        if file is None:
            return None
        try:
            return self._map(digest, file)
        except (KeyError, ValueError, TypeError, IndexError) as e:
            logger.warning("%s is not used: %s", file.path, e)
            return None

    def num_bytes(self, files: AdapterFiles) -> int | None:
        """Returns the size of the packed weights of files that were loaded before; None if it is not known."""
        digest = self.digest_of(files)
        file = None if digest is None else self._cache.open({"adapter": digest, **self._common})
        names = () if file is None else file.blobs.keys() - {INDEX, OUTLINES}
        return None if file is None else sum(file.blobs[name].num_bytes for name in names)

    def _map(self, digest: str, file: PackedFile) -> PackedAdapter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "not writable": nothing writes to it
            memory = torch.frombuffer(file.memory, dtype=torch.uint8)

        def blob(name: str) -> Tensor:
            place = file.blobs[name]
            return memory[place.offset : place.offset + place.num_bytes]

        def checked(name: str) -> memoryview:
            data = memoryview(blob(name).numpy()).cast("B")  # type: ignore[arg-type]  # an array is a buffer
            if zlib.crc32(data) != file.blobs[name].crc32:
                raise ValueError(f"{name} is damaged")
            return data

        index = json.loads(bytes(checked(INDEX)))
        outlines = np.frombuffer(checked(OUTLINES), dtype=np.int64).reshape(-1, 7)
        packed: dict[str, PackedLowRank] = {}
        start = 0
        for name, rank, checksum in index["sites"]:
            shape = self._sites.sites[name].shape
            outline, data = outlines[start : start + shape.groups], blob(name)
            start += shape.groups
            for first in range(0, len(data), PIECE_BYTES):
                with self._work():  # otherwise the step that uses it first would wait for its pages
                    data[first : first + PIECE_BYTES][PAGES].sum()
            packed[name] = site = NativeLowRank(shape, rank, data, outline)
            if not 0 <= int(outline.max()) <= len(data) or site.head_checksum() != checksum:
                raise ValueError(f"{name} is damaged")
        return PackedAdapter(
            digest, index["rank"], tuple(index["notes"]), packed, invocation=tuple(index["invocation"])
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def store(self, adapter: PackedAdapter, files: AdapterFiles, key: Key) -> None:
        """Begins to write an adapter that was packed from `files`, whose key was `key` before they were read, unless
        much waits to be written. One with a classifier is not kept."""
        if self._queue.qsize() >= MAX_WAITING or adapter.head is not None:
            return
        age = time.time() - os.fstat(files.tensors.fileno()).st_ctime
        is_settled = age > SETTLED_S and self.key_of(files) == key
        self._queue.put((adapter, files.directory, key if is_settled else None))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-adapter-cache", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits shortly for what is to be written, and ends."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)  # of this thread, on Linux
        while (item := self._queue.get()) is not None:
            adapter, directory, key = item
            try:
                self._write(adapter, directory)
                if key is not None:
                    self._cache.write_link(key, adapter.digest)
            except OSError as e:
                logger.warning("an adapter is not stored in %s: %s", self._cache.directory, e.strerror or e)
            del item, adapter

    def _write(self, adapter: PackedAdapter, source: Path) -> None:
        key: Key = {"adapter": adapter.digest, **self._common}
        if self._cache.open(key) is not None:
            return
        self._bound(adapter.num_bytes + (len(adapter.packed) + 3) * ALIGNMENT)  # what lies between its parts, at most
        writer = PackedFileWriter(self._cache.path_of(key), key, str(source))
        if shutil.disk_usage(self._cache.directory).free < adapter.num_bytes + SPARE_DISK_BYTES:
            writer.discard()
            return
        try:
            sites, outlines = [], []
            for name, packed in adapter.packed.items():
                assert isinstance(packed, NativeLowRank)
                with self._work():
                    writer.add(name, memoryview(packed.memory.numpy()))  # type: ignore[arg-type]  # an array is a buffer
                sites.append([name, packed.rank, packed.head_checksum()])
                outlines.append(packed.outline)
            index = {
                "rank": adapter.rank,
                "notes": list(adapter.notes),
                "invocation": list(adapter.invocation),
                "sites": sites,
            }
            writer.add(INDEX, memoryview(json.dumps(index).encode()))
            writer.add(OUTLINES, memoryview(np.concatenate(outlines).tobytes()))
            writer.commit()
        finally:
            writer.discard()

    def _bound(self, num_bytes: int) -> None:
        """Deletes the adapters used longest ago, now and then: looking at all files takes time."""
        limit = max_cache_bytes() // SHARE
        if self._unchecked_bytes is None or self._unchecked_bytes + num_bytes > limit // 16:
            self._cache.trim(max(0, limit - limit // 16 - num_bytes))
            self._unchecked_bytes = 0
        self._unchecked_bytes += num_bytes
