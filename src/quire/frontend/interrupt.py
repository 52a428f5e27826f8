"""Ctrl-C between engine steps, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptGuard:
    """Turns the first Ctrl-C inside a `with` block into `interrupted = True`; the second one interrupts at once.

    A KeyboardInterrupt raised in the middle of a step would leave scheduler and worker disagreeing about what was
    computed. Does nothing outside the main thread, or where the application has a SIGINT handler of its own.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._active = False

    def __enter__(self) -> InterruptGuard:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._active = True
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.interrupted:
            signal.default_int_handler(signum, frame)
        self.interrupted = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a Ctrl-C. Call it between steps."""
        if self.interrupted:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._active = False
