"""Files the engine core writes while it serves: always new ones, and never with a wait of its loop."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import ConfigError


def open_new_file(path: Path, flag: str) -> int:
    """A descriptor to append to a file that only its owner may read. Raises ConfigError, naming `flag`, if the file
    exists or cannot be made."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{flag} {path}: the file exists; remove it, or choose another one") from None
    except OSError as e:
        raise ConfigError(f"{flag} {path}: {e.strerror or e}") from None


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
