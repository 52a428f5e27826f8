"""Keeps Ctrl-C out of half-done bookkeeping, lets it end a download, and wakes threads.

When the engine lives in the user's process, Python raises KeyboardInterrupt between any two bytecodes, also in the
middle of a linked-list operation. While the engine core or the frontend works on its state, the interrupt is therefore
only noted, and raised when the state is consistent again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

is_command = False
"""True in a process that runs one of the commands of `quire`."""


@contextlib.contextmanager
def ending_process(clean_up: Callable[[], None]) -> Iterator[None]:
    """Lets Ctrl-C end a command, after `clean_up`, without waiting for its threads."""

    def end(signum: int, frame: FrameType | None) -> None:
        clean_up()
        os.write(2, b"\n")
        os._exit(128 + signum)

    before = signal.getsignal(signal.SIGINT)
    if not is_command or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class InterruptShield:
    """A context that holds Ctrl-C back until its end.

    While `may_break` is set (the worker computes, which may take seconds or hang) a second Ctrl-C is raised at once;
    the code that set it must be able to recover. Does nothing outside the main thread, where Python raises no
    KeyboardInterrupt, where the application handles SIGINT itself, and inside another shield.
    """

    def __init__(self) -> None:
        self.may_break = False
        self._num_held = 0
        self._is_active = False

    def __enter__(self) -> InterruptShield:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._is_active = True
            signal.signal(signal.SIGINT, self._hold)
        return self

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        self._num_held += 1
        if self.may_break and self._num_held > 1:
            raise KeyboardInterrupt

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._num_held and exc is None:
            raise KeyboardInterrupt


class Wakeup:
    """A pipe of a thread to itself. `set` may be called from any thread, from a finalizer and from a signal handler."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_closed = False
        self._lock = threading.RLock()  # reentrant: a finalizer may run inside `set` and call it

    def set(self) -> None:
        """Makes `fd` readable."""
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread wakes up anyway
                    os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Makes `fd` unreadable again. Call this before reading what was posted, not after."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Closes the pipe; called by the woken thread. `set` does nothing from then on."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
                os.close(self._write_fd)
