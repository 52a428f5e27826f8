"""The way between the core's loop and the transfers of its workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from quire.engine.executor.abstract import Executor
from quire.engine.kv_cache.load_cost import NEVER
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput


class TransferLink:
    """Takes reports on any thread, and keeps them until the loop's thread takes them; wakes the loop for them, and at a
    set time."""

    def __init__(self, executor: Executor, wake: Callable[[], None]) -> None:
        """`wake` is called on any thread. Raises ConfigError if the workers cannot transfer blocks."""
        self.reports: deque[tuple[float, KVConnectorOutput]] = deque()
        """Reports that `take` returns."""
        self._has_reports = threading.Event()
        self._wake = wake
        self.alarm_at = NEVER
        """The time of the last alarm by the clock of the one that has set it, which keeps it here."""
        self._alarm = threading.Condition()
        self._alarm_at: float | None = None
        self._alarm_thread: threading.Thread | None = None
        self._is_closed = False
        self.clock: Callable[[], float] = time.monotonic
        """Gives the times at which reports come."""
        self.send: Callable[[KVConnectorMetadata], None] = executor.send_transfers
        """Gives orders to the workers at once."""
        executor.register_transfer_callback(self.put)

    def put(self, report: KVConnectorOutput) -> None:
        """Adds a report. Callable from any thread."""
        self.reports.append((self.clock(), report))
        self._has_reports.set()
        self._wake()

    @property
    def has_reports(self) -> bool:
        """Returns whether `take` would return anything."""
        return bool(self.reports)

    def take(self) -> list[tuple[float, KVConnectorOutput]]:
        """Returns the reports since the last call, each with the time at which it came: the loop may have been busy
        since."""
        reports: list[tuple[float, KVConnectorOutput]] = []
        while self.reports:
            reports.append(self.reports.popleft())
        return reports

    def wait(self, seconds: float) -> None:
        """Waits for a report, at most so long."""
        if not self.reports:
            self._has_reports.clear()
            if not self.reports:
                self._has_reports.wait(seconds)

    def set_alarm(self, seconds: float) -> None:
        """Wakes the loop after so many seconds; infinity: not at all. Replaces the last alarm."""
        with self._alarm:
            self._alarm_at = None if seconds == float("inf") else time.monotonic() + seconds
            if self._alarm_at is not None and self._alarm_thread is None:
                self._alarm_thread = threading.Thread(target=self._run_alarm, name="TransferAlarm", daemon=True)
                self._alarm_thread.start()
            self._alarm.notify()

    def _run_alarm(self) -> None:
        with self._alarm:
            while not self._is_closed:
                left = None if self._alarm_at is None else self._alarm_at - time.monotonic()
                if left is not None and left <= 0:
                    self._alarm_at = None
                    self._wake()
                else:
                    self._alarm.wait(left)

    def close(self) -> None:
        """Ends the alarm's thread. May be called twice."""
        with self._alarm:
            self._is_closed = True
            self._alarm.notify()
        if self._alarm_thread is not None:
            self._alarm_thread.join()
