"""The coordinator of engines that step together: starts at all what one has begun, and publishes it to the clients.

`CoordinatorState` is pure: events in, messages out. `Coordinator` drives it, in a process of its own
(`python -m quire.coordinator`), which `frontend/supervision/coordinator_launch.py` starts, and starts again.

======= ====== ================== ======================================================================
socket  type   other side         messages
======= ====== ================== ======================================================================
front   XPUB   XSUB of clients    up: subscriptions, [engine, wave] of a first request; down: [wave, running]
back    XPUB   XSUB of engines    up: subscriptions; down: READY, and START_DP_WAVE with a wave
intake  PULL   PUSH of engines    `EngineCoreOutputs` with start_wave or wave_complete
hub     ROUTER DEALER of engines  those of `wire/group.py`, where engines on several machines share experts
======= ====== ================== ======================================================================

Such engines agree through the hub, as those of one machine do in a page (`engine/dp_group.py`). `GroupTable` is the
group as the hub knows it, and pure, too. A hub that dies takes the present epoch with it: the engines give the step up
that they are in, join the next hub and compute it again.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec
import zmq

from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequestType
from quire.wire.group import (
    FROM_RANK,
    EpochEnd,
    FromHub,
    GroupRefusal,
    GroupVerdict,
    GroupWelcome,
    HubLaunch,
    Ping,
    RankState,
    Standing,
    Verdict,
    Vote,
    agree,
)
from quire.wire.handshake import COORDINATOR_READY, SUBSCRIPTION, CoordinatorAddresses, CoordinatorLaunch
from quire.wire.process import die_with_parent, leave_terminal, set_process_title
from quire.wire.serial import MsgpackDecoder, WireError
from quire.wire.sockets import CurveDoor, bind_network, bound_address, make_zmq_socket

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


class _Rank:
    """A rank that is connected."""

    def __init__(self, identity: bytes, state: RankState) -> None:
        self.identity, self.state, self.standing = identity, state, state.standing
        """`standing` is that of the agreements, of which the rank may not have learnt yet."""

    def get_vote(self, number: int) -> tuple[bool, Vote | None]:
        """Returns whether its part of agreement `number` is there, and its vote; None: it joins and is idle."""
        state = self.state
        if self.standing is not state.standing or (self.standing is Standing.MEMBER and state.number != number):
            return False, None
        return True, None if state.vote is None else Vote(*state.vote)


class GroupTable:
    """A group of engines on several machines which share experts. Take `messages` after each call.

    It decides with all ranks only. The time from the agreement that admits them, together, until one leaves, is lost or
    joins again is an epoch. Its number is above that of every epoch that a machine of the group has seen.
    """

    def __init__(self, size: int) -> None:
        self.messages: list[tuple[bytes, FromHub]] = []
        self._size = size
        self._ranks: dict[int, _Rank] = {}
        self._number = self._wave = self._epoch = 0
        self._life, self._is_open = secrets.token_bytes(8), False
        """Name of this hub; True while the epoch lasts."""

    @property
    def identities(self) -> list[bytes]:
        """The connections of the ranks."""
        return [rank.identity for rank in self._ranks.values()]

    def on_state(self, identity: bytes, state: RankState) -> None:
        """Handles the state of a rank. A connection that is new is that of a rank which was started again, or lost."""
        known = self._ranks.get(state.rank)
        is_same = known is not None and known.identity == identity
        if state.standing is Standing.ABSENT:
            if is_same:
                self._remove(state.rank)
            return
        if (why := self._find_objection(state)) is not None:
            self.messages.append((identity, GroupRefusal(why)))
            return
        if known is None or not is_same or state.joins > known.state.joins:
            self._end_epoch()
            self._wave, self._epoch = max(self._wave, state.wave), max(self._epoch, state.epoch)
            self._ranks[state.rank] = _Rank(identity, state)
            if not is_same:
                self.messages.append((identity, GroupWelcome(self._wave)))
            if state.standing is Standing.MEMBER:  # of a group of which it does not know that it has ended
                self._ranks[state.rank].standing = Standing.ABSENT
                self.messages.append((identity, EpochEnd(state.epoch)))
        else:
            known.state = state
        self._decide()

    def _find_objection(self, state: RankState) -> str | None:
        """Returns why a rank cannot be in the group."""
        if not 0 <= state.rank < self._size:
            return f"engine {state.rank} cannot be in a group of {self._size}"
        for other, rank in sorted(self._ranks.items()):
            if other != state.rank and rank.state.fingerprint != state.fingerprint:
                return (
                    f"engine {state.rank} cannot share experts with engine {other}: the weights, the instruction set "
                    "of the processor, or what else decides the bits of a step, differ; give all machines the same "
                    "files and processors, and restart the server and its nodes"
                )
        return None

    def on_gone(self, identity: bytes) -> None:
        """Handles the end of a connection."""
        for number, rank in list(self._ranks.items()):
            if rank.identity == identity:
                self._remove(number)

    def _remove(self, number: int) -> None:
        self._end_epoch()
        del self._ranks[number]

    def _end_epoch(self) -> None:
        if self._is_open:
            self._is_open = False
            self.messages += [(identity, EpochEnd(self._epoch)) for identity in self.identities]

    def _decide(self) -> None:
        """Decides the next agreement if all parts of it are there, and admits those that join."""
        voters = {n: rank for n, rank in sorted(self._ranks.items()) if rank.standing is not Standing.PAUSED}
        weights = {rank.state.weights for rank in self._ranks.values()}
        if len(self._ranks) < self._size or len(weights) > 1 or len({rank.standing for rank in voters.values()}) > 1:
            return
        parts = [rank.get_vote(self._number + 1) for rank in voters.values()]
        if not all(is_there for is_there, _ in parts) or all(vote is None for _, vote in parts):
            return
        any_paused = len(voters) < self._size
        verdict = agree((vote or Vote(False, False) for _, vote in parts), any_paused)
        if verdict is None:
            return
        self._number += 1
        if any(rank.standing is Standing.JOINING for rank in voters.values()):
            self._epoch, self._is_open = self._epoch + 1, True
        self._wave += verdict is not Verdict.GO and not any_paused
        for rank in voters.values():
            rank.standing = Standing.PAUSED if verdict is Verdict.PAUSE else Standing.MEMBER
            self.messages.append((rank.identity, self._make_verdict(verdict, rank.state.joins)))

    def _make_verdict(self, verdict: Verdict, joins: int) -> GroupVerdict:
        machines: dict[bytes, list[int]] = {}
        for number, rank in sorted(self._ranks.items()):
            machines.setdefault(rank.state.machine, []).append(number)
        session = b"%s-%d" % (self._life, self._epoch)
        address = self._ranks[0].state.listens
        return GroupVerdict(
            self._number, joins, verdict, self._wave, self._epoch, session, list(machines.values()), address
        )


PROBE_S, PROBE_MS = 1.0, 10
"""Time after the end of a connection in which it is looked for, and the interval: zmq does not name it."""
PING_MS = 500


class GroupHub:
    """Drives a `GroupTable` on its socket. Belongs to one thread."""

    def __init__(self, launch: HubLaunch, context: zmq.Context[Any]) -> None:
        self.socket = make_zmq_socket(context, launch.hub, zmq.ROUTER, bind=True, curve=launch.keys)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error shows that a rank is gone
        self.monitor = self.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._table = GroupTable(launch.size)
        self._probe_end = self._next_ping = 0.0

    @property
    def timeout_ms(self) -> int:
        """Time after which `turn` is to be called at the latest."""
        return PROBE_MS if time.monotonic() < self._probe_end else PING_MS

    def turn(self) -> None:
        """Takes in what has come, and sends what follows. Looks for ranks that are gone."""
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            self._probe_end = time.monotonic() + PROBE_S
            self._next_ping = 0.0
        while self.socket.poll(0):
            identity, *frames = self.socket.recv_multipart()
            try:
                state = FROM_RANK.decode(frames[0])
            except (msgspec.MsgspecError, IndexError) as e:
                logger.warning("a message of an engine was dropped: %s", e)
                continue
            self._table.on_state(identity, state)
            self._send()
        if (now := time.monotonic()) >= self._next_ping:
            self._next_ping = now + self.timeout_ms / 1000
            self._table.messages += [(identity, Ping()) for identity in self._table.identities]
            self._send()

    def _send(self) -> None:
        while self._table.messages:
            messages, self._table.messages = self._table.messages, []
            for identity, message in messages:
                try:
                    self.socket.send_multipart([identity, msgspec.msgpack.encode(message)])
                except zmq.ZMQError as e:
                    if e.errno != zmq.EHOSTUNREACH:
                        raise
                    self._table.on_gone(identity)

    def close(self) -> None:
        """Closes the socket."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class Coordinator:
    """Drives the state between its sockets. Belongs to one thread."""

    def __init__(self, launch: CoordinatorLaunch, context: zmq.Context[Any]) -> None:
        self._state = CoordinatorState(num_expected=launch.num_expected)
        keys = launch.curve if launch.group is None else launch.group.keys
        self._door = None if keys is None else CurveDoor(context, [keys.peer_public])
        addresses, curve = launch.addresses, launch.curve
        self._front = make_zmq_socket(context, addresses.front, zmq.XPUB, bind=True, curve=curve)
        self._back = make_zmq_socket(context, addresses.back, zmq.XPUB, bind=True, curve=curve)
        self._intake = make_zmq_socket(context, addresses.intake, zmq.PULL, bind=True, curve=curve)
        for socket in (self._front, self._back):
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # else a second subscription is not reported
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self.addresses = CoordinatorAddresses(*map(bound_address, (self._front, self._back, self._intake)))
        """Addresses that the sockets are bound to, for clients and engines of this machine."""
        self._hub: GroupHub | None = None
        """None: there are no engines on other machines."""
        if launch.group is not None:
            bind_network(self._back, launch.group.back, launch.group.keys)
            bind_network(self._intake, launch.group.intake, launch.group.keys)
            self._hub = GroupHub(launch.group, context)

    def run(self, pipe: int) -> None:
        """Serves until the other end of `pipe` is closed, and closes the sockets."""
        poller = zmq.Poller()
        hub = self._hub
        sockets = [self._front, self._back, self._intake] + ([] if hub is None else [hub.socket, hub.monitor])
        for source in (*sockets, pipe):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = {source for source, _ in poller.poll(None if hub is None else hub.timeout_ms)}
            if pipe in ready:
                break
            if hub is not None:
                hub.turn()
            if self._back in ready and self._back.recv() == SUBSCRIPTION:
                self._take(self._state.on_subscription())
            if self._front in ready:
                self._receive_client(self._front.recv())
            if self._intake in ready:
                self._receive_engine(self._intake.recv_multipart())
        if hub is not None:
            hub.close()
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
