"""The heartbeat page: a small shared file in which a core writes what it is doing.

The core writes it at each change of phase, and twice a second while idle; the frontend reads it. So a hang is noticed
without a message, a long step is not taken for one, and after a death the frontend knows which requests were in the
step. All times are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 1 << 16
_SEQUENCE = struct.Struct("<Q")
"""First word of the page: odd while the writer writes. Written and read as one aligned word."""
_HEADER = struct.Struct("<IIQQQI")
"""Then incarnation, phase, step, phase start in ns, expected ns, bytes of request ids; the ids follow."""
_IDS_START = _SEQUENCE.size + _HEADER.size
_INTAKE = struct.Struct("<H")
_INTAKE_START = PAGE_BYTES - 1024
"""Length and id of the request that is being prepared, written by another thread than the rest."""
_EVENTS_START = PAGE_BYTES - _SEQUENCE.size
"""Sequence number of the next batch of KV cache events: one aligned word, written by a third thread."""
_WORKER_START = _EVENTS_START - 1
"""The end of a worker: a byte, written once, when the core is about to end for it."""
_IDS_ROOM, _INTAKE_ROOM = _INTAKE_START - _IDS_START, _WORKER_START - _INTAKE_START - _INTAKE.size
IDLE_STAMP_INTERVAL_S = 0.5
"""Seconds between two writes of an idle core."""


class Phase(IntEnum):
    """Activity of a core."""

    STARTING = 0
    """Loading, allocating, warming up."""
    IDLE = 1
    """Waiting for requests."""
    INPUT = 2
    """Taking in requests and control calls."""
    SCHEDULE = 3
    EXECUTE = 4
    """Running the model."""
    UPDATE = 5
    """Taking in its result."""
    STOPPED = 6
    """Ended on purpose."""
    DRAFT = 7
    """Drafting tokens for the next step."""


_PHASES = frozenset(Phase)


class WorkerEnd(IntEnum):
    """End of a worker process, for which its core has ended."""

    NONE = 0
    """No worker has ended."""
    KILLED = 1
    """Ended by a signal."""
    EXITED = 2


_ENDS = frozenset(WorkerEnd)


class Heartbeat(NamedTuple):
    """One reading of the page."""

    incarnation: int
    phase: Phase
    step: int
    """Number of steps begun since the start; during the start, the number of the stage."""
    phase_start: float
    """CLOCK_MONOTONIC, seconds."""
    expected_s: float
    """Seconds that the core expects this phase to take; 0 if unknown."""
    request_ids: tuple[str, ...]
    """Requests in the present step; empty outside a step, or if the core died while it wrote them."""
    intake_id: str = ""
    """The request that is being prepared; empty for none."""
    worker_end: WorkerEnd = WorkerEnd.NONE

    @property
    def suspects(self) -> tuple[str, ...]:
        """Requests in work: the one being prepared, and those in the step."""
        return (self.intake_id, *self.request_ids) if self.intake_id else self.request_ids

    def age(self, now: float) -> float:
        """Returns the seconds in this phase, or since the last write of an idle core. `now` is `time.monotonic()`."""
        return now - self.phase_start


class HeartbeatPage:
    """The page of one writer (and a second thread for the intake) and its readers.

    A reader never blocks the writer (a sequence lock).
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._sequence = 0
        self._num_id_bytes = 0
        self.incarnation = 0
        self.step = 0
        self._is_starting = False

    @classmethod
    def create(cls, path: Path, event_sequence: int = 0) -> HeartbeatPage:
        """Makes a new page, all zero but `event_sequence`: STARTING since the system's start. Called by the frontend
        before the core starts."""
        path.write_bytes(b"\0" * PAGE_BYTES)
        path.chmod(0o600)
        page = cls.open(path)
        page.event_sequence = event_sequence
        return page

    @classmethod
    def open(cls, path: Path) -> HeartbeatPage:
        """Opens an existing page. Raises OSError or ValueError if there is none of the right size."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), PAGE_BYTES))

    def begin_stage(self, stage: int, allowance_s: float = 0.0) -> None:
        """Enters a stage of the start, which may take `allowance_s`. Stages are numbered upwards from 1; a page never
        written is in stage 0."""
        self._is_starting, self.step = True, stage
        self._write(Phase.STARTING, allowance_s, None)

    def begin_phase(self, phase: Phase, expected_s: float = 0.0) -> None:
        """Enters a phase now. A step's request ids stay until the next `begin_step` or IDLE."""
        if self._is_starting:
            self._is_starting, self.step = False, 0
        if phase is Phase.IDLE:
            self._num_id_bytes = 0
        self._write(phase, expected_s, None)

    def begin_step(self, request_ids: Iterable[str], expected_s: float = 0.0) -> None:
        """Enters EXECUTE with these requests. Leaves out ids beyond the page's size."""
        self.step += 1
        ids = "\n".join(request_ids).encode()
        if len(ids) > _IDS_ROOM:
            ids = ids[: ids.rfind(b"\n", 0, _IDS_ROOM + 1)]
        self._write(Phase.EXECUTE, expected_s, ids)

    def begin_intake(self, request_id: str) -> None:
        """Writes the request that is being prepared on the input thread. This part may be written while another thread
        writes the rest."""
        data = request_id.encode()[:_INTAKE_ROOM]
        self._memory[_INTAKE_START : _INTAKE_START + _INTAKE.size + len(data)] = _INTAKE.pack(len(data)) + data

    def end_intake(self) -> None:
        """Clears the request that was being prepared."""
        self._memory[_INTAKE_START : _INTAKE_START + _INTAKE.size] = _INTAKE.pack(0)

    def note_worker_end(self, end: WorkerEnd) -> None:
        """Writes how a worker has ended."""
        self._memory[_WORKER_START] = end

    def _write(self, phase: Phase, expected_s: float, ids: bytes | None) -> None:
        memory = self._memory
        memory[: _SEQUENCE.size] = _SEQUENCE.pack(self._sequence + 1)
        if ids is not None:
            self._num_id_bytes = len(ids)
            memory[_IDS_START : _IDS_START + len(ids)] = ids
        start, expected = time.monotonic_ns(), int(expected_s * 1e9)
        memory[_SEQUENCE.size : _IDS_START] = _HEADER.pack(
            self.incarnation, phase, self.step, start, expected, self._num_id_bytes
        )
        self._sequence += 2
        memory[: _SEQUENCE.size] = _SEQUENCE.pack(self._sequence)

    def get_heartbeat(self) -> Heartbeat:
        """Reads the page. Tries again while the writer writes.

        Of a writer that died while it wrote, everything but the request ids is returned. Invalid contents are read as
        STARTING.
        """
        for _ in range(100):
            sequence = self._memory[: _SEQUENCE.size]
            incarnation, phase, step, start, expected, num_bytes = _HEADER.unpack_from(self._memory, _SEQUENCE.size)
            ids = self._memory[_IDS_START : _IDS_START + num_bytes]
            is_whole = sequence[0] % 2 == 0 and sequence == self._memory[: _SEQUENCE.size]
            if is_whole:
                break
        names = tuple(ids.decode(errors="replace").split("\n")) if ids and is_whole else ()
        known = Phase(phase) if phase in _PHASES else Phase.STARTING
        end = self._memory[_WORKER_START]
        return Heartbeat(
            *(incarnation, known, step, start / 1e9, expected / 1e9, names, self._read_intake()),
            WorkerEnd(end) if end in _ENDS else WorkerEnd.NONE,
        )

    def _read_intake(self) -> str:
        (num_bytes,) = _INTAKE.unpack_from(self._memory, _INTAKE_START)
        start = _INTAKE_START + _INTAKE.size
        return self._memory[start : start + num_bytes].decode(errors="replace")

    @property
    def event_sequence(self) -> int:
        """Sequence number of the next batch of KV cache events, which goes on over restarts."""
        (sequence,) = _SEQUENCE.unpack_from(self._memory, _EVENTS_START)
        return int(sequence)

    @event_sequence.setter
    def event_sequence(self, sequence: int) -> None:
        _SEQUENCE.pack_into(self._memory, _EVENTS_START, sequence)

    def close(self) -> None:
        """Unmaps the page. Its owner deletes the file."""
        self._memory.close()
