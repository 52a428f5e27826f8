"""The key of a store: 32 random bytes under which its records are tagged.

A record without this key's tag is never used, so that only processes of the directory's owner can add to it. Several
hosts share a directory by one key file, which QUIRE_KV_STORE_KEY_FILE names.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from quire import envs
from quire.errors import ConfigError

KEY_BYTES = 32
KEY_NAME = "key"


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
        raise ConfigError(f"the key of the KV store, {name}, cannot be read: {e.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners:
            raise ConfigError(f"the key of the KV store, {name}, is not a file of this user; delete it, or use another")
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
