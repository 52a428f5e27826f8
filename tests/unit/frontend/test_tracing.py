"""The start of an engine as phases."""

from __future__ import annotations

import time

import pytest

from quire.frontend.tracing import StartPhase, make_start_phases
from quire.timeline import Stamp

FRONTEND = [Stamp("process", 1.0, 0.0), Stamp("configuration", 1.5, 0.25), Stamp("engine ready", 9.0, 0.5)]
CORE = [
    Stamp("process", 2.0, 0.0),
    Stamp("weights", 5.0, 2.0),
    Stamp("KV cache", 6.0, 2.5),
    Stamp("warm-up", 8.0, 4.5),
    Stamp("ready", 8.5, 4.75),
]


def lengths(phase: StartPhase) -> list[tuple[str, float, float]]:
    return [(part.name, round(part.end_time - part.start_time, 6), part.cpu_s) for part in phase.phases]


def test_each_process_is_the_sum_of_its_phases() -> None:
    start = make_start_phases(FRONTEND, CORE)
    assert start.name == "engine start"
    assert start.end_time - start.start_time == pytest.approx(8.0)
    assert lengths(start) == [
        ("configuration", 0.5, 0.25),
        ("engine ready", 7.5, 0.25),
        ("EngineCoreProc init", 6.5, 4.75),
    ]
    core = start.phases[-1]
    assert lengths(core) == [("weights", 3.0, 2.0), ("Prepare model", 3.0, 2.5), ("ready", 0.5, 0.25)]
    assert lengths(core.phases[1]) == [("KV cache", 1.0, 0.5), ("warm-up", 2.0, 2.0)]
    assert core.start_time - start.start_time == pytest.approx(1.0)


def test_a_core_in_the_same_process_has_no_process_of_its_own() -> None:
    start = make_start_phases([*FRONTEND[:2], *CORE[1:], FRONTEND[-1]], [])
    assert [part.name for part in start.phases] == [
        "configuration",
        "weights",
        "Prepare model",
        "ready",
        "engine ready",
    ]


def test_times_are_the_walls() -> None:
    before = time.time()
    now = time.monotonic()
    after = time.time()
    start = make_start_phases([Stamp("process", now, 0.0), Stamp("engine ready", now + 1, 0.0)], [])
    assert before - 1 < start.start_time < after + 1
