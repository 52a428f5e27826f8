"""The group of engines on several machines which share experts, as one of them takes part in it.

It is what `DPGroup` is for engines of one machine, with the page at the hub of the group: in the coordinator's process,
on the first machine (`quire.coordinator`). A thread speaks with the hub. It repeats the rank's state whenever that
changes and whenever a connection begins, and takes in verdicts.

The end of an epoch must end a step that waits for another engine, so the thread writes it into the machine's file of
experts: barriers and the exchange with other machines fail then. An epoch ends for a rank

* when the hub says so, because another rank has left, is lost, or has joined again;
* when the connection with the hub ends: nothing could be decided any more;
* when a step of its machine finds that the exchange is lost (`worker/parallel/pool.py`), or the rank joins again, and
  then the hub ends it for all.

So an engine that dies, a machine that does, and a network that is cut all come to the same: each engine gives up the
step that it is in, joins again as soon as there is a connection, and computes the step when all are back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import zmq

from quire.engine.dp_group import Agreement
from quire.errors import ConfigError
from quire.interrupts import Wakeup
from quire.logger import init_logger
from quire.wire.group import (
    FROM_HUB,
    EpochEnd,
    GroupNetwork,
    GroupRefusal,
    GroupVerdict,
    GroupWelcome,
    RankState,
    Standing,
    Vote,
)
from quire.wire.shared_memory import end_epoch, has_epoch_ended, note_epoch
from quire.wire.sockets import receive_event
from quire.wire.worker_link import SecureEnd, WorkerNetwork

logger = init_logger(__name__)

JOIN_S = 10.0
"""Longest wait for the hub in a start: later the rank joins whenever there is a connection."""
FAREWELL_MS = 500
_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class NetGroup:
    """The group. Belongs to one thread, like `DPGroup`, which says in which order the methods are called."""

    shares_experts = True

    def __init__(
        self, network: GroupNetwork, rank: int, size: int, experts_file: int, on_news: Callable[[], None]
    ) -> None:
        """`experts_file` is that of the machine. `on_news` is called on another thread when `poll` or `is_lost` may
        have changed."""
        self._network, self._file, self.rank, self.size = network, experts_file, rank, size
        self._on_news = on_news
        self._state = RankState(rank, 0, Standing.ABSENT, 0, None, 0, 0, 0, 0, network.machine, network.listens)
        self.is_joining, self.has_left = True, False
        """True until this rank has seen the agreement that admits it, and after a pause; True once it has left."""
        self.epoch = 0
        self._link: _HubLink | None = None

    def join(self, fingerprint: int = 0, wave: int = 0, weights: int = 0) -> int:
        """Takes this rank's place, as `DPGroup.join` does. The hub may refuse it later, too: then `poll` raises."""
        self._publish(fingerprint=fingerprint, weights=weights, wave=wave)
        self._link = _HubLink(self._network, self._file, self._on_news)
        self.rejoin()
        self._link.start()
        self._link.has_answered.wait(JOIN_S)
        self._check_admitted()
        return self.wave

    def rejoin(self) -> int:
        """Joins again after a pause, or where the epoch has ended. Returns the wave of the group."""
        if self.epoch:
            end_epoch(self._file, self.epoch)
        self.is_joining = True
        joins, epoch = self._state.joins + 1, note_epoch(self._file, 0)
        self._publish(joins=joins, standing=Standing.JOINING, number=0, vote=None, wave=self.wave, epoch=epoch)
        return self.wave

    def _publish(self, **changes: object) -> None:
        state = msgspec.structs.replace(self._state, **changes)
        if self._link is not None:
            self._link.send(state)
        self._state = state

    @property
    def fingerprint(self) -> int:
        """The fingerprint that this rank has joined with."""
        return self._state.fingerprint

    @property
    def weights(self) -> int:
        """Digest of this rank's weights, 64 bits: ranks go on only while they have the same."""
        return self._state.weights

    @weights.setter
    def weights(self, digest: int) -> None:
        self._publish(weights=digest)

    @property
    def wave(self) -> int:
        """Wave of the group after the last agreement that this rank knows of."""
        return self._state.wave if self._link is None else max(self._state.wave, self._link.wave)

    @property
    def is_lost(self) -> bool:
        """True if this rank takes part in an epoch that has ended: no step of it can succeed any more."""
        return not (self.is_joining or self.has_left) and has_epoch_ended(self._file, self.epoch)

    @property
    def network(self) -> WorkerNetwork | None:
        """The machines of this rank's epoch, for its worker. None: it has not been in one."""
        verdict = self._verdict
        if verdict is None:
            return None
        share = next(i for i, ranks in enumerate(verdict.machines) if self.rank in ranks)
        return WorkerNetwork(
            self._network.exchange or verdict.address,
            self._network.fleet_key,
            verdict.session,
            list(map(len, verdict.machines)),
            share,
            self._network.silence_s,
        )

    @property
    def _verdict(self) -> GroupVerdict | None:
        """The last verdict, unless this rank has joined again since."""
        verdict = None if self._link is None else self._link.verdict
        return verdict if verdict is not None and verdict.joins == self._state.joins else None

    def watch(self, on_death: Callable[[], None]) -> None:
        """Does nothing: the hub notices deaths."""

    def enter(self, vote: Vote) -> None:
        """Votes in the next agreement. A rank that is joining votes in whichever comes next."""
        if not self.is_joining:
            self._publish(standing=Standing.MEMBER, number=self._state.number + 1, vote=vote)
        elif self._state.vote != vote:
            self._publish(vote=vote)

    def poll(self) -> Agreement | None:
        """Returns the agreement that this rank waits for, once there is one. Raises ConfigError if the hub has refused
        it."""
        self._check_admitted()
        verdict = self._verdict
        if verdict is None or self.has_left:
            return None
        if self.is_joining:
            self.is_joining, self.epoch = False, verdict.epoch
            self._publish(standing=Standing.MEMBER, number=verdict.number)
        if verdict.number != self._state.number:
            return None
        if verdict.verdict is verdict.verdict.PAUSE and self._state.standing is not Standing.PAUSED:
            self._publish(standing=Standing.PAUSED)
        return Agreement(verdict.verdict, verdict.wave)

    def _check_admitted(self) -> None:
        if self._link is not None and self._link.refusal:
            raise ConfigError(self._link.refusal)

    def leave(self) -> None:
        """Gives the place up. Idempotent."""
        if self.has_left or self._link is None:
            return
        if self.epoch:
            end_epoch(self._file, self.epoch)
        self._publish(standing=Standing.ABSENT)
        self._link.stop()
        self.has_left, self.is_joining = True, False


class _HubLink(threading.Thread):
    """The connection with the hub. `send` and `stop` are for the group's thread."""

    def __init__(self, network: GroupNetwork, experts_file: int, on_news: Callable[[], None]) -> None:
        super().__init__(name="HubLink", daemon=True)
        self._file, self._on_news = experts_file, on_news
        self._end = SecureEnd(
            network.hub, network.fleet_key, network.silence_s, bind=False, linger_ms=FAREWELL_MS
        )  # without an identity: each connection has one of its own
        self._monitor = self._end.socket.get_monitor_socket(_EVENTS)
        self._wakeup = Wakeup()
        self._state: RankState | None = None
        self._sent: RankState | None = None
        self._is_up = self._is_stopping = False
        self.has_answered = threading.Event()
        self.verdict: GroupVerdict | None = None
        self.refusal = ""
        self.wave = 0

    def send(self, state: RankState) -> None:
        """Sends the state of the rank: now, or when there is a connection. One that was not sent yet is left out."""
        self._state = state
        self._wakeup.set()

    def stop(self) -> None:
        """Ends the thread, once the state is sent."""
        self._is_stopping = True
        self._wakeup.set()
        self.join(2 * FAREWELL_MS / 1000)

    def run(self) -> None:
        """Runs the thread."""
        socket, poller = self._end.socket, zmq.Poller()
        for source in (socket, self._monitor, self._wakeup.fd):
            poller.register(source, zmq.POLLIN)
        while not self._is_stopping:
            ready = {source for source, _ in poller.poll()}
            if self._wakeup.fd in ready:
                self._wakeup.clear()
            if self._monitor in ready:
                self._follow_connection(receive_event(self._monitor)[0])
            while socket.poll(0):
                self._take(socket.recv())
            self._send_state()
        self._send_state()
        socket.disable_monitor()
        self._monitor.close(linger=0)
        self._end.close()
        self._wakeup.close()

    def _send_state(self) -> None:
        if self._is_up and self._state is not self._sent:
            self._sent = self._state
            self._end.socket.send(msgspec.msgpack.encode(self._sent))

    def _follow_connection(self, event: int) -> None:
        was_up, self._sent = self._is_up, None
        self._is_up = event == zmq.Event.HANDSHAKE_SUCCEEDED
        if was_up and not self._is_up:
            logger.warning("the connection with the first machine's group has ended: steps wait for it")
            if self.verdict is not None:
                end_epoch(self._file, self.verdict.epoch)
            self._on_news()

    def _take(self, data: bytes) -> None:
        try:
            message = FROM_HUB.decode(data)
        except msgspec.MsgspecError as e:
            logger.warning("a message of the group was dropped: %s", e)
            return
        match message:
            case GroupWelcome(wave=wave):
                self.wave = wave
                self.has_answered.set()
            case GroupVerdict():
                note_epoch(self._file, message.epoch)
                self.wave, self.verdict = message.wave, message
            case EpochEnd(epoch=epoch):
                end_epoch(self._file, epoch)
            case GroupRefusal(message=why):
                self.refusal = why
                self.has_answered.set()
            case _:
                return
        self._on_news()
