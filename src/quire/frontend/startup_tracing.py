"""An engine's start as a tree of phases, for whoever collects spans (checklist S3-TR-001). Knows no exporter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from quire.timeline import Stamp

PREPARE_MODEL = ("KV cache", "warm-up")
"""The stamps of the phase that vLLM calls "Prepare model"."""


@dataclass(slots=True)
class StartPhase:
    """Something that took time at a start; seconds by the wall clock."""

    name: str
    start_time: float
    end_time: float
    cpu_s: float
    """CPU time that its process used meanwhile, over all threads."""
    phases: list[StartPhase] = field(default_factory=list)


def make_start_phases(frontend: Sequence[Stamp], core: Sequence[Stamp]) -> StartPhase:
    """One process after the other, each phase from one stamp to the next; both lists begin with the process.

    `core` is empty where the core lives in the frontend's process, whose list then has the core's stamps, too.
    """
    to_wall = time.time() - time.monotonic()
    whole = _make_process("engine start", frontend, to_wall)
    if core:
        whole.phases.append(_make_process("EngineCoreProc init", core, to_wall))
    return whole


def _make_process(name: str, stamps: Sequence[Stamp], to_wall: float) -> StartPhase:
    whole = _make_phase(name, stamps[0], stamps[-1], to_wall)
    prepare: StartPhase | None = None
    for before, stamp in pairwise(stamps):
        phase = _make_phase(stamp.name, before, stamp, to_wall)
        if stamp.name not in PREPARE_MODEL:
            whole.phases.append(phase)
            continue
        if prepare is None:
            prepare = _make_phase("Prepare model", before, stamp, to_wall)
            whole.phases.append(prepare)
        prepare.phases.append(phase)
        prepare.end_time = phase.end_time
        prepare.cpu_s = sum(part.cpu_s for part in prepare.phases)
    return whole


def _make_phase(name: str, start: Stamp, end: Stamp, to_wall: float) -> StartPhase:
    return StartPhase(name, start.time_s + to_wall, end.time_s + to_wall, end.cpu_s - start.cpu_s)
