"""--trace-file: a trace that is written while the engine runs, by a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from quire.engine.files import open_new_file, write_all
from quire.engine.step_tracer import StepTracer
from quire.logger import init_logger
from quire.wire.chrome_trace import ChromeTrace, Event
from quire.wire.trace import PhaseTrace, StepTrace

logger = init_logger(__name__)

WRITE_INTERVAL_S = 0.5
MAX_PENDING = 1 << 17
"""Events; a disk that is slower than the engine ends the trace, not the engine."""
END_S = 5.0


class TraceFile(StepTracer):
    """A JSON array of trace events, one a line. A file whose end is missing is read by Perfetto, too.

    When a write fails, the trace ends there, and the log says so: serving goes on.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file exists or cannot be made."""
        super().__init__(self._take)
        self._fd = open_new_file(path, "--trace-file")
        self._path = path
        self._trace = ChromeTrace()
        self._pending: list[StepTrace | PhaseTrace] = []
        self._is_over = False
        self._ends = threading.Event()
        write_all(self._fd, b"[\n" + b",\n".join(map(msgspec.json.encode, self._trace.start())))
        self._thread = threading.Thread(target=self._write_all, name="TraceWriter", daemon=True)
        self._thread.start()

    def _take(self, event: StepTrace | PhaseTrace) -> None:
        if self._is_over:
            return
        self._pending.append(event)
        if len(self._pending) > MAX_PENDING:
            self._give_up(f"{MAX_PENDING} events wait to be written")

    def close(self) -> None:
        """Write what is left, and the end. May be called twice."""
        self._ends.set()
        self._thread.join(END_S)
        self._is_over = True

    def _write_all(self) -> None:
        try:
            while not self._ends.wait(WRITE_INTERVAL_S):
                self._write_pending()
            self._write_pending()
            write_all(self._fd, b"\n]\n")
        except OSError as e:
            self._give_up(e.strerror or str(e))
        finally:
            os.close(self._fd)

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, []
        lines = b"".join(b",\n" + msgspec.json.encode(event) for event in self._to_events(pending))
        if lines:
            write_all(self._fd, lines)

    def _to_events(self, noted: Iterable[StepTrace | PhaseTrace]) -> Iterator[Event]:
        for one in noted:
            yield from self._trace.steps([one]) if isinstance(one, StepTrace) else self._trace.phases([one])

    def _give_up(self, why: str) -> None:
        if not self._is_over:
            logger.error("the trace %s ends here: %s", self._path, why)
        self._is_over = True
        self._pending = []
        self._ends.set()
