"""Waves of small groups, in every order of events, and planted bugs that the same exploration must find."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import pytest

from quire.coordinator import CoordinatorState, CoordinatorTurn, Order
from quire.engine.waves import Pause, WaveState, WaveTurn
from quire.wire.group import Verdict, agree

from . import wave_model
from .wave_model import Engine, Scope, explore

SILENT = Scope(2, 1, knows_waves=False)
SMALL = {
    "a request": Scope(2, 1),
    "a request after the start": SILENT._replace(is_cold=True),
    "a pause that is cancelled": Scope(2, 0, num_pauses=1, may_cancel=True),
    "a request and a pause": SILENT._replace(num_pauses=1),
    "the coordinator dies": Scope(2, 0, num_coordinator_deaths=1),
    "an engine is removed": SILENT._replace(num_removals=1),
    "the engines go over to a smaller group": SILENT._replace(next_size=1),
    "an engine dies while they go over": SILENT._replace(num_requests=0, next_size=2, num_engine_deaths=1),
}
"""Groups that are explored to the end in about a second."""
LARGE = {
    "2 engines, 3 requests, a pause": Scope(2, 3, num_pauses=1),
    "3 engines, 2 requests": Scope(3, 2),
    "a start": Scope(2, 2, is_cold=True),
    "a pause that is cancelled": Scope(2, 1, num_pauses=2, may_cancel=True),
    "the coordinator dies": Scope(2, 2, num_coordinator_deaths=1),
    "the coordinator dies, and the client knows no waves": SILENT._replace(num_coordinator_deaths=1),
    "the coordinator dies in a pause": Scope(2, 1, num_pauses=1, num_coordinator_deaths=1),
    "an engine dies": Scope(2, 2, num_engine_deaths=1),
    "an engine dies in a pause": Scope(2, 1, num_pauses=1, num_engine_deaths=1),
    "an engine and the coordinator die": Scope(2, 1, num_engine_deaths=1, num_coordinator_deaths=1),
    "an engine is added, another removed": Scope(2, 2, num_spare=1, num_removals=1),
    "the engines go over to a larger group": SILENT._replace(next_size=3),
    "one engine becomes two in a pause": Scope(1, 1, knows_waves=False, next_size=2, num_pauses=1),
    "the engines go over in a pause": SILENT._replace(next_size=2, num_pauses=1, may_cancel=True),
    "an engine dies while a group becomes smaller": SILENT._replace(next_size=1, num_engine_deaths=1),
    "an engine dies while a group becomes larger": SILENT._replace(num_requests=0, next_size=3, num_engine_deaths=1),
}


@pytest.mark.parametrize("name", SMALL)
def test_no_order_of_events_breaks_a_law(name: str) -> None:
    report = explore(SMALL[name])
    assert report.violation is None, "\n".join((report.violation, *report.path))
    assert report.is_whole


def test_groups_with_deaths_and_pauses_keep_the_laws() -> None:
    """The first worlds of each large group; all of them are explored by the slow test."""
    for name, scope in LARGE.items():
        report = explore(scope, max_states=600)
        assert report.violation is None, "\n".join((name, report.violation, *report.path))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_larger_groups_keep_the_laws(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    report = explore(LARGE[name], max_states=400_000)
    assert report.violation is None, "\n".join((report.violation, *report.path))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    with capsys.disabled():
        how = "all" if report.is_whole else "the first"
        print(f"\n{name}: {how} {report.num_states} states, {time.process_time() - start:.0f} s, {peak} MiB", end=" ")


# -- planted bugs -----------------------------------------------------------------------------------------------------

on_request, on_start, on_verdict = WaveState.on_request, WaveState.on_start, WaveState.on_verdict


def engine_leaves_the_start_to_the_client(patch: pytest.MonkeyPatch) -> None:
    """vLLM issue 51983: after a cold start no engine is started, because the client believes that they run."""
    patch.setattr(WaveState, "on_request", lambda self, wave: WaveTurn(on_request(self, wave).state))


def paused_engine_joins(patch: pytest.MonkeyPatch) -> None:
    """vLLM issue 36594: a start that was on its way when all paused."""

    def follow(self: WaveState) -> WaveState:
        if self.is_running or self.started < self.wave:
            return self
        return self._replace(wave=self.started, is_running=True)

    patch.setattr(WaveState, "_follow", follow)


def start_before_the_end_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaveState, "on_start", lambda self, wave: WaveTurn(self) if self.is_running else on_start(self, wave))


def stale_start_is_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        WaveState,
        "on_start",
        lambda self, wave: WaveTurn(
            self if self.is_running or self.is_paused else self._replace(wave=wave, is_running=True)
        ),
    )


def waves_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def keep(self: WaveState, verdict: Verdict, wave: int, has_work: bool) -> WaveTurn:
        return on_verdict(self, verdict, self.wave, has_work)

    patch.setattr(WaveState, "on_verdict", keep)


def others_go_on_without_the_paused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wave_model, "agree", lambda votes, any_paused: agree(votes))


def pause_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """An idle engine pauses at once, and the others wait for its step."""

    def pause(self: WaveState) -> WaveTurn:
        if self.is_running:
            return WaveTurn(self._replace(pause=Pause.ASKED))
        return WaveTurn(self._replace(pause=Pause.PAUSED))

    patch.setattr(WaveState, "on_pause", pause)


def request_during_the_agreement_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forget(self: WaveState, verdict: Verdict, wave: int, has_work: bool) -> WaveTurn:
        return on_verdict(self, verdict, wave, False)

    patch.setattr(WaveState, "on_verdict", forget)


def idle_engine_runs_no_dummy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaveState, "on_step", lambda self, executed, is_asleep=False: WaveTurn(self))


def new_coordinator_is_told_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaveState, "on_coordinator", lambda self: WaveTurn(self))


def late_subscriber_is_not_started(patch: pytest.MonkeyPatch) -> None:
    def subscribe(self: CoordinatorState) -> CoordinatorTurn:
        return CoordinatorTurn(self, (Order("ready"),))

    patch.setattr(CoordinatorState, "on_subscription", subscribe)


def joining_engine_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """An engine that is started takes its own wave, 0, for that of the group."""
    patch.setattr(wave_model, "make_joiner", lambda wave: Engine())


def engine_with_the_order_waits_for_the_dead(patch: pytest.MonkeyPatch) -> None:
    """One that dies after the order is started again in the next group: the joint pause never comes."""
    patch.setattr(wave_model, "may_switch", lambda engine: engine.waves.is_paused)


def next_group_begins_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wave_model, "begin_next", lambda world, engine: world.next_wave)


def pause_is_lost_in_the_next_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wave_model, "keep_pause", lambda world, i: world)


RESIZED = SILENT._replace(num_requests=0, next_size=2)
BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Scope, str]] = {
    "cold start": (engine_leaves_the_start_to_the_client, SILENT, "W1"),
    "pause race": (paused_engine_joins, SILENT._replace(num_pauses=1), "W4"),
    "start before the end": (start_before_the_end_is_ignored, Scope(2, 1), "W1"),
    "stale wave": (stale_start_is_followed, Scope(2, 1), "W3"),
    "waves not counted": (waves_are_not_counted, Scope(2, 1), "W2"),
    "without the paused": (others_go_on_without_the_paused, SILENT._replace(num_pauses=1), "W4"),
    "pause at once": (pause_is_not_waited_for, SILENT._replace(num_pauses=1), "W1"),
    "request during the agreement": (request_during_the_agreement_is_forgotten, Scope(2, 1), "W1"),
    "no dummy step": (idle_engine_runs_no_dummy, Scope(2, 1), "W2"),
    "successor of the coordinator": (new_coordinator_is_told_nothing, SILENT._replace(num_coordinator_deaths=1), "W1"),
    "late subscriber": (late_subscriber_is_not_started, SILENT._replace(num_engine_deaths=1), "W1"),
    "a dead engine and another group": (
        engine_with_the_order_waits_for_the_dead,
        RESIZED._replace(next_size=1, num_engine_deaths=1),
        "W6",
    ),
    "waves of another group": (next_group_begins_anew, RESIZED._replace(num_requests=1), "W3"),
    "pause in another group": (pause_is_lost_in_the_next_group, RESIZED._replace(num_pauses=1), "W1"),
    "joining engine": (joining_engine_begins_anew, SILENT._replace(num_engine_deaths=1), "W2"),
}


DEEP = {"late subscriber"}
"""Bugs that take more than a second to find."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in DEEP else ()) for name in BUGS])
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, scope, law = BUGS[name]
    plant(monkeypatch)
    report = explore(scope, max_states=400_000)
    assert report.violation is not None, f"{report.num_states} states show nothing"
    assert report.violation.startswith(law), "\n".join((report.violation, *report.path))
