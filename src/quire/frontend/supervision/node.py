"""A machine with engines of a server that runs on another one: `quire serve --headless`.

`NodeAgent` runs a `CoreSupervisor` for each engine, which reads its heartbeat here, and speaks with the server's head:
it reports its cores and carries out orders. The cores speak with the head themselves.

While the head is out of reach the cores live on, without requests: they have given those up by the same clock by which
the head has. When it is back, they begin again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import msgspec
import zmq

from quire import envs
from quire.config.engine import EngineConfig, describe_engine
from quire.config.server import encode_config
from quire.errors import ConfigError, QuireError
from quire.frontend.supervision.launch import CoreLaunch, pin_config
from quire.frontend.supervision.quarantine import CoreDeath
from quire.frontend.supervision.supervisor import CoreSupervisor
from quire.interrupts import Wakeup
from quire.logger import init_logger
from quire.wire.group import GroupNetwork, group_addresses
from quire.wire.handshake import HANDSHAKE_TIMEOUT_S, PROTOCOL_VERSION, EngineZmqAddresses
from quire.wire.nodes import (
    BEAT_INTERVAL_S,
    NUM_PORTS,
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
    derive_keys,
    network_addresses,
    read_fleet_key,
)
from quire.wire.process import set_process_title
from quire.wire.shared_memory import make_experts_file
from quire.wire.sockets import ConnectionState, CurveKeys, SocketDirectory, make_zmq_socket

logger = init_logger(__name__)

FAREWELL_MS = 1000
"""Longest time in which the last report may still be sent."""
TAKE_OVER_S = 5.0
"""Time in which the head moves the requests of a machine that ends, beyond --shutdown-timeout."""


class NodeState:
    """State of a node, as its head learns it, and state of the head. Owns no socket and reads no clock.

    Reports of supervisors may come from any thread; everything else belongs to one.
    """

    def __init__(self, engines: range) -> None:
        self.engines = engines
        self.is_admitted = False
        self.refusal = ""
        """Why the head does not want the node; empty: it does."""
        self.welcome: NodeWelcome | None = None
        """The first one."""
        self.head = HeadReport([])
        """The last report of the head."""
        self.is_ending = self.has_ended = False
        self.gone: dict[int, QuireError] = {}
        """Engines without a core from now on, and why."""
        self._deaths: dict[int, CoreEnd] = {}
        self._num_restarts: dict[int, int] = {}
        """Restarts of each engine that the head had asked for at its last report."""

    def note_death(self, engine: int, incarnation: int, death: CoreDeath) -> None:
        """Records the death of a core."""
        ids = None if death.request_ids is None else list(death.request_ids)
        self._deaths[engine] = CoreEnd(
            incarnation, death.cause, death.description, ids, death.was_asked, death.is_planned
        )

    def take(self, message: ToNode) -> list[int]:
        """Takes in a message of the head. Returns the engines to restart."""
        match message:
            case NodeRefusal():
                self.refusal = message.message
            case NodeUnknown():
                self.is_admitted = False
            case NodeWelcome():
                self.is_admitted = True
                self.welcome = self.welcome or message
            case HeadReport():
                self.head = message
                return [order.engine for order in message.orders if self._asks_for_restart(order)]
        return []

    def _asks_for_restart(self, order: CoreOrder) -> bool:
        before = self._num_restarts.get(order.engine)
        self._num_restarts[order.engine] = order.num_restarts
        return before is not None and order.num_restarts > before

    def order_of(self, engine: int) -> CoreOrder:
        """Returns what the head wants of an engine."""
        return next((order for order in self.head.orders if order.engine == engine), CoreOrder(engine, False))

    @property
    def is_needed(self) -> bool:
        """True while the head has requests for any engine here."""
        return any(order.is_needed for order in self.head.orders)

    def make_report(self, supervisors: Mapping[int, CoreSupervisor]) -> NodeReport:
        """Returns the state of the node."""
        cores = []
        for engine, supervisor in supervisors.items():
            reason = str(self.gone.get(engine, ""))
            last = self._deaths.get(engine)
            restarts = dict(supervisor.restarts)
            cores.append(
                CoreReport(engine, supervisor.incarnation, supervisor.core_pid, restarts, last, gone_reason=reason)
            )
        return NodeReport(cores, self.is_ending, self.has_ended)


class HeadConnection:
    """The node's end of the connection. Belongs to one thread."""

    def __init__(self, context: zmq.Context[Any], address: str, keys: CurveKeys) -> None:
        self.keys = keys
        self.address = address
        self._has_said = False
        """True once a rejection was logged."""
        self.last_heard = time.monotonic()
        identity = b"node" + secrets.token_bytes(8)  # it must not begin with a zero byte
        self.socket = make_zmq_socket(
            context, address, zmq.DEALER, bind=False, identity=identity, linger_ms=FAREWELL_MS, curve=self.keys
        )
        self.state = ConnectionState(self.socket)

    def follow(self) -> None:
        """Takes in what has become of the connection."""
        self.state.follow()
        if self.state.was_rejected and not self.state.was_up and not self._has_said:
            self._has_said = True
            logger.warning("%s has ended the connection: is it a server with the same --fleet-key?", self.address)

    def receive(self) -> list[ToNode]:
        """Returns the messages that have come."""
        messages: list[ToNode] = []
        while self.socket.poll(0):
            data = self.socket.recv()
            self.last_heard = time.monotonic()
            try:
                messages.append(_DECODER.decode(data))
            except (msgspec.MsgspecError, ValueError) as e:
                logger.warning("a message of the server was dropped: %s", e)
        return messages

    def send(self, message: FromNode) -> None:
        """Sends a message, unless there is no connection: the next one says the same."""
        if self.state.is_up:
            self.socket.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        """Closes the connection."""
        self.state.close()
        self.socket.close()


_DECODER = msgspec.msgpack.Decoder(ToNode)


class NodeAgent:
    """The engines of this machine. `run` serves until `ask_end`, or until the server ends."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        engines: range | None = None,
        fleet_key: bytes | None = None,
        listens: str = "",
    ) -> None:
        """`engines` are the node's; None: those that the configuration gives. `fleet_key` is the key; None: it is in a
        file. `listens` is the address at which the first engine may listen for the hidden states of others with which
        it shares experts; empty: the server's machine has the first. Raises ConfigError for a file that cannot be
        used."""
        self._config = config
        self._pins: dict[int, tuple[int, int | None]] = {}
        """Context length and number of blocks that later cores of an engine have."""
        parallel = config.parallel_config
        first = parallel.first_engine
        self._state = NodeState(engines or range(first, first + parallel.num_local_engines))
        if fleet_key is None:
            assert parallel.fleet_key is not None  # ParallelConfig has checked it
            fleet_key = read_fleet_key(parallel.fleet_key)
        self._context: zmq.Context[Any] = zmq.Context()
        host = parallel.data_parallel_address or parallel.master_addr
        self._addresses = network_addresses(host, parallel.data_parallel_rpc_port)
        self._group: GroupNetwork | None = None
        """The hub of engines on several machines that share experts; None: they share none."""
        self._experts_file = -1
        """The file of this machine's engines among them."""
        self._coordinator: tuple[str, str] | tuple[None, None] = None, None
        if parallel.shares_experts:
            self._join_group(host, fleet_key, listens)
        _, keys = derive_keys(fleet_key, parallel.engine_link_timeout_s)
        self._head = HeadConnection(self._context, self._addresses[0], keys)
        self._directory = SocketDirectory()
        self._supervisors: dict[int, CoreSupervisor] = {}
        self._wakeup = Wakeup()
        self._num_stops = 0
        self._is_silent = False
        """The head is out of reach."""

    def _join_group(self, host: str, fleet_key: bytes, listens: str) -> None:
        """Makes what the engines of this machine need to share experts with others."""
        parallel = self._config.parallel_config
        addresses = group_addresses(host, parallel.data_parallel_rpc_port + NUM_PORTS)
        self._group = GroupNetwork(
            addresses.hub,
            "" if listens else addresses.exchange,
            fleet_key,
            parallel.engine_link_timeout_s,
            machine=secrets.token_bytes(8),
            listens=listens,
        )
        self._coordinator = addresses.back, addresses.intake
        self._experts_file = make_experts_file()

    @property
    def supervisors(self) -> Mapping[int, CoreSupervisor]:
        """The supervisors of the engines; empty before the head has let the node in."""
        return self._supervisors

    def ask_end(self) -> None:
        """Ends the node once its requests have moved to others; the second call ends it at once. From any thread, and
        from a signal handler."""
        self._num_stops += 1
        self._wakeup.set()

    def run(self) -> None:
        """Serves. Raises ConfigError if the head refuses the node, or none answers; the error of a core that cannot be
        started, if no other engine is left."""
        try:
            if self._wait_admitted():
                self._serve()
        finally:
            for supervisor in self._supervisors.values():
                supervisor.stop()
            for supervisor in self._supervisors.values():
                if supervisor.ident is not None:
                    supervisor.join(supervisor.end_timeout_s)
            self._head.close()
            self._wakeup.close()
            self._context.term()
            self._directory.remove()
            if self._experts_file >= 0:
                os.close(self._experts_file)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Sends the state of the node, and takes in what comes within BEAT_INTERVAL_S."""
        head, state = self._head, self._state
        if state.is_admitted:
            head.send(state.make_report(self._supervisors))
        else:
            head.send(self._make_hello())
        poller = zmq.Poller()
        for source in (head.socket, head.state.monitor, self._wakeup.fd):
            poller.register(source, zmq.POLLIN)
        ready = {source for source, _ in poller.poll(int(1000 * BEAT_INTERVAL_S))}
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        head.follow()
        for message in head.receive():
            for engine in state.take(message):
                self._supervisors[engine].ask_restart()
            if isinstance(message, NodeUnknown | NodeRefusal | NodeWelcome):
                continue
            self._follow_orders()
        if state.refusal:
            raise ConfigError(f"the server at {head.address} refuses this node: {state.refusal}")

    def _follow_orders(self) -> None:
        head = self._state.head
        for order in head.orders:
            supervisor = self._supervisors.get(order.engine)
            if supervisor is None:
                continue
            if head.is_draining:
                supervisor.expect_stop()
            if head.max_model_len is not None and order.connected >= 0:
                num_blocks = order.num_gpu_blocks if self._config.parallel_config.num_local_engines > 1 else None
                if self._pins.get(order.engine) != (head.max_model_len, num_blocks):
                    self._pins[order.engine] = head.max_model_len, num_blocks
                    supervisor.set_engine_config(
                        encode_config(pin_config(self._config, head.max_model_len, num_blocks))
                    )

    def _make_hello(self) -> NodeHello:
        parallel = self._config.parallel_config
        return NodeHello(
            PROTOCOL_VERSION,
            self._state.engines.start,
            len(self._state.engines),
            parallel.data_parallel_size,
            describe_engine(self._config),
            socket.gethostname(),
            os.getpid(),
        )

    def _wait_admitted(self) -> bool:
        """Waits for the head. Returns False if the node is asked to end first."""
        logger.info("waiting for the server at %s", self._head.address)
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        while not self._state.is_admitted:
            if self._num_stops:
                return False
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no server answered at {self._head.address} within {HANDSHAKE_TIMEOUT_S:g} s; start it there with "
                    "the same --data-parallel-size, --data-parallel-rpc-port and --fleet-key, and with "
                    "--data-parallel-size-local"
                )
            self._turn()
        return True

    def _serve(self) -> None:
        self._start_cores()
        state = self._state
        while not self._num_stops:
            self._turn()
            self._note_silence()
            if state.head.is_closing:
                logger.info("the server has ended: so does this node")
                self._end_cores()
                return
            if len(state.gone) == len(state.engines) or (state.gone and self._group is not None):
                raise next(iter(state.gone.values()))  # those that share experts with it could not go on
        self._hand_over()
        self._end_cores()
        state.has_ended = True
        self._head.send(state.make_report(self._supervisors))

    def _hand_over(self) -> None:
        """Waits until the head has moved the requests."""
        state = self._state
        state.is_ending = True
        deadline = time.monotonic() + self._config.lifecycle_config.shutdown_timeout + TAKE_OVER_S
        logger.info("this node ends once others have its requests; Ctrl-C again ends it now")
        while self._num_stops < 2 and time.monotonic() < deadline and self._hears_head():
            self._turn()
            if state.head.knows_end and not state.is_needed:
                return

    def _end_cores(self) -> None:
        """Ends the cores; reports go on meanwhile."""
        supervisors = list(self._supervisors.values())
        for supervisor in supervisors:
            supervisor.stop()
        deadline = time.monotonic() + max((s.end_timeout_s for s in supervisors), default=0.0)
        while any(s.is_alive() for s in supervisors) and time.monotonic() < deadline:
            with contextlib.suppress(ConfigError):
                self._turn()

    def _hears_head(self) -> bool:
        return time.monotonic() - self._head.last_heard <= self._config.parallel_config.engine_link_timeout_s

    def _note_silence(self) -> None:
        """Logs when the head falls silent, and when it is back."""
        is_silent = not self._hears_head()
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            if is_silent:
                logger.warning("the server at %s is silent: its requests go on elsewhere", self._head.address)
            else:
                logger.info("the server at %s is back", self._head.address)

    # -- cores --------------------------------------------------------------------------------------------------------

    def _start_cores(self) -> None:
        welcome, parallel = self._state.welcome, self._config.parallel_config
        assert welcome is not None  # the node has been let in
        config = self._config
        if welcome.max_model_len is not None:
            config = pin_config(config, welcome.max_model_len, None)
        launch = CoreLaunch(
            EngineZmqAddresses([self._addresses[1]], [self._addresses[2]], *self._coordinator),
            encode_config(config),
            not config.observability_config.disable_log_stats,
            envs.ENGINE_READY_TIMEOUT_S.number(),
            self._head.keys,
            is_one_of_several=parallel.data_parallel_size > 1,
            preload=parallel.core_names(config.model_config.implementation.name),
            experts_file=self._experts_file,
            group_network=self._group,
        )
        for engine, first in zip(self._state.engines, welcome.first_incarnations, strict=True):
            self._supervisors[engine] = self._make_supervisor(dataclasses.replace(launch, engine_index=engine), first)
        for supervisor in self._supervisors.values():
            supervisor.start()

    def _make_supervisor(self, launch: CoreLaunch, first_incarnation: int) -> CoreSupervisor:
        engine, state = launch.engine_index, self._state
        address = self._directory.endpoint(f"handshake-{engine}")

        def note_death(death: CoreDeath) -> None:
            state.note_death(engine, self._supervisors[engine].incarnation, death)
            self._wakeup.set()

        def note_gone(error: QuireError) -> None:
            state.gone[engine] = error
            self._wakeup.set()

        return CoreSupervisor(
            launch,
            self._config.lifecycle_config,
            make_zmq_socket(self._context, address, zmq.ROUTER, bind=True),
            self._directory.path,
            on_death=note_death,
            on_gone=note_gone,
            was_connected=lambda incarnation: state.order_of(engine).connected == incarnation,
            has_live_requests=lambda: state.order_of(engine).is_needed,
            first_incarnation=first_incarnation,
        )


def serve_node(config: EngineConfig) -> None:
    """Runs the engines of this machine until a signal ends them, or the server does. Raises as `NodeAgent.run`."""
    set_process_title("quire-node")
    agent = NodeAgent(config)
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def end(signum: int, frame: FrameType | None) -> None:
        agent.ask_end()

    for number in former:
        signal.signal(number, end)
    try:
        agent.run()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
