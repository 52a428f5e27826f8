"""The machines that have engines of a server, as its head sees them.

`NodeTable` decides which machine may join, which is lost, and what is sent to each; it owns no socket and reads no
clock. `NodeListener` is the thread that drives it. What happens to an engine goes to `RemoteEvents`, as a supervisor on
this machine would report it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, get_args

import msgspec
import zmq

from quire.frontend.supervision.quarantine import CoreDeath, DeathCause
from quire.interrupts import Wakeup
from quire.logger import init_logger
from quire.wire.handshake import PROTOCOL_VERSION
from quire.wire.nodes import (
    BEAT_INTERVAL_S,
    CoreEnd,
    CoreOrder,
    CoreReport,
    FromNode,
    HeadReport,
    NodeHello,
    NodeRefusal,
    NodeReport,
    NodeUnknown,
    NodeWelcome,
    ToNode,
    is_own_version,
    read_hello_version,
)
from quire.wire.sockets import receive_event

logger = init_logger(__name__)

HAS_ENDED = "has ended in good order"
FAREWELL_MS = 1000
"""Longest time in which the last reports may still be sent."""


class RemoteEvents(Protocol):
    """Receiver of what happens to engines on other machines. Called on the listener's thread."""

    def note_joined(self, engine: int) -> None:
        """Handles that an engine's machine is in reach: what its core sends counts from now on."""

    def note_lost(self, engine: int, why: str) -> None:
        """Handles that an engine's machine is out of reach, or has given the engine up."""

    def note_death(self, engine: int, incarnation: int, death: CoreDeath) -> None:
        """Handles the death of a core, which another follows."""

    def note_ending(self, engine: int) -> None:
        """Handles that an engine's machine will end, once others have its requests."""


class RemoteEngine:
    """An engine on another machine."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.host: str | None = None
        """Machine it is on; None while it is on none."""
        self.incarnation = -1
        """Number of its last core."""
        self.core_pid: int | None = None
        self.node = b""
        """The process that has had it last."""
        self.former_restarts: Counter[str] = Counter()
        """Restarts by processes before that."""
        self.restarts: Mapping[str, int] = {}
        self.num_restarts_asked = 0
        self.last_death = -1
        """Number of the last core whose death was reported."""

    def begin(self, node: bytes) -> None:
        """Handles that a process has it from now on."""
        if node != self.node:
            self.node, self.former_restarts = node, Counter(self.restarts)

    def ask_restart(self) -> None:
        """Makes its machine end the core, and start another. From any thread."""
        self.num_restarts_asked += 1


class _Node:
    """A machine that has joined."""

    def __init__(self, identity: bytes, connection: int, hello: NodeHello, now: float) -> None:
        self.identity, self.connection, self.hello = identity, connection, hello
        self.last_heard = now
        self.is_ending = False

    @property
    def engines(self) -> range:
        """Numbers of its engines."""
        return range(self.hello.first_engine, self.hello.first_engine + self.hello.num_engines)

    def __str__(self) -> str:
        return f"{self.hello.host} (process {self.hello.pid})"


class Served(NamedTuple):
    """Use that the server has for an engine now."""

    is_needed: bool
    connected: int
    """Number of the core that has connected last; -1: none has."""
    num_gpu_blocks: int


class NodeTable:
    """The machines of a fleet. Single-threaded. Take `messages` after each call."""

    def __init__(
        self,
        engines: Sequence[int],
        data_parallel_size: int,
        facts: Mapping[str, str],
        silence_s: float,
        events: RemoteEvents,
        look: Callable[[int], Served],
    ) -> None:
        """`engines` are those that machines may have, `facts` what they must have in common with the head. A machine
        that says nothing for `silence_s` is lost. `look` says what an engine means to the server."""
        self.messages: list[tuple[bytes, ToNode]] = []
        self.engines = {index: RemoteEngine(index) for index in engines}
        self.max_model_len: int | None = None
        """Context length that clients were promised."""
        self.is_draining = self.is_closing = False
        self._size, self._facts, self._silence_s = data_parallel_size, facts, silence_s
        self._events, self._look = events, look
        self._nodes: dict[bytes, _Node] = {}

    # -- what comes ---------------------------------------------------------------------------------------------------

    def on_message(self, identity: bytes, connection: int, data: bytes, now: float) -> None:
        """Takes in a message. `connection` is the number under which its end will be reported."""
        version = read_hello_version(data)
        if version is not None and not is_own_version(version):
            self._refuse(
                identity,
                f"the node speaks protocol version {version}, the server speaks {PROTOCOL_VERSION}; run the same "
                "version of Quire on all machines",
            )
            return
        try:
            message = _DECODER.decode(data)
        except (msgspec.MsgspecError, ValueError) as e:
            logger.warning("a message of a node was dropped: %s", e)
            return
        if isinstance(message, NodeHello):
            self._on_hello(_Node(identity, connection, message, now), now)
        else:
            self._on_report(identity, message, now)

    def _on_hello(self, node: _Node, now: float) -> None:
        known = self._nodes.get(node.identity)
        why = self._find_objection(node)
        if why is not None:
            self._refuse(node.identity, why)
            logger.warning("the node %s was refused: %s", node, why)
            return
        self._nodes[node.identity] = node
        first = [max(self.engines[i].incarnation, self._look(i).connected) + 1 for i in node.engines]
        self.messages.append((node.identity, NodeWelcome(first, self.max_model_len)))
        if known is None:
            named = ", ".join(map(str, node.engines))
            logger.info("the node %s has joined with engine%s %s", node, "s" * (len(node.engines) > 1), named)
            for index in node.engines:
                self.engines[index].begin(node.identity)
                self.engines[index].host = node.hello.host
                self._events.note_joined(index)
        self.report(node.identity)

    def _find_objection(self, node: _Node) -> str | None:
        """Returns why a node cannot join."""
        hello = node.hello
        if hello.data_parallel_size != self._size:
            return f"--data-parallel-size is {hello.data_parallel_size} there and {self._size} at the server"
        foreign = [index for index in node.engines if index not in self.engines]
        if foreign or hello.num_engines < 1:
            free = ", ".join(map(str, self.engines))
            return (
                f"the node has the engines from {hello.first_engine} on, {hello.num_engines} in number "
                f"(--data-parallel-start-rank, --data-parallel-size-local); other machines than the server's may have "
                f"{free}"
            )
        for other in self._nodes.values():
            common = sorted(set(other.engines) & set(node.engines))
            if common and other.identity != node.identity:
                return f"engine {common[0]} is one of the node {other}, which is there; give another start rank"
        unlike = [
            f"{name} is {theirs!r} there and {ours!r} at the server"
            for name in sorted(self._facts.keys() | hello.facts.keys())
            if (theirs := hello.facts.get(name, "")) != (ours := self._facts.get(name, ""))
        ]
        return "; ".join(unlike) or None

    def _refuse(self, identity: bytes, why: str) -> None:
        self.messages.append((identity, NodeRefusal(why)))

    def _on_report(self, identity: bytes, report: NodeReport, now: float) -> None:
        node = self._nodes.get(identity)
        if node is None:
            if not report.has_ended:
                self.messages.append((identity, NodeUnknown()))
            return
        node.last_heard = now
        for core in report.cores:
            if core.engine in node.engines:
                self._take_core(self.engines[core.engine], core)
        if report.has_ended:
            self._lose(node, HAS_ENDED)
        elif report.is_ending and not node.is_ending:
            node.is_ending = True
            logger.info("the node %s will end: its requests move", node)
            for index in node.engines:
                self._events.note_ending(index)
            self.report(identity)

    def _take_core(self, engine: RemoteEngine, core: CoreReport) -> None:
        engine.incarnation, engine.core_pid = core.incarnation, core.pid
        engine.restarts = engine.former_restarts + Counter(core.restarts)
        end = core.last_death
        if end is not None and end.incarnation > engine.last_death:
            engine.last_death = end.incarnation
            self._events.note_death(engine.index, end.incarnation, _read_death(end))
        if core.gone_reason and engine.host is not None:
            logger.error("engine %d on %s is lost: %s", engine.index, engine.host, core.gone_reason)
            engine.host = engine.core_pid = None
            self._events.note_lost(engine.index, f"was given up by its machine: {core.gone_reason}")

    def on_disconnected(self, connection: int) -> None:
        """Handles the end of a connection: a process that ends closes it, also when it is killed."""
        for node in [node for node in self._nodes.values() if node.connection == connection]:
            self._lose(node, "has disconnected")

    def tick(self, now: float) -> None:
        """Looks for nodes that have said nothing for too long. To be called after what has come was taken in."""
        for node in list(self._nodes.values()):
            if now - node.last_heard > self._silence_s:
                self._lose(node, f"has been silent for {now - node.last_heard:.1f} s")

    def lose_all(self, why: str) -> None:
        """Gives every node up."""
        for node in list(self._nodes.values()):
            self._lose(node, why)

    def _lose(self, node: _Node, why: str) -> None:
        logger.log(logging.INFO if why is HAS_ENDED else logging.WARNING, "the node %s %s", node, why)
        del self._nodes[node.identity]
        for index in node.engines:
            engine = self.engines[index]
            engine.core_pid = None
            if engine.host is not None:
                engine.host = None
                self._events.note_lost(index, f"is out of reach: the node {node} {why}")

    # -- what goes ----------------------------------------------------------------------------------------------------

    def report_all(self) -> None:
        """Sends the state of the head to every node."""
        for identity in self._nodes:
            self.report(identity)

    def report(self, identity: bytes) -> None:
        """Sends the state of the head to a node."""
        orders = []
        node = self._nodes[identity]
        for index in node.engines:
            served = self._look(index)
            asked = self.engines[index].num_restarts_asked
            orders.append(CoreOrder(index, served.is_needed, served.connected, asked, served.num_gpu_blocks))
        report = HeadReport(orders, self.max_model_len, self.is_draining, self.is_closing, node.is_ending)
        self.messages.append((identity, report))


_DECODER = msgspec.msgpack.Decoder(FromNode)
_CAUSES = frozenset(get_args(DeathCause))


def _read_death(end: CoreEnd) -> CoreDeath:
    cause = cast("DeathCause", end.cause) if end.cause in _CAUSES else "lost"
    ids = None if end.request_ids is None else tuple(end.request_ids)
    return CoreDeath(cause, end.description, ids, end.was_asked, end.is_planned)


class NodeListener(threading.Thread):
    """Runs a `NodeTable` on a socket. `post` and what is named so are for any thread."""

    def __init__(self, table: NodeTable, socket: zmq.Socket[Any]) -> None:
        super().__init__(name="NodeListener", daemon=True)
        self._table = table
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._wakeup = Wakeup()
        self._is_stopping = False

    # -- any thread ---------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> Mapping[int, RemoteEngine]:
        """The engines that are, or may be, on other machines."""
        return self._table.engines

    def promise(self, max_model_len: int) -> None:
        """Makes the cores that are started from now on have the context that clients were promised."""
        self._table.max_model_len = max_model_len

    def expect_stop(self) -> None:
        """Announces `stop`: a core that dies from now on is followed by another only while requests live."""
        self._table.is_draining = True
        self._wakeup.set()

    def tell(self) -> None:
        """Makes the nodes learn now what the head wants of them."""
        self._wakeup.set()

    def stop(self) -> None:
        """Asks the nodes to end, and ends this thread. From any thread, and from a finalizer."""
        self._is_stopping = True
        self._wakeup.set()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's body."""
        try:
            self._listen()
        except Exception:
            logger.exception("the thread that speaks with other machines has failed: their engines are lost")
            self._table.lose_all("cannot be watched any more")
        finally:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=FAREWELL_MS)
            self._wakeup.close()

    def _listen(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wakeup.fd):
            poller.register(source, zmq.POLLIN)
        table, next_beat = self._table, 0.0
        while not self._is_stopping:
            ready = {s for s, _ in poller.poll(max(0, int(1000 * (next_beat - time.monotonic()))))}
            while self._monitor.poll(0):
                _, connection = receive_event(self._monitor)
                table.on_disconnected(connection)
            self._receive()
            now = time.monotonic()
            table.tick(now)
            if self._wakeup.fd in ready:
                self._wakeup.clear()
                next_beat = now
            if now >= next_beat:
                table.report_all()
                next_beat = now + BEAT_INTERVAL_S
            self._send()
        table.is_closing = True
        table.report_all()
        self._send()

    def _receive(self) -> None:
        while self._socket.poll(0):
            frames = self._socket.recv_multipart(copy=False)
            if len(frames) == 2:
                connection = frames[1].get(zmq.SRCFD)
                self._table.on_message(frames[0].bytes, connection, frames[1].bytes, time.monotonic())

    def _send(self) -> None:
        messages, self._table.messages = self._table.messages, []
        for identity, message in messages:
            self._socket.send_multipart([identity, msgspec.msgpack.encode(message)])
