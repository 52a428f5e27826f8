"""Getting a thread out of a poll."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """A pipe to oneself. `set` may be called from any thread, from a finalizer and from a signal handler."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_closed = False
        self._lock = threading.RLock()  # reentrant: a finalizer may run inside of `set`, and call it

    def set(self) -> None:
        """Make `fd` readable."""
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # full: the thread is woken up anyway
                    os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Make `fd` unreadable again. What was posted before is to be looked at after this, not before."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """By the woken thread. `set` does nothing from then on."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
                os.close(self._write_fd)
