"""The directory of a KV store: which extents there are, how much they may take, and which goes first.

Any number of processes share a directory. Each lists it; one at a time, which holds the flock of the file `lock`, opens
extents and deletes them. An open extent counts with the size that it may reach, so the directory never exceeds its
bound. Times of an extent: modified when it was last written, accessed when a record of it was last used.

Records are tagged under the directory's key, 32 random bytes: only processes of its owner can add to it. Several hosts
share a directory by one key file, which QUIRE_KV_STORE_KEY_FILE names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire import envs
from quire.errors import ConfigError
from quire.failpoints import failpoint
from quire.kv_store.extent import (
    EXTENT_BYTES,
    NAMESPACE_DIGITS,
    SUFFIX,
    ExtentWriter,
    InvalidExtentError,
    Table,
    open_extent,
    read_table,
    seal_orphan,
    try_lock,
)
from quire.logger import init_logger

logger = init_logger(__name__)

KEY_BYTES = 32
KEY_NAME = "key"
LOCK_NAME = "lock"
LOCK_WAIT_S, LOCK_POLL_S = 0.5, 0.002
MIN_FREE_BYTES = 1 << 30
"""Bytes of the file system that stay free."""
MIN_STORE_BYTES = 256 << 20
PROTECTED_SHARE = 0.8
"""Share of the bound that extents which were used may take before the oldest of them are treated as unused ones."""
CLOCK_SKEW_NS = 600 * 10**9
"""Most nanoseconds by which the clocks of hosts that share a directory are expected to differ."""
GIB = 1 << 30
_NAME = re.compile(
    rf"(?P<namespace>[0-9a-f]{{{NAMESPACE_DIGITS}}})-(?P<pid>\d{{1,10}})-(?P<n>\d{{1,12}}){re.escape(SUFFIX)}"
)


@dataclass(frozen=True, slots=True)
class ExtentFile:
    """One extent as the directory lists it."""

    name: str
    namespace: str
    inode: int
    num_bytes: int
    written_ns: int
    used_ns: int

    @property
    def identity(self) -> tuple[str, int, int, int]:
        """Facts that differ after any change."""
        return self.name, self.inode, self.num_bytes, self.written_ns

    @property
    def is_used(self) -> bool:
        """True if a record of it was used since it was written."""
        return self.used_ns > self.written_ns


class StoreFullError(OSError):
    """The store has no room for another extent. Its message gives the reason."""


class StoreDirectory:
    """An open directory. Methods may be called from any thread; they raise OSError."""

    def __init__(self, path: Path, max_bytes: int, key: bytes, descriptor: int) -> None:
        """`descriptor`: of the directory; it is closed by `close`."""
        self.path, self.max_bytes, self.key = path, max_bytes, key
        self.descriptor = descriptor
        self.extent_bytes = min(EXTENT_BYTES, max_bytes // 16)
        self._sealed: set[tuple[str, int, int, int]] = set()
        """The identities of extents that are known to be sealed: such a file never changes."""

    @staticmethod
    def open(path: Path, max_bytes: int, *, is_made: bool = True) -> StoreDirectory:
        """Opens a directory; `is_made`: it and its key are made if need be, and there must be room for an extent
        unless `max_bytes` is 0. Raises ConfigError with the remedy."""
        try:
            if is_made:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as e:  # ValueError: a path with a null character
            why = getattr(e, "strerror", None) or e
            why = "it is no directory" if isinstance(e, FileExistsError | NotADirectoryError) else why
            raise ConfigError(f"the KV store {path} cannot be made or opened: {why}; name another directory") from None
        try:
            _check_directory(path, os.fstat(descriptor))
            store = StoreDirectory(path, max_bytes, load_key(path, is_made=is_made), descriptor)
            if is_made and max_bytes:
                store._check_room()
        except BaseException:
            os.close(descriptor)
            raise
        return store

    @staticmethod
    def open_for_key(path: str) -> StoreDirectory:
        """Opens a directory for its key, which is made if need be; no records are kept in it. Raises ConfigError."""
        return StoreDirectory.open(Path(path).expanduser(), 0)

    def close(self) -> None:
        """Closes the directory. No method may be called after it but this one."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def list_extents(self) -> list[ExtentFile]:
        """Returns the extents that are private files of this user."""
        found = []
        # A descriptor of its own: two threads that read by one share its position, and each misses what the other got.
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    match = _NAME.fullmatch(entry.name)
                    if match is None:
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        is_file = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
                        if is_file and status.st_uid == os.geteuid():
                            found.append(_describe(entry.name, match["namespace"], status))
        finally:
            os.close(descriptor)
        return found

    @contextlib.contextmanager
    def opened(self, name: str, *, is_writable: bool = False) -> Iterator[int]:
        """Opens an extent, and closes it. Raises OSError."""
        descriptor = open_extent(self.descriptor, name, is_writable=is_writable)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def load_table(self, extent: ExtentFile) -> Table | None:
        """Returns the table of a sealed extent; None for an open one. Raises OSError."""
        try:
            with self.opened(extent.name) as descriptor:
                table = read_table(descriptor, self.key)
        except InvalidExtentError:
            return None
        self._sealed.add(extent.identity)
        return table

    def seal_if_orphan(self, extent: ExtentFile) -> bool:
        """Seals an open extent whose writer has died, or deletes it if it holds nothing. Returns whether it did."""
        with self.opened(extent.name, is_writable=True) as descriptor:
            if not try_lock(descriptor) or os.fstat(descriptor).st_nlink == 0:
                return False
            if not seal_orphan(descriptor, self.key, extent.namespace):
                self.remove(extent.name)
        return True

    def create_extent(self, fingerprint: bytes) -> ExtentWriter:
        """Opens a new extent, for which older ones are deleted if need be. Raises StoreFullError if there is no room
        for it, or another process is at it for long: the workers of an engine open theirs at about the same time."""
        with self.locked(LOCK_WAIT_S):
            self.make_room(self.extent_bytes)
            return ExtentWriter(self.descriptor, fingerprint, self.key, self.extent_bytes)

    @contextlib.contextmanager
    def locked(self, wait_s: float = 0.0) -> Iterator[None]:
        """Holds the right to open and delete extents. Raises StoreFullError if another process has it, and does not
        give it back in time."""
        descriptor = os.open(
            LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self.descriptor
        )
        try:
            deadline = time.monotonic() + wait_s
            while not try_lock(descriptor):
                if time.monotonic() >= deadline:
                    raise StoreFullError(errno.EAGAIN, "another process makes room")
                time.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def make_room(self, num_bytes: int) -> None:
        """Deletes extents until `num_bytes` more may be written; the caller holds the lock. Raises StoreFullError."""
        extents = self.list_extents()
        self._sealed &= {extent.identity for extent in extents}
        sizes = {extent.name: self._size_of(extent) for extent in extents}
        total = sum(sizes.values())
        latest_ns = time.time_ns() + CLOCK_SKEW_NS
        candidates = iter(eviction_order(extents, int(PROTECTED_SHARE * self.max_bytes), latest_ns))
        while total + num_bytes > self.max_bytes or self._free_bytes() < MIN_FREE_BYTES + num_bytes:
            extent = next(candidates, None)
            if extent is None:
                raise StoreFullError(
                    errno.ENOSPC, f"{total / GIB:.2f} GiB are in use by open extents, or the disk is full"
                )
            if self.is_sealed(extent):
                self.remove(extent.name)
                total -= sizes[extent.name]

    def remove_namespace(self, fingerprint: bytes) -> int:
        """Deletes all extents of a namespace, those that are open too: their writers begin others. Returns their
        number."""
        names = self.list_namespace(fingerprint)
        for name in names:
            self.remove(name)
        return len(names)

    def list_namespace(self, fingerprint: bytes) -> list[str]:
        """Returns the names of all extents of a namespace."""
        return [one.name for one in self.list_extents() if one.namespace == fingerprint.hex()[:NAMESPACE_DIGITS]]

    def remove(self, name: str) -> None:
        """Deletes an extent. Processes that have it open read on."""
        failpoint("kv.evict")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def note_use(self, extent: ExtentFile, now_ns: int) -> None:
        """Records that an extent was used: its time of access is set, that of its last change stays."""
        with contextlib.suppress(FileNotFoundError):
            times = (max(now_ns, extent.written_ns + 1), extent.written_ns)
            os.utime(extent.name, ns=times, dir_fd=self.descriptor, follow_symlinks=False)

    def count_bytes(self) -> int:
        """Returns the bytes of all extents, open ones as they are."""
        return sum(extent.num_bytes for extent in self.list_extents())

    def _size_of(self, extent: ExtentFile) -> int:
        """Returns the size of a sealed extent, and what an open one may reach."""
        return extent.num_bytes if self.is_sealed(extent) else max(extent.num_bytes, self.extent_bytes)

    def is_sealed(self, extent: ExtentFile) -> bool:
        """Returns whether an extent has a valid table."""
        if extent.identity in self._sealed:
            return True
        with contextlib.suppress(OSError):
            return self.load_table(extent) is not None
        return False

    def _free_bytes(self) -> int:
        status = os.fstatvfs(self.descriptor)
        return status.f_bavail * status.f_frsize

    def _check_room(self) -> None:
        """Raises ConfigError if not even one extent has room."""
        free = self._free_bytes() + self.count_bytes()
        if free < MIN_FREE_BYTES + self.extent_bytes:
            raise ConfigError(
                f"the file system of the KV store {self.path} has {free / GIB:.2f} GiB for it, and 1 GiB of it stays "
                "free; name a directory with more room"
            )


def _check_directory(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the KV store {path} belongs to user {status.st_uid} and this process is user {os.geteuid()}; what is in "
            "it decides what requests read, so name a directory of your own"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"the KV store {path} is open to others (mode {stat.S_IMODE(status.st_mode):o}), and would hold prompts; "
            f"chmod 700 it, or name a new directory in it"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"the KV store {path} is not writable; chmod 700 it, or name another directory")


def _describe(name: str, namespace: str, status: os.stat_result) -> ExtentFile:
    return ExtentFile(name, namespace, status.st_ino, status.st_size, status.st_mtime_ns, status.st_atime_ns)


def eviction_order(
    extents: Iterable[ExtentFile], max_protected_bytes: int, latest_ns: int = sys.maxsize
) -> list[ExtentFile]:
    """Returns the extents in the order in which they are deleted: a segmented LRU.

    Those that were never used go first, the oldest before the newer. The most recently used ones are protected up to
    `max_protected_bytes`; used ones beyond that are among the former. An extent of a time after `latest_ns` counts as
    the oldest: the clock was set back since.
    """

    def age(extent: ExtentFile) -> tuple[int, str]:
        time_ns = max(extent.used_ns, extent.written_ns)
        return (time_ns if time_ns <= latest_ns else 0), extent.name

    used = sorted((e for e in extents if e.is_used), key=age, reverse=True)
    protected: list[ExtentFile] = []
    room = max_protected_bytes
    for extent in used:
        room -= extent.num_bytes
        if room >= 0:
            protected.append(extent)
    kept = {extent.name for extent in protected}
    return [*sorted((e for e in extents if e.name not in kept), key=age), *reversed(protected)]


# -- the key --------------------------------------------------------------------------------------------------------


def has_key(directory: str) -> bool:
    """Returns whether there is a key for a directory: none would be made."""
    return bool(envs.KV_STORE_KEY_FILE.get()) or os.path.lexists(Path(directory).expanduser() / KEY_NAME)


def load_key(directory: Path, *, is_made: bool = True) -> bytes:
    """Returns the key of a directory; `is_made`: it is made if there is none. Raises ConfigError."""
    given = envs.KV_STORE_KEY_FILE.get()
    if given:
        return _read_key(Path(given), f"QUIRE_KV_STORE_KEY_FILE {given}", is_secret_mount=True)
    path = directory / KEY_NAME
    if is_made and not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):
            _make_key(path)
    return _read_key(path, str(path))


def _make_key(path: Path) -> None:
    """Writes a new key. A file of another name is linked when it is complete: a reader never sees a part of it."""
    part = path.with_name(f"{KEY_NAME}.{secrets.token_hex(8)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
        finally:
            os.close(descriptor)
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError as e:
        raise ConfigError(f"no key can be written to the KV store {path.parent}: {e.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _read_key(path: Path, name: str, *, is_secret_mount: bool = False) -> bytes:
    """Reads a key. One that is mounted as a secret may be a link, and may belong to root and a group."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if is_secret_mount else os.O_NOFOLLOW)
    owners, forbidden = ((os.geteuid(), 0), 0o007) if is_secret_mount else ((os.geteuid(),), 0o077)
    try:
        descriptor = os.open(path, flags)
    except OSError as e:
        remedy = "name a file of 32 bytes" if is_secret_mount else "a server with --kv-store makes one if there is none"
        raise ConfigError(f"the key of the KV store, {name}, cannot be read: {e.strerror}; {remedy}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners:
            remedy = "name another" if is_secret_mount else "delete it, or use another directory"
            raise ConfigError(f"the key of the KV store, {name}, is not a file of this user; {remedy}")
        if status.st_mode & forbidden:
            raise ConfigError(f"the key of the KV store, {name}, can be read by others; chmod 600 it, or delete it")
        key = os.read(descriptor, KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"the key of the KV store, {name}, has {status.st_size} bytes and must have {KEY_BYTES}; delete it (what "
            f"is stored is computed again), or make one: head -c {KEY_BYTES} /dev/urandom"
        )
    return key
