"""A machine with workers of engines whose cores are on another one: `quire serve --headless --node-rank 1`.

`WorkersNode` offers its machine to the executor of one engine, starts workers as the executor does, and passes frames
between their rings and the link: `wire/worker_link.py`. When the engine or any of its workers has ended, all of its
workers end, and the node offers itself to the engine's next life. `WorkersMachine` has a node for each engine.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.config.server import decode_config
from quire.engine.executor.worker_hub import describe_workers
from quire.engine.executor.worker_process import WorkerGroup
from quire.errors import ConfigError, ServerError
from quire.interrupts import Wakeup
from quire.logger import init_logger
from quire.wire.handshake import HANDSHAKE_TIMEOUT_S, PROTOCOL_VERSION
from quire.wire.nodes import read_fleet_key
from quire.wire.process import set_process_title
from quire.wire.serial import Frame
from quire.wire.shared_memory import set_abort_word
from quire.wire.sockets import ConnectionState
from quire.wire.worker_link import (
    BEAT_INTERVAL_S,
    TO_NODE,
    Abort,
    AnswerFrames,
    CallFrames,
    LateFrames,
    LinkEnd,
    SecureEnd,
    StateFrames,
    ToWorkersNode,
    WorkerGone,
    WorkerNetwork,
    WorkersHello,
    WorkersRefusal,
    WorkersWelcome,
    link_addresses,
    with_head,
)

logger = init_logger(__name__)

SUCCESSOR_S = 15.0
"""Time for another core to take the place of one that has ended in good order; after it the server has ended."""
LINGER_MS = 1000
"""Time in which the last messages may still be sent."""


class _Connection:
    """The node's end of the link, for one life of the engine."""

    def __init__(self, address: str, fleet_key: bytes, silence_s: float) -> None:
        identity = b"workers" + secrets.token_bytes(8)
        self._end = SecureEnd(address, fleet_key, silence_s, bind=False, identity=identity, linger_ms=LINGER_MS)
        self.socket = self._end.socket
        self.state = ConnectionState(self.socket)

    @property
    def is_lost(self) -> bool:
        """True once there was a connection and it has ended."""
        return self.state.was_up and not self.state.is_up

    def send(self, message: msgspec.Struct, frames: Sequence[Frame] = ()) -> None:
        """Sends a message, unless there is no connection."""
        if self.state.is_up:
            self.socket.send_multipart(with_head(message, frames))

    def receive(self) -> tuple[ToWorkersNode, list[bytes]] | None:
        """Returns a message that has come, and its frames; None: there is none."""
        while self.socket.poll(0):
            head, *frames = self.socket.recv_multipart()
            try:
                return TO_NODE.decode(head), frames
            except msgspec.MsgspecError as e:
                logger.warning("a message of the server was dropped: %s", e)
        return None

    def close(self) -> None:
        """Closes the connection."""
        self.state.close()
        self._end.close()


class WorkersNode:
    """The workers of one engine on this machine. `run` serves until `ask_end`, or until the server ends."""

    def __init__(
        self,
        config: EngineConfig,
        fleet_key: bytes,
        node: int,
        num_nodes: int,
        *,
        num_neighbours: int = 0,
        serves_once: bool = False,
    ) -> None:
        """`node` is the number of this machine among `num_nodes`; `num_neighbours` as in `WorkerNetwork`. With
        `serves_once` it has workers for one life of the engine only."""
        self._num_neighbours, self._serves_once = num_neighbours, serves_once
        self._config, self._key, self._node, self._num_nodes = config, fleet_key, node, num_nodes
        parallel = config.parallel_config
        self._addresses = link_addresses(parallel.master_addr, parallel.workers_port)
        self._silence_s = parallel.engine_link_timeout_s
        self._program, self._wakeup = secrets.token_bytes(8), Wakeup()
        self._is_asked = self._has_said = False
        self.is_serving = self.is_final = False
        """True while there are workers, and true if the last life of the engine has ended in good order."""
        self.others: Sequence[WorkersNode] = ()
        """Nodes of the other engines of the server: while one of them serves, this one waits."""
        self.pids: list[int] = []
        """Process ids of the workers that run now."""

    def ask_end(self) -> None:
        """Ends the node. From any thread, and from a signal handler."""
        self._is_asked = True
        self._wakeup.set()

    def run(self) -> None:
        """Serves. Raises ConfigError if the server refuses the node, or none answers within five minutes."""
        try:
            while not self._is_asked:
                with self._connected() as link:
                    welcome = self._offer(link)
                    if welcome is None:
                        return
                    self.is_final, self.is_serving = False, True
                    try:
                        self.is_final = self._serve(link, welcome)
                    finally:
                        self.is_serving = False
                    if self._serves_once:
                        return
        finally:
            self._wakeup.close()

    @contextmanager
    def _connected(self) -> Iterator[_Connection]:
        link = _Connection(self._addresses[0], self._key, self._silence_s)
        try:
            yield link
        finally:
            link.close()

    # -- before there are workers -------------------------------------------------------------------------------------

    def _offer(self, link: _Connection) -> WorkersWelcome | None:
        """Returns the answer of the executor; None if the node is asked to end, or the server has ended."""
        address = self._addresses[0]
        logger.info("waiting for the server at %s", address)
        hello = WorkersHello(
            PROTOCOL_VERSION,
            self._node,
            self._num_nodes,
            describe_workers(self._config),
            socket.gethostname(),
            self._program,
        )
        start = time.monotonic()
        while not self._is_asked:
            if any(other.is_serving for other in self.others):
                start = time.monotonic()  # the server lives, and may start this engine again
            is_final = self.is_final or any(other.is_final for other in self.others)
            limit_s = SUCCESSOR_S if is_final else HANDSHAKE_TIMEOUT_S
            if time.monotonic() > start + limit_s:
                if is_final:
                    logger.info("the server has ended: so does this machine")
                    return None
                raise ConfigError(
                    f"no server answered at {address} within {limit_s:g} s; start it there with the same --nnodes, "
                    "--master-addr, --master-port and --fleet-key"
                )
            link.send(hello)
            self.wait(link, [])
            if link.state.was_rejected and not self._has_said and not link.state.was_up:
                self._has_said = True
                logger.warning("%s has ended the connection: is it a server with the same --fleet-key?", address)
            while (received := link.receive()) is not None:
                match received[0]:
                    case WorkersWelcome() as welcome:
                        return welcome
                    case WorkersRefusal(message):
                        raise ConfigError(f"the server at {address} refuses this machine: {message}")
        return None

    def wait(self, link: _Connection, sources: list[object], timeout_s: float = BEAT_INTERVAL_S) -> set[object]:
        """Waits until there is something to do. Returns the sources that can be read."""
        poller = zmq.Poller()
        for source in (link.socket, link.state.monitor, self._wakeup.fd, *sources):
            poller.register(source, zmq.POLLIN)
        ready = {source for source, _ in poller.poll(math.ceil(1000 * timeout_s))}
        self._wakeup.clear()
        link.state.follow()
        return ready

    # -- with workers -------------------------------------------------------------------------------------------------

    def _serve(self, link: _Connection, welcome: WorkersWelcome) -> bool:
        """Runs workers for a life of the engine. Returns whether that has ended in good order."""
        network = WorkerNetwork(
            self._addresses[1],
            self._key,
            welcome.session,
            welcome.parts,
            welcome.share,
            self._silence_s,
            self._num_neighbours,
        )
        late, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            group = WorkerGroup(self._merge(welcome), network.ranks(), theirs, network)
            try:
                self.pids = [worker.pid for worker in group.workers]
                logger.info("workers %s of the engine run here", list(network.ranks()))
                return _Relay(self, link, group, late).run()
            finally:
                link.send(LinkEnd())
                set_abort_word(group.shared_file)
                group.close()
                self.pids = []
        finally:
            late.close()
            theirs.close()

    def _merge(self, welcome: WorkersWelcome) -> EngineConfig:
        """Returns the configuration of workers: the executor's, with the paths and processors of this machine."""
        theirs, own = decode_config(welcome.engine_config), self._config
        return dataclasses.replace(
            theirs,
            model_config=dataclasses.replace(own.model_config, max_model_len=theirs.model_config.model_len),
            load_config=own.load_config,
            speculative_config=own.speculative_config,
            parallel_config=own.parallel_config,
        )

    @property
    def is_asked(self) -> bool:
        """True once the node was asked to end."""
        return self._is_asked


class _Relay:
    """Passes frames between the rings of a node's workers and the link."""

    def __init__(self, node: WorkersNode, link: _Connection, group: WorkerGroup, late: socket.socket) -> None:
        self._node, self._link, self._group, self._late = node, link, group, late
        self._gone = set[int]()

    def run(self) -> bool:
        """Serves until the engine or the link ends. Returns whether the engine has ended in good order."""
        while not (self._node.is_asked or self._link.is_lost):
            self._sleep()
            self._send_answers()
            self._note_ends()
            while (received := self._link.receive()) is not None:
                message, frames = received
                if isinstance(message, LinkEnd):
                    return True
                self._take(message, frames)
        if self._link.is_lost:
            logger.warning("the connection to the server has ended: the workers of this machine end, and begin again")
        return False

    def _sleep(self) -> None:
        group = self._group
        rings = [worker.answers for worker in group.workers]
        rings += [] if group.outlet is None else [group.outlet]
        sleeping = [ring for ring in rings if ring.begin_sleep()]
        if len(sleeping) == len(rings):
            alive = [worker for worker in group.workers if worker.rank not in self._gone]
            fds = [worker.pidfd for worker in alive if worker.pidfd is not None]
            timeout_s = BEAT_INTERVAL_S if len(fds) == len(alive) else 0.05
            self._node.wait(self._link, [*(ring.waker for ring in rings), *fds, self._late], timeout_s)
        for ring in sleeping:
            ring.end_sleep()
        self._link.state.follow()

    def _send_answers(self) -> None:
        group, link = self._group, self._link
        for worker in group.workers:
            while worker.answers.is_ready():
                link.send(AnswerFrames(worker.rank), worker.answers.take())
        if group.outlet is not None:
            while group.outlet.is_ready():
                link.send(StateFrames(group.stages.stop), group.outlet.take())
        while True:
            try:
                link.send(LateFrames(), [self._late.recv(1 << 16, socket.MSG_DONTWAIT)])
            except BlockingIOError:
                break

    def _note_ends(self) -> None:
        for worker in self._group.workers:
            if worker.rank not in self._gone and (how := worker.describe_end()) is not None:
                self._gone.add(worker.rank)
                set_abort_word(self._group.shared_file)
                logger.error("worker %d %s", worker.rank, how)
                self._link.send(WorkerGone(worker.rank, how, worker.end_kind))

    def _take(self, message: ToWorkersNode, frames: list[bytes]) -> None:
        group = self._group
        try:
            match message:
                case CallFrames():
                    group.calls.send(frames, self._check)
                case StateFrames() if group.inlet is not None:
                    group.inlet.send(frames, self._check)
                case Abort():
                    set_abort_word(group.shared_file)
        except _StopError:
            pass  # the loop finds out why

    def _check(self) -> None:
        self._link.state.follow()
        self._note_ends()
        if self._link.is_lost or self._node.is_asked or self._gone:
            raise _StopError


class _StopError(ServerError):
    """A ring is not emptied any more."""


class WorkersMachine:
    """The workers of all engines of a server on this machine, each engine's on a thread of its own."""

    def __init__(self, config: EngineConfig, fleet_key: bytes) -> None:
        parallel = config.parallel_config
        self.nodes = list[WorkersNode]()
        for engine in parallel.machine_engines:
            own = dataclasses.replace(config, parallel_config=dataclasses.replace(parallel, engine_index=engine))
            self.nodes.append(WorkersNode(own, fleet_key, parallel.node_rank, parallel.nnodes))
        for node in self.nodes:
            node.others = [other for other in self.nodes if other is not node]
        self._errors = list[BaseException]()

    def ask_end(self) -> None:
        """Ends all nodes. From any thread, and from a signal handler."""
        for node in self.nodes:
            node.ask_end()

    def run(self) -> None:
        """Serves. Raises as `WorkersNode.run`: the error of one engine ends the workers of all."""
        threads = [threading.Thread(target=self._run, args=(node,)) for node in self.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, node: WorkersNode) -> None:
        try:
            node.run()
        except BaseException as e:
            self._errors.append(e)
            self.ask_end()


def serve_workers(config: EngineConfig) -> None:
    """Runs the workers of this machine until a signal ends them, or the server does. Raises as `WorkersNode.run`."""
    set_process_title("quire-node")
    assert config.parallel_config.fleet_key is not None  # ParallelConfig has checked it
    machine = WorkersMachine(config, read_fleet_key(config.parallel_config.fleet_key))
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def end(signum: int, frame: FrameType | None) -> None:
        machine.ask_end()

    for number in former:
        signal.signal(number, end)
    try:
        machine.run()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
