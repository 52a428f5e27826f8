"""The heartbeat page: a small shared file in which a core says what it is doing, without anybody asking.

The core writes it at each change of phase, and twice a second while idle; the frontend reads it. So a hang is seen
without a message, a long step is not taken for one, and after a death the frontend knows which requests were in the
step. All stamps are CLOCK_MONOTONIC, which all processes of a host share.
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
"""First on the page: odd while the writer writes. Written and read as one aligned word."""
_HEADER = struct.Struct("<IIQQQI")
"""Then incarnation, phase, step, phase start in ns, expected ns, bytes of request ids; the ids follow."""
_IDS_START = _SEQUENCE.size + _HEADER.size
_INTAKE = struct.Struct("<H")
_INTAKE_START = PAGE_BYTES - 1024
"""Length and id of the request that is being taken in, by another thread than the one that writes the rest."""
_IDS_ROOM, _INTAKE_ROOM = _INTAKE_START - _IDS_START, PAGE_BYTES - _INTAKE_START - _INTAKE.size
IDLE_STAMP_INTERVAL_S = 0.5
"""How often an idle core stamps its page."""


class Phase(IntEnum):
    """What a core is doing."""

    STARTING = 0
    """Loading, allocating, warming up."""
    IDLE = 1
    """Waiting for requests."""
    INPUT = 2
    """Taking in requests and control calls."""
    SCHEDULE = 3
    EXECUTE = 4
    """The model runs."""
    UPDATE = 5
    """Taking in its result."""
    STOPPED = 6
    """Has ended on purpose."""


_PHASES = frozenset(Phase)


class Heartbeat(NamedTuple):
    """One reading."""

    incarnation: int
    phase: Phase
    step: int
    """Number of steps begun since the start; while the core starts, the number of the stage it has come to."""
    phase_start: float
    """CLOCK_MONOTONIC, seconds."""
    expected_s: float
    """How long the core expects this phase to take; 0 where it cannot tell."""
    request_ids: tuple[str, ...]
    """Requests in the step under way; empty outside a step, or if the core died while it wrote them."""
    intake_id: str = ""
    """The request that is being prepared for the loop; empty for none."""

    @property
    def suspects(self) -> tuple[str, ...]:
        """Whose work was being done: by the thread that takes requests in, and in the step."""
        return (self.intake_id, *self.request_ids) if self.intake_id else self.request_ids

    def age(self, now: float) -> float:
        """Seconds in this phase, or since the last stamp of an idle core. `now` is `time.monotonic()`."""
        return now - self.phase_start


class HeartbeatPage:
    """The page, for its one writer (and a second, for the intake) and its readers. A reader never blocks the writer (a
    sequence lock)."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._sequence = 0
        self._num_id_bytes = 0
        self.incarnation = 0
        self.step = 0
        self._is_starting = False

    @classmethod
    def create(cls, path: Path) -> HeartbeatPage:
        """A new page, all zero: STARTING since the system's start. Made by the frontend before the core starts."""
        path.write_bytes(b"\0" * PAGE_BYTES)
        path.chmod(0o600)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> HeartbeatPage:
        """An existing page. Raises OSError or ValueError if there is none of the right size."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), PAGE_BYTES))

    def begin_stage(self, stage: int) -> None:
        """Enters a stage of the start. Stages are numbered upwards from 1; a page never written is in stage 0."""
        self._is_starting, self.step = True, stage
        self._write(Phase.STARTING, 0.0, None)

    def begin_phase(self, phase: Phase, expected_s: float = 0.0) -> None:
        """The writer enters a phase now. A step's request ids stay until the next `begin_step` or IDLE."""
        if self._is_starting:
            self._is_starting, self.step = False, 0
        if phase is Phase.IDLE:
            self._num_id_bytes = 0
        self._write(phase, expected_s, None)

    def begin_step(self, request_ids: Iterable[str], expected_s: float = 0.0) -> None:
        """The writer enters EXECUTE with these requests. Ids beyond the page's size are left out."""
        self.step += 1
        ids = "\n".join(request_ids).encode()
        if len(ids) > _IDS_ROOM:
            ids = ids[: ids.rfind(b"\n", 0, _IDS_ROOM + 1)]
        self._write(Phase.EXECUTE, expected_s, ids)

    def begin_intake(self, request_id: str) -> None:
        """A request is being prepared, on a thread of its own. The one part of the page that may be written while
        another thread writes the rest."""
        data = request_id.encode()[:_INTAKE_ROOM]
        self._memory[_INTAKE_START : _INTAKE_START + _INTAKE.size + len(data)] = _INTAKE.pack(len(data)) + data

    def end_intake(self) -> None:
        """It is ready, or refused."""
        self._memory[_INTAKE_START : _INTAKE_START + _INTAKE.size] = _INTAKE.pack(0)

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
        """What the writer last said. While it is writing, the reading is tried again; of a writer that died over it,
        everything but the request ids is given. What no writer writes is read as STARTING."""
        for _ in range(100):
            sequence = self._memory[: _SEQUENCE.size]
            incarnation, phase, step, start, expected, num_bytes = _HEADER.unpack_from(self._memory, _SEQUENCE.size)
            ids = self._memory[_IDS_START : _IDS_START + num_bytes]
            is_whole = sequence[0] % 2 == 0 and sequence == self._memory[: _SEQUENCE.size]
            if is_whole:
                break
        names = tuple(ids.decode(errors="replace").split("\n")) if ids and is_whole else ()
        known = Phase(phase) if phase in _PHASES else Phase.STARTING
        return Heartbeat(incarnation, known, step, start / 1e9, expected / 1e9, names, self._read_intake())

    def _read_intake(self) -> str:
        (num_bytes,) = _INTAKE.unpack_from(self._memory, _INTAKE_START)
        start = _INTAKE_START + _INTAKE.size
        return self._memory[start : start + num_bytes].decode(errors="replace")

    def close(self) -> None:
        """Unmap. The file is its owner's to delete."""
        self._memory.close()
