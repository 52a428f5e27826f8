"""Ctrl-C between two changes of the frontend's state, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptGuard:
    """Holds Ctrl-C back until the end of a `with` block; then it is a KeyboardInterrupt as always.

    Does nothing outside the main thread, or where the application handles SIGINT itself (or another guard does).
    """

    def __init__(self) -> None:
        self._interrupted = False
        self._active = False

    def __enter__(self) -> InterruptGuard:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._active = True
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._interrupted and error is None:
            raise KeyboardInterrupt
