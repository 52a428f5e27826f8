"""Packed weights on disk: files that a later start maps into memory instead of packing again (docs/weight_cache.md).

A file holds named blobs, the bytes of one model's packed layers, and a table with their positions and the key the file
was made for. It is only read as bytes: nothing in it is run. A file is written under another name and renamed when it
is complete, and is checked (lengths, digest of the table, key) before it is used. No torch is imported, so that `quire
cache` answers at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import envs
from quire.logger import init_logger

logger = init_logger(__name__)

MAGIC = b"QUIREPAK"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32s")
"""Magic, version, zero, where the table begins, its bytes, its SHA-256. The file ends with the table."""
ALIGNMENT = 4096
MAX_TABLE_BYTES = 1 << 28
SUFFIX, LINK_SUFFIX = ".packed", ".link"
CHUNK_BYTES = 8 << 20
SUMMED_BYTES = 256
"""Blobs up to this size describe others and are checked at each start, which costs nothing."""
STALE_PART_S = 24 * 3600.0
"""Age at which the remains of a killed writer are deleted."""
UNUSED_LINK_S = 90 * 24 * 3600.0
"""Age at which a link is deleted."""
GIB = 1 << 30

Key = Mapping[str, Any]
"""The identity of a file's content as JSON values: the same key means the same bytes."""


class InvalidPackedFileError(Exception):
    """A file that is not a valid file of packed weights; the message gives the reason. The weights are packed again."""


class OtherKeyError(InvalidPackedFileError):
    """A valid file that was made for another key, for example by another version of the code."""


@dataclass(frozen=True)
class Blob:
    """Position of a layer's bytes in the file."""

    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class PackedFile:
    """An open file, checked and mapped read-only. The mapping outlives the file's deletion."""

    path: Path
    key: Key
    source: str
    """Checkpoint directory it was packed from, for messages."""
    blobs: Mapping[str, Blob]
    memory: mmap.mmap = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.memory)

    def find_damage(self) -> str | None:
        """Reads the whole file. Returns the first layer whose bytes differ from what was written, or None."""
        view = memoryview(self.memory)
        for name, blob in self.blobs.items():
            if zlib.crc32(view[blob.offset : blob.offset + blob.num_bytes]) != blob.crc32:
                return name
        return None


def open_packed_file(path: Path, key: Key | None = None) -> PackedFile:
    """Maps a file. With `key`, only a file made for exactly that key.

    Raises OSError, and InvalidPackedFileError for a file that is truncated, damaged, of another version or of another
    user.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0):
            raise InvalidPackedFileError("it belongs to another user")
        table_offset, table = _read_table(file.read(HEADER.size), status.st_size, file)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        blobs = {name: Blob(*map(int, row)) for name, row in table["blobs"].items()}
        found_key, source = dict(table["key"]), str(table["source"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InvalidPackedFileError(f"its table is not one: {e}") from None
    for name, blob in blobs.items():
        if not HEADER.size <= blob.offset <= blob.offset + blob.num_bytes <= table_offset or blob.num_bytes < 0:
            raise InvalidPackedFileError(f"layer {name} lies outside of it")
        if blob.num_bytes <= SUMMED_BYTES:
            content = memory[blob.offset : blob.offset + blob.num_bytes]
            if zlib.crc32(content) != blob.crc32:
                raise InvalidPackedFileError(f"layer {name} is damaged")
    if key is not None and found_key != _as_json(key):
        raise OtherKeyError("it was made for something else")
    return PackedFile(path, found_key, source, blobs, memory)


def _read_table(header: bytes, file_bytes: int, file: Any) -> tuple[int, dict[str, Any]]:
    if len(header) < HEADER.size:
        raise InvalidPackedFileError("it is too short")
    magic, version, _, offset, num_bytes, digest = HEADER.unpack(header)
    if (magic, version) != (MAGIC, VERSION):
        raise InvalidPackedFileError("it is no file of packed weights of this version")
    if offset + num_bytes != file_bytes or num_bytes > MAX_TABLE_BYTES or offset < HEADER.size:
        raise InvalidPackedFileError(f"it has {file_bytes} bytes and should have {offset + num_bytes}")
    file.seek(offset)
    text = file.read(num_bytes)
    if hashlib.sha256(text).digest() != digest:
        raise InvalidPackedFileError("its table is damaged")
    table = json.loads(text)
    if not isinstance(table, dict):
        raise InvalidPackedFileError("its table is not one")
    return offset, table


def _as_json(key: Key) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json.dumps(key))
    return value


class PackedFileWriter:
    """Writes one file, layer by layer, under a temporary name until `commit`. Methods raise OSError."""

    def __init__(self, path: Path, key: Key, source: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._key, self._source = path, key, source
        self._part = path.with_name(f"{path.name}.{os.getpid()}-{time.monotonic_ns():x}.part")
        self._file = os.fdopen(os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._blobs: dict[str, list[int]] = {}
        self._offset = ALIGNMENT

    def add(self, name: str, data: memoryview) -> None:
        """Appends a layer's bytes."""
        self._file.seek(self._offset)
        checksum = 0
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            self._file.write(chunk)
            checksum = zlib.crc32(chunk, checksum)
        self._blobs[name] = [self._offset, len(data), checksum]
        self._offset += -(-len(data) // ALIGNMENT) * ALIGNMENT

    def commit(self) -> None:
        """Completes the file, syncs it to the disk and gives it its name."""
        table = json.dumps({"key": self._key, "source": self._source, "blobs": self._blobs}).encode()
        self._file.seek(self._offset)
        self._file.write(table)
        header = HEADER.pack(MAGIC, VERSION, 0, self._offset, len(table), hashlib.sha256(table).digest())
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self._path)

    def discard(self) -> None:
        """Deletes the temporary file. May be called at any time."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)


class PackedCache:
    """A directory of packed files. Any of them may be deleted at any time, also while it is in use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @staticmethod
    def default() -> PackedCache:
        """Returns the packed-weight cache of the current user."""
        return PackedCache(cache_root() / "packed")

    @staticmethod
    def of_adapters() -> PackedCache:
        """Returns the cache of packed adapters of the current user."""
        return PackedCache(cache_root() / "lora")

    def path_of(self, key: Key) -> Path:
        """Returns the path of the file of `key`. The code that packs is no part of it: the file an upgrade writes
        replaces the former one."""
        return self._place_of({name: value for name, value in key.items() if name != "code"}, SUFFIX)

    def _place_of(self, key: Key, suffix: str) -> Path:
        text = json.dumps(key, sort_keys=True).encode()
        return self.directory / f"{hashlib.sha256(text).hexdigest()[:32]}{suffix}"

    def read_link(self, key: Key) -> str | None:
        """Returns what was written for `key`; None if nothing was."""
        with contextlib.suppress(OSError, ValueError):
            return self._place_of(key, LINK_SUFFIX).read_text("ascii")
        return None

    def write_link(self, key: Key, text: str) -> None:
        """Writes a short text for `key`. Raises OSError."""
        path = self._place_of(key, LINK_SUFFIX)
        part = path.with_name(f"{path.name}.{os.getpid()}-{time.monotonic_ns():x}.part")
        part.write_text(text, "ascii")
        part.replace(path)

    def open(self, key: Key) -> PackedFile | None:
        """Returns the file of `key` and marks it as used; None if there is no valid one."""
        path = self.path_of(key)
        try:
            file = open_packed_file(path, key)
        except FileNotFoundError:
            return None
        except OtherKeyError as e:
            logger.info("%s is not used: %s", path, e)
            return None
        except (OSError, ValueError, InvalidPackedFileError) as e:
            logger.warning("%s is not used: %s", path, e)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # `trim` sorts by this time
        return file

    def files(self) -> list[Path]:
        """Returns all files, the most recently used first."""
        return sorted(self._listing(SUFFIX), key=lambda path: -_mtime(path))

    def trim(self, max_bytes: int) -> None:
        """Deletes the least recently used files until `max_bytes` are left, and the remains of killed writers."""
        kept = 0
        for path in self.files():
            kept += _size(path)
            if kept > max_bytes:
                logger.info("%s is deleted: the cache may hold %.1f GiB", path, max_bytes / GIB)
                remove(path)
        for suffix, age in ((".part", STALE_PART_S), (LINK_SUFFIX, UNUSED_LINK_S)):
            for path in self._listing(suffix):
                if time.time() - _mtime(path) > age:
                    remove(path)

    def clear(self) -> int:
        """Deletes everything. Returns the bytes that were freed."""
        freed = 0
        for path in [*self.files(), *self._listing(".part"), *self._listing(LINK_SUFFIX)]:
            freed += _size(path)
            remove(path)
        return freed

    def _listing(self, suffix: str) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (path for path in self.directory.iterdir() if path.name.endswith(suffix))


def cache_root() -> Path:
    """Returns the directory of what may be deleted: QUIRE_CACHE_ROOT, or quire in XDG_CACHE_HOME or ~/.cache."""
    root = envs.CACHE_ROOT.get() or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "quire")
    return Path(root).expanduser()


def max_cache_bytes() -> int:
    """Returns the size limit of the cache, QUIRE_WEIGHT_CACHE_GIB. Raises ConfigError if that is no number."""
    return int(envs.WEIGHT_CACHE_GIB.number() * GIB)


def remove(path: Path) -> None:
    """Deletes a file. A file that is missing or may not be deleted is no error."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _mtime(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
