"""Exchange of results between the machines of a group of workers: each gets what all others have written.

One worker of each machine takes part. That of the first machine is the hub: it listens, and the others connect to it.
With two machines each sends at once what it has; with more, the hub collects first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from quire.errors import ServerError
from quire.wire.serial import Frame
from quire.wire.worker_link import SecureEnd, WorkerNetwork

CHECK_MS = 20
"""Interval at which a wait looks whether another worker has failed."""
START_S = 300.0
"""Longest time until the workers of all machines have met."""


class ExchangeHead(msgspec.Struct, array_like=True):
    """First frame of a message. Of each machine's part the number of frames follows, its own first frame included."""

    session: bytes
    round: int
    sizes: list[int]


_HEADS = msgspec.msgpack.Decoder(ExchangeHead)


class ExchangeLostError(ServerError):
    """The other machines do not take part any more."""


class HostExchange:
    """The end of one machine. All machines make the same calls in the same order."""

    def __init__(
        self, network: WorkerNetwork, check: Callable[[], None], limit_s: float, start_s: float = START_S
    ) -> None:
        """Waits until all have met, for `start_s` at most. `check` raises if another worker has failed; `limit_s`: how
        late one may be."""
        self._network, self._check, self._limit_s, self._start_s = network, check, limit_s, start_s
        self._is_hub, self._others = network.share == 0, len(network.parts) - 1
        self._round, self._has_met = 0, False
        self._peers = dict[int, bytes]()
        """The identity of each machine's socket, at the hub."""
        identity = None if self._is_hub else self._identity(network.share)
        self._end = SecureEnd(
            network.address, network.fleet_key, network.silence_s, bind=self._is_hub, identity=identity
        )
        self._monitor = None if self._is_hub else self._end.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        """Shows that the hub is gone; a hub learns of the others from the executor."""
        try:
            self._meet()
            self._has_met = True
        except BaseException:
            self.close()
            raise

    def _identity(self, share: int) -> bytes:
        return b"x%d-" % share + self._network.session

    def _meet(self) -> None:
        """Makes sure that all are connected: what a hub sends before is lost."""
        deadline = time.monotonic() + self._start_s
        if self._is_hub:
            wanted = {self._identity(share): share for share in range(1, self._others + 1)}
            while len(self._peers) < self._others:
                identity, *_ = self._receive(deadline, "did not meet the others")
                if identity in wanted:
                    self._peers[wanted[identity]] = identity
            for identity in self._peers.values():
                self._end.socket.send_multipart([identity, b""])
        else:
            self._end.socket.send(b"")
            self._receive(deadline, "did not meet the others")

    def _receive(self, deadline: float, why: str) -> list[bytes]:
        socket = self._end.socket
        while not socket.poll(CHECK_MS):
            self._check()
            if self._has_met and self._monitor is not None and self._monitor.poll(0):
                raise ExchangeLostError("the connection to the first machine's workers has ended")
            if time.monotonic() > deadline:
                raise ExchangeLostError(f"the workers of another machine {why} in time ({self._network.address})")
        return socket.recv_multipart()

    def exchange(self, own: Sequence[Frame]) -> list[list[bytes]]:
        """Returns the frames of each other machine's call, in any order. Raises ExchangeLostError, or as `check`."""
        self._round += 1
        deadline = time.monotonic() + self._limit_s
        if not self._is_hub:
            self._send([], [own])
            return self._split(self._receive(deadline, "did not finish their part of the step"))
        if self._others == 1:
            self._send([self._peers[1]], [own])
        parts = dict[int, list[bytes]]()
        shares = {identity: share for share, identity in self._peers.items()}
        while len(parts) < self._others:
            identity, *frames = self._receive(deadline, "did not finish their part of the step")
            if identity in shares:
                (parts[shares[identity]],) = self._split(frames)
        if self._others > 1:
            for share, identity in self._peers.items():
                self._send([identity], [own, *(part for other, part in parts.items() if other != share)])
        return list(parts.values())

    def _send(self, identity: list[bytes], parts: Sequence[Sequence[Frame]]) -> None:
        head = ExchangeHead(self._network.session, self._round, [len(part) for part in parts])
        frames = [*identity, msgspec.msgpack.encode(head), *(frame for part in parts for frame in part)]
        self._end.socket.send_multipart(frames)

    def _split(self, frames: list[bytes]) -> list[list[bytes]]:
        head, rest = _HEADS.decode(frames[0]), frames[1:]
        if (head.session, head.round) != (self._network.session, self._round) or sum(head.sizes) != len(rest):
            raise ExchangeLostError(f"the machines of the engine are not at the same step: {head.round}, {self._round}")
        parts = list[list[bytes]]()
        for size in head.sizes:
            parts.append(rest[:size])
            rest = rest[size:]
        return parts

    def close(self) -> None:
        """Closes the connections."""
        if self._monitor is not None:
            self._end.socket.disable_monitor()
            self._monitor.close(linger=0)
        self._end.close()
