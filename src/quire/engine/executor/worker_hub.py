"""An executor's end of the link with machines that have workers of its engine: `wire/worker_link.py`.

The executor sees a `RemoteWorker` for each worker there, which has the face of a `WorkerProcess`: a ring of answers,
and a descriptor that shows its end. A thread passes frames between those rings and the link. Calls reach it by the ring
that the workers of this machine read, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from quire.config.engine import EngineConfig, describe_engine
from quire.config.server import encode_config
from quire.errors import NodesMissingError, ServerError
from quire.interrupts import Wakeup
from quire.logger import init_logger
from quire.wire.handshake import HANDSHAKE_TIMEOUT_S, PROTOCOL_VERSION
from quire.wire.heartbeat import WorkerEnd
from quire.wire.ring import NO_BELL, RingReader, RingWriter, make_ring_file
from quire.wire.serial import Frame
from quire.wire.sockets import receive_event
from quire.wire.topology import Topology
from quire.wire.worker_link import (
    BEAT_INTERVAL_S,
    FROM_NODE,
    Abort,
    AnswerFrames,
    Beat,
    CallFrames,
    LateFrames,
    LinkEnd,
    SecureEnd,
    StateFrames,
    WorkerGone,
    WorkerNetwork,
    WorkersHello,
    WorkersRefusal,
    WorkersWelcome,
    link_addresses,
    ranks_of_part,
    with_head,
)

logger = init_logger(__name__)

PROBE_S = 0.02
"""Interval of Beat for PROBE_TIME_S after any connection has ended: it shows whose."""
PROBE_TIME_S = 1.0
LINGER_MS = 1000
"""Time in which the last messages may still be sent."""


def describe_workers(config: EngineConfig) -> dict[str, str]:
    """Returns what all machines with workers of an engine must have in common, by the name of its flag; the engine
    follows from --master-port."""
    parallel = config.parallel_config
    facts = describe_engine(config)
    del facts["--max-model-len"]  # nodes take the executor's
    return facts | {
        "--tensor-parallel-size": str(parallel.tensor_parallel_size),
        "--pipeline-parallel-size": str(parallel.pipeline_parallel_size),
        "--enable-expert-parallel": str(parallel.enable_expert_parallel),
        "--worker-cls": parallel.worker_cls,
        "--data-parallel-size": str(parallel.data_parallel_size),
        "engine": str(parallel.engine_index),
    }


class RemoteWorker:
    """A worker on another machine: the face of a `WorkerProcess`. Its end is set on the thread of the hub."""

    def __init__(self, rank: int, bell: int = NO_BELL) -> None:
        """`bell` wakes the reader of its answers."""
        self.rank = rank
        self.waker, theirs = socket.socketpair()
        ring = make_ring_file(1)
        self.answers, self.writer = RingReader(ring, self.waker, bell=bell), RingWriter(ring, [theirs], bell=bell)
        os.close(ring)
        reader, self._lifeline = os.pipe()
        self.pidfd: int | None = reader
        """Can be read once the worker has ended."""
        self._end: str | None = None
        self.end_kind = WorkerEnd.NONE

    def describe_end(self) -> str | None:
        """Returns how the worker has ended; None while it lives."""
        return self._end

    def note_end(self, how: str, kind: WorkerEnd) -> None:
        """Records the end of the worker."""
        if self._end is None:
            self._end, self.end_kind = how, kind
            os.close(self._lifeline)

    def end(self) -> None:
        """Releases what this machine has of it. The hub has ended."""
        self.note_end("was ended", WorkerEnd.NONE)
        self.answers.end()
        self.writer.end()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class _Node:
    """A machine that has been let in."""

    def __init__(self, identity: bytes, host: str, program: bytes) -> None:
        self.identity, self.host, self.program = identity, host, program
        self.is_lost = False


class MachineTable:
    """The machines of an engine, and which of them are there. Owns no socket."""

    def __init__(self, config: EngineConfig, parts: Sequence[int]) -> None:
        """`parts`: workers on each machine, the executor's first."""
        parallel = config.parallel_config
        self._config, self.parts = config, list(parts)
        self.session = secrets.token_hex(8).encode()
        self.address, self.exchange_address = link_addresses(parallel.master_addr, parallel.workers_port)
        self.nodes = dict[int, _Node]()
        self._refusals = dict[int, str]()

    @property
    def missing(self) -> list[int]:
        """Numbers of the machines that have not come."""
        return [number for number in range(1, len(self.parts)) if number not in self.nodes]

    def explain(self, timeout_s: float) -> str:
        """Returns why the engine cannot start without those."""
        numbers = self.missing
        refused = "".join(
            f"; machine {number} was refused: {self._refusals[number]}"
            for number in numbers
            if number in self._refusals
        )
        return (
            f"no workers of machine {', '.join(map(str, numbers))} of {len(self.parts)} came to {self.address} within "
            f"{timeout_s:g} s{refused}; start quire serve --headless there, with the same --nnodes, --master-port and "
            "--fleet-key, and its --node-rank"
        )

    def find(self, identity: bytes) -> int | None:
        """Returns the number of the machine that has this identity and is there; None: there is none."""
        found = (number for number, node in self.nodes.items() if node.identity == identity and not node.is_lost)
        return next(found, None)

    def find_former(self, identity: bytes, hello: WorkersHello) -> int | None:
        """Returns the number of a machine that has connected anew, and so has lost the connection it had before."""
        known = self.nodes.get(hello.node)
        if known is None or known.is_lost or known.identity == identity:
            return None
        return hello.node if known.program == hello.program else None

    def has_rank(self, number: int, rank: int) -> bool:
        """Returns whether a worker is on machine `number`."""
        return rank in ranks_of_part(self.parts, number)

    def greet(self, identity: bytes, hello: WorkersHello) -> WorkersWelcome | WorkersRefusal | None:
        """Returns the answer to a machine; None: it gets none."""
        number = hello.node
        known = self.nodes.get(number)
        if known is not None and (known.is_lost or known.identity == identity):
            return None  # it is back, for the next life of the engine, or has said so twice
        if (why := self._find_fault(hello)) is not None:
            self._refusals[number] = why
            logger.warning("machine %d (%s) was refused: %s", number, hello.host, why)
            return WorkersRefusal(why)
        self.nodes[number] = _Node(identity, hello.host, hello.program)
        logger.info("machine %d (%s) runs workers %s", number, hello.host, list(ranks_of_part(self.parts, number)))
        return WorkersWelcome(encode_config(self._config), self.session, self.parts, number)

    def _find_fault(self, hello: WorkersHello) -> str | None:
        """Returns why a node cannot be let in; None: it can."""
        count, version = len(self.parts), hello.protocol_version
        if version != PROTOCOL_VERSION:
            return f"its protocol version is {version}, here {PROTOCOL_VERSION}; run the same version of Quire"
        if hello.num_nodes != count:
            return f"it was started with --nnodes {hello.num_nodes}, the server with {count}"
        if not 1 <= hello.node < count:
            return f"--node-rank {hello.node} is none of 1 to {count - 1}"
        if hello.node in self.nodes:
            return f"machine {hello.node} is here already: {self.nodes[hello.node].host}; give another --node-rank"
        own, theirs = describe_workers(self._config), hello.facts
        names = [name for name in sorted(own | theirs) if own.get(name) != theirs.get(name)]
        other = ", ".join(f"{name} ({theirs.get(name, '-')}, here {own.get(name, '-')})" for name in names)
        return f"other settings than the server's: {other}" if other else None


class WorkerHub(threading.Thread):
    """The link with all nodes. `wait` returns once they are there; `end` ends them with the executor."""

    def __init__(
        self,
        config: EngineConfig,
        fleet_key: bytes,
        parts: Sequence[int],
        late: Callable[[bytes], object],
        bell: int = NO_BELL,
        host: str | None = None,
    ) -> None:
        """`parts`: workers on each machine, this one first. `late` gets answers beside the steps; `bell` wakes the
        reader of the others. `host`: the address of this machine, which it listens at with a free port; None: at
        --master-addr and --master-port. Raises ConfigError if the addresses cannot be listened on."""
        super().__init__(name="WorkerHub", daemon=True)
        parallel = config.parallel_config
        silence_s = parallel.engine_link_timeout_s
        place = (parallel.master_addr, parallel.workers_port) if host is None else (host, 0)
        address, _ = link_addresses(*place)
        self._end = SecureEnd(address, fleet_key, silence_s, bind=True, linger_ms=LINGER_MS)
        if host is not None:
            parallel = dataclasses.replace(parallel, master_addr=host, master_port=self._end.port)
            config = dataclasses.replace(config, parallel_config=parallel)
        self.config = config
        """The configuration, with the address of this link."""
        self._table, self._take_late = MachineTable(config, parts), late
        self._topology = Topology(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
        self._end.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error shows that a node is gone
        self._monitor = self._end.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        session, address = self._table.session, self._table.exchange_address
        self.network = WorkerNetwork(address, fleet_key, session, self._table.parts, 0, silence_s)
        self.workers = [RemoteWorker(rank, bell) for rank in range(parts[0], sum(parts))]
        self._calls: RingReader | None = None
        self._outlet: RingReader | None = None
        self._wakeup = Wakeup()
        self._changed = threading.Condition()
        self._is_ending = self._is_aborting = self._was_aborted = False
        self._probe_until = 0.0

    # -- the executor's threads ---------------------------------------------------------------------------------------

    def serve(self, calls: RingReader, outlet: RingReader | None) -> None:
        """Begins to pass on what comes by these rings."""
        self._calls, self._outlet = calls, outlet
        self.start()

    def wait(self, timeout_s: float = HANDSHAKE_TIMEOUT_S, check: Callable[[], None] = lambda: None) -> None:
        """Waits until all nodes are there. `check` raises if a worker has ended meanwhile. Raises NodesMissingError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._table.missing and self.is_alive():
                if time.monotonic() > deadline:
                    raise NodesMissingError(self._table.explain(timeout_s))
                self._changed.wait(min(BEAT_INTERVAL_S, timeout_s))
                check()
            if self._table.missing:
                raise ServerError("the link with the workers of other machines has failed")

    def abort(self) -> None:
        """Makes all workers on other machines leave their barriers. From any thread."""
        self._is_aborting = True
        self._wakeup.set()

    def end(self) -> None:
        """Ends the link: nodes end their workers."""
        self._is_ending = True
        self._wakeup.set()
        if self.ident is not None:
            self.join()
        else:
            self._close()
        self._wakeup.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's body."""
        try:
            while not self._is_ending:
                self._turn()
            self._pass_on_calls()  # the last one among them
            self._tell_all(LinkEnd())
        except Exception as e:
            logger.exception("the link with the workers of other machines has failed")
            for worker in self.workers:
                worker.note_end(f"is out of reach: {type(e).__name__}: {e}", WorkerEnd.NONE)
        finally:
            self._close()

    def _close(self) -> None:
        self._end.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._end.close()

    def _turn(self) -> None:
        rings = [ring for ring in (self._calls, self._outlet) if ring is not None]
        sleeping = [ring for ring in rings if ring.begin_sleep()]
        if len(sleeping) == len(rings):
            poller = zmq.Poller()
            for source in (self._end.socket, self._monitor, self._wakeup.fd, *(ring.waker for ring in rings)):
                poller.register(source, zmq.POLLIN)
            is_probing = time.monotonic() < self._probe_until
            if not poller.poll(math.ceil(1000 * (PROBE_S if is_probing else BEAT_INTERVAL_S))) or is_probing:
                self._tell_all(Beat())
        for ring in sleeping:
            ring.end_sleep()
        self._wakeup.clear()
        if self._is_aborting and not self._was_aborted:
            self._was_aborted = True
            self._tell_all(Abort())
        self._pass_on_calls()
        if self._outlet is not None:
            while self._outlet.is_ready():
                stage = self._topology.place_of(self._table.parts[0]).pp
                self._send_states(stage, self._outlet.take())
        while self._monitor.poll(0):
            receive_event(self._monitor)
            self._probe_until = time.monotonic() + PROBE_TIME_S
        while not self._is_ending and self._end.socket.poll(0):
            identity, head, *frames = self._end.socket.recv_multipart(copy=True)
            self._take(identity, head, frames)

    def _pass_on_calls(self) -> None:
        while self._calls is not None and self._calls.is_ready():
            self._tell_all(CallFrames(), self._calls.take())

    def _tell_all(self, message: msgspec.Struct, frames: Sequence[Frame] = ()) -> None:
        for number in list(self._table.nodes):
            self._tell(number, message, frames)

    def _tell(self, number: int, message: msgspec.Struct, frames: Sequence[Frame] = ()) -> None:
        node = self._table.nodes[number]
        if node.is_lost:
            return
        try:
            self._end.socket.send_multipart([node.identity, *with_head(message, frames)])
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(number, f"is lost: the connection to machine {number} ({node.host}) has ended")

    def _lose(self, number: int, how: str) -> None:
        self._table.nodes[number].is_lost = True
        for rank in ranks_of_part(self._table.parts, number):
            self._worker(rank).note_end(how, WorkerEnd.KILLED)

    def _worker(self, rank: int) -> RemoteWorker:
        return self.workers[rank - self._table.parts[0]]

    # -- messages of nodes --------------------------------------------------------------------------------------------

    def _take(self, identity: bytes, head: bytes, frames: list[bytes]) -> None:
        try:
            message = FROM_NODE.decode(head)
        except msgspec.MsgspecError as e:
            logger.warning("a message of a machine with workers was dropped: %s", e)
            return
        if isinstance(message, WorkersHello):
            if (former := self._table.find_former(identity, message)) is not None:
                self._lose(former, f"is lost: the connection to machine {former} ({message.host}) was interrupted")
            with self._changed:
                answer = self._table.greet(identity, message)
                self._changed.notify_all()
            if answer is not None:
                self._answer(identity, answer)
            return
        number = self._table.find(identity)
        if number is None:
            return
        match message:
            case AnswerFrames(rank) | WorkerGone(rank) if not self._table.has_rank(number, rank):
                logger.warning("machine %d has no worker %d: a message was dropped", number, rank)
            case AnswerFrames(rank):
                self._worker(rank).writer.send(frames, self._check_ending)
            case LateFrames():
                self._take_late(frames[0])
            case StateFrames(stage):
                self._send_states(stage, frames)
            case WorkerGone(rank, how, kind):
                self._worker(rank).note_end(f"on machine {number} {how}", WorkerEnd(kind))
            case LinkEnd():
                self._lose(number, f"is gone: machine {number} ({self._table.nodes[number].host}) was ended")

    def _check_ending(self) -> None:
        if self._is_ending:
            raise ServerError("the executor has ended")

    def _send_states(self, stage: int, frames: Sequence[Frame]) -> None:
        rank = stage * self._topology.tp
        for number in range(1, len(self._table.parts)):
            if self._table.has_rank(number, rank):
                self._tell(number, StateFrames(stage), frames)

    def _answer(self, identity: bytes, message: WorkersRefusal | WorkersWelcome) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it has left
            self._end.socket.send_multipart([identity, *with_head(message)])
