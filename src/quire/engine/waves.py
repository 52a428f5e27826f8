"""Waves: when engines whose steps belong together run, pause and stop. Pure: no clock, no socket, no thread.

Engines that share experts compute every step together: an engine without requests runs a dummy step, because the
others wait for it. From the first step until none has requests is a wave; waves are numbered, and all engines are in
the same one. After each step the engines agree on a `Verdict`.

::

           request, start                      Verdict.GO
    idle ──────────────────▶ running ◀─────────────────────────┐
     ▲                          │ step, then the agreement ────┘
     │      Verdict.STOP        │
     ├──────────────────────────┤ wave + 1
     │      Verdict.PAUSE       │
     └─── resume ─── paused ◀───┘

Laws, whatever is lost or delayed (`tests/simulation/wave_model.py` explores all interleavings of small groups):

* W1: where nothing is on its way, no engine that is not paused has an unfinished request, and each pause is answered.
* W2: all engines enter the same agreements, in the same order.
* W3: waves never fall; the coordinator's is at most one above the greatest of the engines.
* W4: between its pause and its resume no engine steps.
* W5: without input all engines stop at the next agreement.
* W6: engines that leave and join keep W1 to W4, and so do those that all go over to another group (`elastic.py`).

The engine that begins a wave notifies the coordinator, whatever the client has done: a client whose knowledge is old,
or a coordinator that died, loses no request (`CoordinatorState` in `coordinator.py`).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

from quire.wire.group import Verdict, Vote


class Pause(IntEnum):
    """Progress of a pause."""

    NONE = 0
    ASKED = 1
    """The engine steps on until all have been asked."""
    PAUSED = 2


class WaveEffect(Enum):
    """Actions of the caller after an event, in the order given."""

    DUMMY = "dummy"
    """Runs a step without requests."""
    START_OTHERS = "start"
    """Sends the coordinator `start_wave` with the present wave."""
    REPORT_END = "end"
    """Sends the coordinator `wave_complete` with the wave before the present one."""


class WaveState(NamedTuple):
    """The waves of one engine. Each event returns the next state and the effects."""

    wave: int = 0
    step: int = 0
    """Steps of this wave so far."""
    is_running: bool = False
    pause: Pause = Pause.NONE
    started: int = -1
    """Greatest wave that others have begun: kept while this engine is paused, or has not seen the end of the wave
    before."""
    has_notified: bool = False
    """The coordinator was sent `start_wave` in this wave."""

    @property
    def is_paused(self) -> bool:
        """True from the joint pause until the resume."""
        return self.pause is Pause.PAUSED

    def vote(self, has_work: bool) -> Vote:
        """Returns this engine's part of the next agreement."""
        return Vote(has_work, self.pause is Pause.ASKED)

    def on_request(self, wave: int) -> WaveTurn:
        """Handles a request that may be computed now. `wave` is its client's; a greater one than ours is adopted.

        An engine that others have started notifies the coordinator, too: the engine that was to start it may be dead.
        """
        if self.is_paused or (self.is_running and self.has_notified):
            return WaveTurn(self)
        return (self if self.is_running else self._replace(wave=max(wave, self.wave)))._begin()

    def on_start(self, wave: int) -> WaveTurn:
        """Handles the coordinator's order to join a wave. One that is over is ignored."""
        return WaveTurn(self._replace(started=max(wave, self.started))._follow())

    def on_coordinator(self) -> WaveTurn:
        """Handles that a coordinator is ready, perhaps another one than before: it is sent the present wave."""
        if self.is_running:
            return WaveTurn(self._replace(has_notified=True), (WaveEffect.START_OTHERS,))
        return WaveTurn(self, (WaveEffect.REPORT_END,) if self.wave else ())

    def on_step(self, executed: bool, is_asleep: bool = False) -> WaveTurn:
        """Handles a turn of the loop of a running engine: in `executed` ones a model ran. The agreement comes next."""
        effects = () if executed or is_asleep else (WaveEffect.DUMMY,)
        return WaveTurn(self._replace(step=self.step + 1), effects)

    def on_verdict(self, verdict: Verdict, wave: int, has_work: bool) -> WaveTurn:
        """Handles an agreement, after which the group is in `wave`: of an engine that joins, too.

        `has_work` is as of now: requests, a pause, a resume and a start may have come since the vote.
        """
        if verdict is Verdict.GO:
            return WaveTurn(self._replace(wave=wave, is_running=True))
        was_asked = self.pause is Pause.ASKED
        pause = Pause.PAUSED if was_asked and verdict is Verdict.PAUSE else self.pause
        # a pause that was asked for after the vote needs an agreement of its own
        over = self._replace(wave=wave, step=0, is_running=pause is Pause.ASKED, pause=pause, has_notified=False)
        if has_work and not over.is_paused:
            begun = over._begin()
            return WaveTurn(begun.state, (WaveEffect.REPORT_END, *begun.effects))
        return WaveTurn(over._follow(), (WaveEffect.REPORT_END,))

    def on_pause(self) -> WaveTurn:
        """Handles the order to pause. An idle engine runs until all have it: no step of another waits for it then."""
        if self.pause is not Pause.NONE:
            return WaveTurn(self)
        return WaveTurn(self._replace(pause=Pause.ASKED, is_running=True))

    def on_resume(self, has_work: bool) -> WaveTurn:
        """Handles the end of a pause. One that is not joint yet is cancelled; the others join a wave that it began."""
        state = self._replace(pause=Pause.NONE)
        if (has_work or state.is_running) and not state.has_notified:
            return state._begin()
        return WaveTurn(state._follow())

    def _begin(self) -> WaveTurn:
        return WaveTurn(self._replace(is_running=True, has_notified=True), (WaveEffect.START_OTHERS,))

    def _follow(self) -> WaveState:
        """Joins a wave that others have begun, if this engine may run."""
        if self.is_running or self.is_paused or self.started < self.wave:
            return self
        return self._replace(wave=self.started, is_running=True)


class WaveTurn(NamedTuple):
    """The state after an event, and what is to be done."""

    state: WaveState
    effects: tuple[WaveEffect, ...] = ()
