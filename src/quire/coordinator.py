"""The coordinator of engines that step together: it starts an engine's wave at the others, and publishes their loads.

`CoordinatorState` is pure: events in, effects out. `run` drives it as a process of its own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Order(NamedTuple):
    """A message of the coordinator.

    `ready`: to all engines, that their subscriptions have arrived. `start`: to all engines, that they join `wave`; the
    one that has begun it, too, because it may have died since. `publish`: to the clients.
    """

    kind: Literal["ready", "start", "publish"]
    wave: int = 0


class CoordinatorState(NamedTuple):
    """Knowledge of the waves. Each event returns the next state and the messages to send.

    `is_running` is set by notices of engines only: an engine that is paused does not join a wave that a client asks
    for. An old notice changes nothing, and a repeated one neither, so nothing is lost if a coordinator dies: its
    successor gets the notices of all engines anew, and the greatest wave counts.
    """

    wave: int = 0
    is_running: bool = False
    num_expected: int = 1
    """Engines that must have subscribed before any is sent `ready`; 1 after a restart."""
    num_subscribed: int = 0

    def on_subscription(self) -> CoordinatorTurn:
        """Handles the subscription of an engine: the first, or that of one which was started or connected again."""
        state = self._replace(num_subscribed=min(self.num_subscribed + 1, self.num_expected))
        orders: tuple[Order, ...] = (Order("ready"),) if state.num_subscribed >= self.num_expected else ()
        if self.is_running:
            orders += (Order("start", self.wave),)
        return CoordinatorTurn(state, orders)

    def on_first_request(self, wave: int) -> CoordinatorTurn:
        """Handles that a client, which knows of no running wave, has sent an engine a request of `wave`."""
        if self.is_running:
            return CoordinatorTurn(self)
        state = self._replace(wave=max(wave, self.wave))
        return CoordinatorTurn(state, (Order("start", state.wave),))

    def on_start_wave(self, wave: int) -> CoordinatorTurn:
        """Handles that an engine has begun a wave."""
        if wave < self.wave or (wave == self.wave and self.is_running):
            return CoordinatorTurn(self)
        state = self._replace(wave=wave, is_running=True)
        return CoordinatorTurn(state, (Order("start", wave), Order("publish", wave)))

    def on_wave_complete(self, wave: int) -> CoordinatorTurn:
        """Handles that a wave is over."""
        if wave < self.wave:
            return CoordinatorTurn(self)
        state = self._replace(wave=wave + 1, is_running=False)
        return CoordinatorTurn(state, (Order("publish", wave + 1),))


class CoordinatorTurn(NamedTuple):
    """The state after an event, and the messages to send."""

    state: CoordinatorState
    orders: tuple[Order, ...] = ()
