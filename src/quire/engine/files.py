"""Files the engine core writes while it serves: always new ones, and never with a wait of its loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from quire.errors import ConfigError
from quire.logger import init_logger

logger = init_logger(__name__)

END_S = 5.0
"""How long the end of a file is waited for."""


class BackgroundFile:
    """A new file that a thread fills at intervals with what `take` hands out, there and then.

    When a write fails, or the file's owner gives up because the disk is too slow, the file ends there and the log says
    so: serving goes on. Knows nothing of what is written.
    """

    def __init__(
        self, path: Path, flag: str, interval_s: float, take: Callable[[], bytes], *, head: bytes, tail: bytes = b""
    ) -> None:
        """Raises ConfigError, naming `flag`, if the file exists or cannot be made."""
        self._path = path
        self._flag = flag
        self._interval_s = interval_s
        self._take = take
        self._tail = tail
        self._fd = open_new_file(path, flag)
        self._ends = threading.Event()
        self.is_over = False
        """Whether whatever comes now comes too late."""
        write_all(self._fd, head)
        self._thread = threading.Thread(target=self._write_all, name="BackgroundFile", daemon=True)
        self._thread.start()

    def give_up(self, why: str) -> None:
        """End the file where it is. From any thread."""
        if not self.is_over:
            logger.error("%s %s ends here: %s", self._flag, self._path, why)
        self.is_over = True
        self._ends.set()

    def close(self) -> None:
        """Write what is left, and the end. May be called twice."""
        self._ends.set()
        self._thread.join(END_S)
        self.is_over = True

    def _write_all(self) -> None:
        try:
            while not self._ends.wait(self._interval_s):
                write_all(self._fd, self._take())
            data = self._take()
            write_all(self._fd, self._tail if self.is_over else data + self._tail)
        except OSError as e:
            self.give_up(e.strerror or str(e))
        finally:
            os.close(self._fd)


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
