"""The supervisor's two judgements; the thread itself is tried with real processes in tests/process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.engine import LifecycleConfig
from quire.errors import EngineDeadError, NodesMissingError, QuireError
from quire.frontend.supervision import supervisor
from quire.frontend.supervision.launch import CoreLaunch, CoreProcess
from quire.frontend.supervision.supervisor import (
    MIN_STAGE_S,
    STAGE_FACTOR,
    WATCH_INTERVAL_S,
    CoreSupervisor,
    HangWatch,
    RestartBudget,
    StartWatch,
)
from quire.wire.handshake import EngineZmqAddresses
from quire.wire.heartbeat import Heartbeat, Phase


def test_a_budget_is_counted_over_a_sliding_window() -> None:
    budget = RestartBudget(3, 60.0)
    assert [budget.take(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 0.05, 0.1, None]
    assert budget.take(60.5) is not None, "the first is long ago"
    assert budget.take(60.6) is None
    assert str(budget) == "3 restarts in 60 s"


def test_the_wait_grows_and_has_an_end() -> None:
    budget = RestartBudget(20, 60.0)
    waits = [budget.take(i / 10) for i in range(20)]
    assert waits[:5] == [0.0, 0.05, 0.1, 0.2, 0.4]
    assert waits[-1] == 5.0


def test_a_budget_of_zero_allows_no_restart() -> None:
    assert RestartBudget(0, 60.0).take(0.0) is None


def beat(phase_start: float, expected_s: float = 0.0, phase: Phase = Phase.EXECUTE) -> Heartbeat:
    return Heartbeat(0, phase, 1, phase_start, expected_s, ())


def look(watch: HangWatch, beats: dict[float, Heartbeat]) -> dict[float, float | None]:
    return {now: watch.check_hang(heartbeat, now) for now, heartbeat in beats.items()}


def every_interval(start: float, end: float, heartbeat: Heartbeat) -> dict[float, Heartbeat]:
    count = int((end - start) / WATCH_INTERVAL_S)
    return {start + i * WATCH_INTERVAL_S: heartbeat for i in range(count + 1)}


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.INPUT, Phase.SCHEDULE, Phase.EXECUTE, Phase.UPDATE])
def test_a_phase_longer_than_the_limit_is_a_hang(phase: Phase) -> None:
    watch = HangWatch(10.0, now=0.0)
    seen = look(watch, every_interval(0.0, 10.5, beat(0.0, phase=phase)))
    assert [now for now, age in seen.items() if age is not None] == [10.5]


def test_a_long_step_is_no_hang() -> None:
    watch = HangWatch(10.0, now=0.0)
    seen = look(watch, every_interval(0.0, 41.0, beat(0.0, expected_s=8.0)))
    assert [now for now, age in seen.items() if age is not None] == [40.5, 41.0]


def test_a_core_that_moves_never_hangs() -> None:
    watch = HangWatch(10.0, now=0.0)
    assert not any(watch.check_hang(beat(now - 9.9), now) for now in (i * WATCH_INTERVAL_S for i in range(200)))


def test_time_in_which_we_stood_still_ourselves_does_not_count() -> None:
    """The whole machine was suspended, or the container paused: the core had no chance to stamp its page."""
    watch = HangWatch(10.0, now=0.0)
    assert watch.check_hang(beat(0.0), 0.5) is None
    assert watch.check_hang(beat(0.0), 3600.0) is None
    seen = look(watch, every_interval(3600.5, 3612.0, beat(0.0)))
    assert next(now for now, age in seen.items() if age is not None) == 3609.5


def test_looks_that_come_late_do_not_count_either() -> None:
    """A machine that gives us a processor late gives the core one no sooner."""
    watch = HangWatch(10.0, now=0.0)
    late = WATCH_INTERVAL_S * 1.5
    looks = [i * (WATCH_INTERVAL_S + late) for i in range(1, 30)]
    ages = [watch.check_hang(beat(0.0), now) for now in looks]
    assert [age is not None for age in ages] == [i * WATCH_INTERVAL_S > 10.0 for i in range(1, 30)]
    assert watch.check_hang(beat(looks[-1]), looks[-1] + 10.0 - WATCH_INTERVAL_S) is None
    watch = HangWatch(10.0, now=0.0)
    watch.check_hang(beat(0.0), late)
    seen = look(watch, every_interval(late + WATCH_INTERVAL_S, 30.0, beat(late)))
    assert next(now for now, age in seen.items() if age is not None) == late + 10.5, "of another phase"


def test_a_page_never_written_is_measured_from_when_we_began_to_look() -> None:
    assert HangWatch(10.0, now=1000.0).check_hang(beat(0.0, phase=Phase.STARTING), 1001.0) is None


# -- starts ----------------------------------------------------------------------------------------------------------


def run_start(
    watch: StartWatch, begin: float, stages: dict[int, float], until: float, *, share: float = 1.0
) -> float | None:
    """Looks ten times a second at a start whose stages begin at these offsets; returns the time of a stall. The core
    has a processor for this share of the time, and waits for one in the rest."""
    watch.begin(begin)
    for i in range(int((until - begin) * 10)):
        now = begin + i / 10
        reached = {stage: begin + offset for stage, offset in stages.items() if begin + offset <= now}
        stage = max(reached, default=0)
        starting = Heartbeat(1, Phase.STARTING, stage, reached.get(stage, 0.0), 0.0, ())
        if watch.check_stall(starting, now, (1 - share) * (now - begin)) is not None:
            return now - begin
    return None


def test_the_first_start_may_take_as_long_as_it_likes() -> None:
    assert run_start(StartWatch(), 100.0, {1: 0.5}, until=700.0) is None


def test_a_later_start_that_stands_still_is_found_by_the_stage_it_is_in() -> None:
    watch = StartWatch()
    assert run_start(watch, 100.0, {1: 0.2, 2: 0.4}, until=103.0) is None
    watch.succeed(103.0)  # stages of 0.2, 0.2 and 2.6 s
    assert run_start(watch, 200.0, {}, until=300.0) == pytest.approx(MIN_STAGE_S, abs=0.2)
    assert run_start(watch, 400.0, {1: 0.2}, until=500.0) == pytest.approx(0.2 + MIN_STAGE_S, abs=0.2)
    assert run_start(watch, 600.0, {1: 0.2, 2: 0.4}, until=700.0) == pytest.approx(0.4 + 2.6 * STAGE_FACTOR, abs=0.2)


def test_a_stage_that_was_too_long_may_take_twice_as_long_in_the_next_start() -> None:
    watch = StartWatch()
    run_start(watch, 100.0, {1: 0.2}, until=100.5)
    watch.succeed(100.5)
    stalls = [run_start(watch, begin, {1: 0.2}, until=begin + 99.0) for begin in (200.0, 300.0, 400.0)]
    assert stalls == [pytest.approx(0.2 + MIN_STAGE_S * 2.0**i, abs=0.2) for i in range(3)]


def test_a_start_slower_than_the_one_before_is_no_stall() -> None:
    watch = StartWatch()
    run_start(watch, 100.0, {1: 1.0, 2: 2.0}, until=103.0)
    watch.succeed(103.0)
    assert run_start(watch, 200.0, {1: 9.0, 2: 18.0}, until=227.0) is None


def test_a_start_that_waits_for_a_processor_is_no_stall() -> None:
    """The core is judged by the time in which it could run."""
    watch = StartWatch()
    run_start(watch, 100.0, {1: 1.0, 2: 2.0}, until=103.0)
    watch.succeed(103.0)
    assert run_start(watch, 200.0, {1: 90.0, 2: 180.0}, until=270.0, share=0.1) is None
    stalled = run_start(watch, 400.0, {1: 5.0}, until=600.0, share=0.1)
    assert stalled == pytest.approx(5.0 + 10 * STAGE_FACTOR, abs=2.0)


def test_the_system_says_how_long_a_process_has_waited_for_a_processor() -> None:
    core = object.__new__(CoreProcess)
    for pid in (os.getpid(), 2**22 + 1):  # the second is above all that there are
        core._process = SimpleNamespace(pid=pid)  # type: ignore[assignment]
        assert core.queued_s >= 0.0
    assert core.queued_s == 0.0


def test_a_start_is_not_blamed_for_time_in_which_we_stood_still() -> None:
    watch = StartWatch()
    run_start(watch, 100.0, {1: 0.2}, until=100.5)
    watch.succeed(100.5)
    watch.begin(200.0)
    starting = Heartbeat(1, Phase.STARTING, 0, 0.0, 0.0, ())
    assert watch.check_stall(starting, 260.0, 0.0) is None
    assert watch.check_stall(starting, 260.1, 0.0) is None


def test_a_core_that_waits_for_other_machines_is_no_stall() -> None:
    watch = StartWatch()
    run_start(watch, 100.0, {1: 0.2}, until=100.5)
    watch.succeed(100.5)
    watch.begin(200.0)
    waiting = Heartbeat(1, Phase.STARTING, 1, 200.0, 300.0, ())
    looks = [watch.check_stall(waiting, 200.0 + i / 10, 0.0) for i in range(3010)]
    assert not any(looks[:2990])
    assert any(looks[2990:]), "it has an end"


def test_a_core_whose_machines_do_not_come_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone, starts = list[QuireError](), list[int]()

    class Core:
        pid = 1

        def __init__(self, launch: Any, handshake: Any, incarnation: int, path: Path) -> None:
            starts.append(incarnation)
            raise NodesMissingError("machine 1") if incarnation else EngineDeadError("crashed")

    monkeypatch.setattr(supervisor, "CoreProcess", Core)
    launch = CoreLaunch(EngineZmqAddresses([], []), b"", True, 1.0, None)
    socket = SimpleNamespace(close=lambda linger: None)
    mortal = CoreSupervisor(
        launch,
        LifecycleConfig(),
        socket,  # type: ignore[arg-type]
        tmp_path,
        on_death=lambda death: None,
        on_gone=gone.append,
        was_connected=lambda incarnation: True,
        has_live_requests=lambda: True,
    )
    mortal._start_watch.has_succeeded = True
    mortal.run()
    assert (starts, [str(error) for error in gone]) == ([0, 1], ["machine 1"])
