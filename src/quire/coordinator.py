"""The coordinator of engines that step together: starts at all what one has begun, and publishes it to the clients.

`CoordinatorState` is pure: events in, messages out. `Coordinator` drives it, in a process of its own
(`python -m quire.coordinator`), which `frontend/supervision/coordinator_launch.py` starts, and starts again.

======= ====== ================== ======================================================================
socket  type   other side         messages
======= ====== ================== ======================================================================
front   XPUB   XSUB of clients    up: subscriptions, [engine, wave] of a first request; down: [wave, running]
back    XPUB   XSUB of engines    up: subscriptions; down: READY, and START_DP_WAVE with a wave
intake  PULL   PUSH of engines    `EngineCoreOutputs` with start_wave or wave_complete
======= ====== ================== ======================================================================
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec
import zmq

from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequestType
from quire.wire.handshake import COORDINATOR_READY, SUBSCRIPTION, CoordinatorAddresses, CoordinatorLaunch
from quire.wire.process import die_with_parent, leave_terminal, set_process_title
from quire.wire.serial import MsgpackDecoder, WireError
from quire.wire.sockets import CurveDoor, bound_address, make_zmq_socket

logger = init_logger("quire.coordinator")  # as a process this module is __main__

LAUNCHER_PIPE = 0
"""Standard input: the `CoordinatorLaunch`, and nothing more; its end means that the launcher has ended."""
MAX_LAUNCH_BYTES = 4096


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


class Coordinator:
    """Drives the state between its sockets. Belongs to one thread."""

    def __init__(self, launch: CoordinatorLaunch, context: zmq.Context[Any]) -> None:
        self._state = CoordinatorState(num_expected=launch.num_expected)
        self._door = None if launch.curve is None else CurveDoor(context, [launch.curve.peer_public])
        addresses, curve = launch.addresses, launch.curve
        self._front = make_zmq_socket(context, addresses.front, zmq.XPUB, bind=True, curve=curve)
        self._back = make_zmq_socket(context, addresses.back, zmq.XPUB, bind=True, curve=curve)
        self._intake = make_zmq_socket(context, addresses.intake, zmq.PULL, bind=True, curve=curve)
        for socket in (self._front, self._back):
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # else a second subscription is not reported
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    @property
    def addresses(self) -> CoordinatorAddresses:
        """Addresses that the sockets are bound to."""
        return CoordinatorAddresses(*map(bound_address, (self._front, self._back, self._intake)))

    def run(self, pipe: int) -> None:
        """Serves until the other end of `pipe` is closed, and closes the sockets."""
        poller = zmq.Poller()
        for source in (self._front, self._back, self._intake, pipe):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = {source for source, _ in poller.poll()}
            if pipe in ready:
                break
            if self._back in ready and self._back.recv() == SUBSCRIPTION:
                self._take(self._state.on_subscription())
            if self._front in ready:
                self._receive_client(self._front.recv())
            if self._intake in ready:
                self._receive_engine(self._intake.recv_multipart())
        for socket in (self._front, self._back, self._intake):
            socket.close(linger=0)

    def _receive_client(self, message: bytes) -> None:
        if message == SUBSCRIPTION:
            self._publish()
        elif message[:1] != b"\0":  # the end of a subscription
            try:
                _, wave = msgspec.msgpack.decode(message, type=tuple[int, int])
            except msgspec.MsgspecError as e:
                logger.warning("a message of a client was dropped: %s", e)
            else:
                self._take(self._state.on_first_request(wave))

    def _receive_engine(self, frames: list[bytes]) -> None:
        try:
            notice = self._decoder.decode(frames)
        except WireError as e:
            logger.warning("a message of an engine was dropped: %s", e)
            return
        if notice.start_wave is not None:
            self._take(self._state.on_start_wave(notice.start_wave))
        if notice.wave_complete is not None:
            self._take(self._state.on_wave_complete(notice.wave_complete))

    def _take(self, turn: CoordinatorTurn) -> None:
        self._state = turn.state
        for order in turn.orders:
            if order.kind == "ready":
                self._back.send(COORDINATOR_READY)
            elif order.kind == "start":
                wave = msgspec.msgpack.encode(order.wave)
                self._back.send_multipart([EngineCoreRequestType.START_DP_WAVE.value, wave])
            else:
                self._publish()

    def _publish(self) -> None:
        self._front.send(msgspec.msgpack.encode((self._state.wave, self._state.is_running)))


def main() -> NoReturn:
    """Runs the process: reads its launch, reports the addresses on standard output, and serves."""
    launch = msgspec.msgpack.decode(os.read(LAUNCHER_PIPE, MAX_LAUNCH_BYTES), type=CoordinatorLaunch)
    leave_terminal()
    die_with_parent(launch.parent_pid)
    set_process_title("DPCoordinator")
    coordinator = Coordinator(launch, zmq.Context())
    os.write(sys.stdout.fileno(), msgspec.msgpack.encode(coordinator.addresses))
    coordinator.run(LAUNCHER_PIPE)
    os._exit(0)


if __name__ == "__main__":
    main()
