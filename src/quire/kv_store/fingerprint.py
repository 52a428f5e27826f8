"""The fingerprint: a digest of all that decides a block's bytes besides its tokens.

Two processes share records exactly if their fingerprints are equal. Weights count by content: changed weights of one
name are another namespace. A file is hashed once and remembered by its inode, size and times; of several processes that
need its digest one hashes it, and the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.kv_store.extent import try_lock
from quire.kv_store.record import VERSION

MEMO_NAME = "digests.json"
LOCK_NAME = "digests.lock"
WAIT_S = 0.02
"""Interval at which a process looks whether another has hashed a file."""
MAX_WAIT_S = 600.0
"""Time after which it hashes beside another, which may hang."""
MAX_MEMO_BYTES = 4 << 20
MAX_MEMO_FILES = 4096
_CHUNK_BYTES = 8 << 20
_TAG = b"quire kv fingerprint of records %d\n"
_BLOB = re.compile(r"[0-9a-f]{64}")


class ChangedFileError(Exception):
    """A file was changed after the process had begun to read it: what is in memory is not known."""


class HashingStoppedError(Exception):
    """The process ends, or needs no digest any more."""


def make_fingerprint(facts: Mapping[str, Any]) -> bytes:
    """Returns the digest of facts, which are JSON values, and of the version of records."""
    return hashlib.sha256(_TAG % VERSION + json.dumps(facts, sort_keys=True, allow_nan=False).encode()).digest()


class FileDigests:
    """SHA-256 of files, remembered in a directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / MEMO_NAME
        self._memo = self._load()

    def digest_files(
        self, paths: Iterable[Path], loaded_ns: int, is_stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, str]:
        """Returns the digests of files by name. `loaded_ns`: wall-clock time before which they were last changed.

        Raises OSError, ChangedFileError and HashingStoppedError.
        """
        return {path.name: self._digest(path, loaded_ns, is_stopped) for path in paths}

    def _digest(self, path: Path, loaded_ns: int, is_stopped: Callable[[], bool]) -> str:
        target = path.resolve(strict=True)
        with open(target, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{target} is no regular file")
            if max(status.st_mtime_ns, status.st_ctime_ns) > loaded_ns:
                raise ChangedFileError(f"{path} was changed while it was loaded")
            if target.parent.name == "blobs" and _BLOB.fullmatch(target.name):
                return target.name  # the hub's cache names files by their SHA-256
            identity = _identity(status)
            if identity in self._memo:
                return self._memo[identity]
            with self._alone(is_stopped):
                self._memo = {**self._memo, **self._load()}
                if identity in self._memo:
                    return self._memo[identity]
                digest = hashlib.sha256()
                while chunk := file.read(_CHUNK_BYTES):
                    if is_stopped():
                        raise HashingStoppedError
                    digest.update(chunk)
                if _identity(os.fstat(file.fileno())) != identity:
                    raise ChangedFileError(f"{path} was changed while it was hashed")
                self._memo[identity] = digest.hexdigest()
                self._save()
        return self._memo[identity]

    @contextlib.contextmanager
    def _alone(self, is_stopped: Callable[[], bool]) -> Iterator[None]:
        """Waits until no other process hashes a file of this directory, for MAX_WAIT_S at most, and keeps others
        waiting. Where no file can be locked, all hash."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path.with_name(LOCK_NAME), flags, 0o600)
        except OSError:
            yield
            return
        try:
            deadline = time.monotonic() + MAX_WAIT_S
            while not try_lock(descriptor) and time.monotonic() < deadline:
                if is_stopped():
                    raise HashingStoppedError
                time.sleep(WAIT_S)
            yield
        finally:
            os.close(descriptor)

    def _load(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError):
            with open(self._path, "rb", opener=_open_without_waiting) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                    return {}
                memo = json.loads(file.read(MAX_MEMO_BYTES))
            if isinstance(memo, dict):
                return {str(k): v for k, v in memo.items() if isinstance(v, str) and _BLOB.fullmatch(v)}
        return {}

    def _save(self) -> None:
        """Writes the memo, the newest entries of it. A failure costs hashing again."""
        text = json.dumps(dict(list(self._memo.items())[-MAX_MEMO_FILES:])).encode()
        part = self._path.with_name(f"{MEMO_NAME}.{secrets.token_hex(8)}.part")
        with contextlib.suppress(OSError):
            try:
                with open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    file.write(text)
                part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)


def _open_without_waiting(name: str, flags: int) -> int:
    """Opens a file; a pipe is opened at once, too, and then refused."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
