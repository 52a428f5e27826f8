"""--trace-file: a trace that is written while the engine runs, by a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from quire.engine.files import BackgroundFile
from quire.engine.step_tracer import StepTracer
from quire.wire.chrome_trace import ChromeTrace, Event
from quire.wire.trace import PhaseTrace, StepTrace

WRITE_INTERVAL_S = 0.5
MAX_PENDING = 1 << 17
"""Events; a disk that is slower than the engine ends the trace, not the engine."""


class TraceFile(StepTracer):
    """A JSON array of trace events, one a line. A file whose end is missing is read by Perfetto, too."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file exists or cannot be made."""
        super().__init__(self._note)
        self._trace = ChromeTrace()
        self._pending: list[StepTrace | PhaseTrace] = []
        head = b"[\n" + b",\n".join(map(msgspec.json.encode, self._trace.start()))
        self._file = BackgroundFile(path, "--trace-file", WRITE_INTERVAL_S, self._take, head=head, tail=b"\n]\n")

    def _note(self, event: StepTrace | PhaseTrace) -> None:
        if self._file.is_over:
            return
        self._pending.append(event)
        if len(self._pending) > MAX_PENDING:
            self._file.give_up(f"{MAX_PENDING} events wait to be written")

    def close(self) -> None:
        """Write what is left, and the end. May be called twice."""
        self._file.close()

    def _take(self) -> bytes:
        pending, self._pending = self._pending, []
        return b"".join(b",\n" + msgspec.json.encode(event) for event in self._to_events(pending))

    def _to_events(self, noted: Iterable[StepTrace | PhaseTrace]) -> Iterator[Event]:
        for one in noted:
            yield from self._trace.steps([one]) if isinstance(one, StepTrace) else self._trace.phases([one])
