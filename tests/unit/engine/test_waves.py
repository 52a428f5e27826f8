"""The waves of one engine, event by event. All orders of events are explored in `tests/simulation/test_waves.py`."""

from __future__ import annotations

from quire.coordinator import CoordinatorState, Order
from quire.engine.waves import Pause, WaveEffect, WaveState
from quire.wire.group import Verdict, Vote, agree

WORK, NONE, PAUSING = Vote(True, False), Vote(False, False), Vote(False, True)


def test_a_wave_from_the_request_to_its_end() -> None:
    running, effects = WaveState(wave=3).on_request(2)
    assert (running.is_running, running.wave, effects) == (True, 3, (WaveEffect.START_OTHERS,))
    assert running.on_request(3).effects == ()  # the coordinator knows
    stepped, effects = running.on_step(executed=True)
    assert (stepped.step, effects) == (1, ())
    assert stepped.on_step(executed=False).effects == (WaveEffect.DUMMY,)
    assert stepped.on_step(executed=False, is_asleep=True).effects == ()
    assert stepped.on_verdict(Verdict.GO, 3, True).state == stepped
    over, effects = stepped.on_verdict(Verdict.STOP, 4, False)
    assert (over, effects) == (WaveState(wave=4), (WaveEffect.REPORT_END,))


def test_an_idle_engine_adopts_a_greater_wave_and_ignores_an_old_start() -> None:
    assert WaveState(wave=1).on_request(4).state.wave == 4
    assert WaveState(wave=1).on_start(4).state.wave == 4
    assert not WaveState(wave=5).on_start(4).state.is_running


def test_a_pause_waits_for_all_and_a_resume_joins_what_was_missed() -> None:
    asked = WaveState().on_pause().state
    assert (asked.is_running, asked.pause, asked.vote(False)) == (True, Pause.ASKED, PAUSING)
    paused = asked.on_verdict(Verdict.PAUSE, 1, False).state
    assert paused.is_paused
    assert not paused.on_start(1).state.is_running
    assert paused.on_start(1).state.on_resume(False).state.is_running
    assert paused.on_resume(True).effects == (WaveEffect.START_OTHERS,)
    assert not paused.on_resume(False).state.is_running


def test_verdicts() -> None:
    assert agree([WORK, NONE]) is Verdict.GO
    assert agree([WORK, PAUSING]) is Verdict.GO
    assert agree([NONE, PAUSING]) is Verdict.GO
    assert agree([NONE, NONE]) is Verdict.STOP
    assert agree([PAUSING, PAUSING]) is Verdict.PAUSE
    assert agree([WORK], any_paused=True) is None
    assert agree([PAUSING], any_paused=True) is Verdict.PAUSE


def test_the_coordinator_starts_and_publishes() -> None:
    state = CoordinatorState(num_expected=2)
    state, orders = state.on_subscription()
    assert orders == ()
    state, orders = state.on_subscription()
    assert orders == (Order("ready"),)
    assert state.on_first_request(0) == (state, (Order("start", 0),))
    state, orders = state.on_start_wave(0)
    assert orders == (Order("start", 0), Order("publish", 0))
    assert state.on_start_wave(0).orders == state.on_first_request(0).orders == ()
    assert state.on_subscription().orders == (Order("ready"), Order("start", 0))
    state, orders = state.on_wave_complete(0)
    assert (state.wave, state.is_running, orders) == (1, False, (Order("publish", 1),))
    assert state.on_wave_complete(0).orders == state.on_start_wave(0).orders == ()
