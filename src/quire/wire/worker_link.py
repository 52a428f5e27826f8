"""The link of an executor and the machines that have workers of its engine: messages, ports, and what workers get.

The executor's machine is the first; the others, its nodes, connect to it and open no port. A node says WorkersHello
until it gets WorkersWelcome or WorkersRefusal. Then it has workers, and the frames of calls, answers and hidden states
go between the rings of both machines as they are: `worker_calls.py`. The first frame of each message says which.

All of it goes over TCP with CURVE. The keys follow from the fleet's key: `nodes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from quire.errors import ConfigError
from quire.wire.nodes import derive_keys
from quire.wire.serial import Frame
from quire.wire.sockets import CurveDoor, CurveKeys, make_zmq_socket

M = TypeVar("M")
BEAT_INTERVAL_S = 0.5
"""Interval of WorkersHello, and of Beat."""


class WorkersHello(msgspec.Struct, tag="hello"):
    """A node that offers to run workers. Every field is sent: another version's defaults may differ."""

    protocol_version: int
    node: int
    """Its number, from 1 on."""
    num_nodes: int
    facts: dict[str, str]
    """Settings that must be the same on all machines, by the name of their flag."""
    host: str
    program: bytes
    """Name of the program that runs there, which keeps it over its connections."""


class WorkersRefusal(msgspec.Struct, tag="refusal"):
    """Why a node cannot have workers of this engine."""

    message: str


class WorkersWelcome(msgspec.Struct, tag="welcome"):
    """Values that the workers of a node are started with."""

    engine_config: bytes
    """Result of `quire.config.server.encode_config` on the executor's machine."""
    session: bytes
    """Name of this life of the engine."""
    parts: list[int]
    """Number of workers on each machine."""
    share: int
    """Number of the node among them."""


class CallFrames(msgspec.Struct, tag="call"):
    """A call to all workers; its frames follow."""


class AnswerFrames(msgspec.Struct, tag="answer"):
    """The answer of a worker; its frames follow."""

    rank: int


class LateFrames(msgspec.Struct, tag="late"):
    """An answer beside the steps; its datagram follows."""


class StateFrames(msgspec.Struct, tag="states"):
    """The results of a stage for the next one; their frames follow."""

    stage: int
    """The next one."""


class Abort(msgspec.Struct, tag="abort"):
    """A worker has failed: all others leave their barriers."""


class WorkerGone(msgspec.Struct, tag="gone"):
    """The end of a worker of a node."""

    rank: int
    how: str
    kind: int
    """A `WorkerEnd`."""


class Beat(msgspec.Struct, tag="beat"):
    """Nothing but a sign of life: sending it shows whether there is a connection."""


class LinkEnd(msgspec.Struct, tag="end"):
    """The sender ends: the executor, in good order, or a node that was asked to."""


FromWorkersNode = WorkersHello | AnswerFrames | LateFrames | StateFrames | WorkerGone | LinkEnd
ToWorkersNode = WorkersRefusal | WorkersWelcome | CallFrames | StateFrames | Abort | Beat | LinkEnd

FROM_NODE: msgspec.msgpack.Decoder[FromWorkersNode] = msgspec.msgpack.Decoder(FromWorkersNode)
TO_NODE: msgspec.msgpack.Decoder[ToWorkersNode] = msgspec.msgpack.Decoder(ToWorkersNode)


def with_head(message: msgspec.Struct, frames: Sequence[Frame] = ()) -> list[Frame]:
    """Returns the frames of a message that is followed by `frames`."""
    return [msgspec.msgpack.encode(message), *frames]


class WorkerNetwork(msgspec.Struct, frozen=True):
    """Values that a worker needs to exchange results with those on other machines."""

    address: str
    """Address at which the first machine's worker listens."""
    fleet_key: bytes
    session: bytes
    parts: list[int]
    """Number of workers on each machine: their ranks follow one another."""
    share: int
    """Number of the worker's machine among them."""
    silence_s: float
    num_neighbours: int = 0
    """Workers of the engine on the same computer that count as another machine's."""

    def ranks(self, share: int | None = None) -> range:
        """Returns the ranks on a machine; None: on the worker's own."""
        return ranks_of_part(self.parts, self.share if share is None else share)


def encode_network(network: WorkerNetwork | None) -> bytes:
    """Returns the bytes of what a worker gets; none for None."""
    return b"" if network is None else msgspec.msgpack.encode(network)


def decode_network(data: bytes) -> WorkerNetwork | None:
    """Returns what `encode_network` was given."""
    return msgspec.msgpack.decode(data, type=WorkerNetwork) if data else None


def ranks_of_part(parts: Sequence[int], share: int) -> range:
    """Returns the ranks on machine number `share`, where `parts` are the numbers of workers."""
    first = sum(parts[:share])
    return range(first, first + parts[share])


def link_addresses(host: str, port: int) -> tuple[str, str]:
    """Returns the addresses of the first machine: of this link, and of the exchange of results."""
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{port}", f"tcp://{shown}:{port + 1}"


class SecureEnd:
    """One end of connections between machines: a context of its own and a socket with CURVE. `close` ends both."""

    def __init__(
        self,
        address: str,
        fleet_key: bytes,
        silence_s: float,
        *,
        bind: bool,
        identity: bytes | None = None,
        linger_ms: int = 0,
    ) -> None:
        """Raises ConfigError if an address to listen on cannot be had."""
        listener, peer = derive_keys(fleet_key, silence_s)
        keys: CurveKeys = listener if bind else peer
        self.context: zmq.Context[Any] = zmq.Context()
        try:
            if bind:
                CurveDoor(self.context, [keys.peer_public])
            self.socket = make_zmq_socket(
                self.context,
                address,
                zmq.ROUTER if bind else zmq.DEALER,
                bind=bind,
                identity=identity,
                linger_ms=linger_ms,
                curve=keys,
            )
        except zmq.ZMQError as e:
            self.context.term()
            raise ConfigError(
                f"{address} cannot be listened on: {e}; --master-addr is an address of machine 0, and --master-port "
                "the first of two free ports there for each engine"
            ) from e

    @property
    def port(self) -> int:
        """Returns the port that it listens at: another than that of its address if that is 0."""
        address: Any = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        return int(address.rpartition(b":")[2])

    def close(self) -> None:
        """Closes the socket; messages linger as it was made to."""
        self.socket.close()
        self.context.term()
