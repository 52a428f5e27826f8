"""Starts the engines of one client: a supervisor for each, on sockets that all share.

`EngineLauncher` binds the sockets once. Every engine connects to the same addresses under its own identity, so that one
more engine needs no further socket of the client, only a handshake of its own.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zmq

from quire import envs
from quire.config.engine import EngineConfig, describe_engine
from quire.config.parallel import ParallelConfig
from quire.config.server import encode_config
from quire.errors import ConfigError, QuireError
from quire.frontend.client.coordinator_link import CoordinatorLink
from quire.frontend.client.link_thread import LinkThread
from quire.frontend.supervision.coordinator_launch import CoordinatorPlan, CoordinatorSupervisor
from quire.frontend.supervision.launch import CoreLaunch, pin_config
from quire.frontend.supervision.nodes import FAREWELL_MS, NodeListener, NodeTable, Served
from quire.frontend.supervision.quarantine import CoreDeath
from quire.frontend.supervision.supervisor import CoreSupervisor
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.engine_core import EngineCoreReadyResponse
from quire.wire.group import GroupNetwork, HubLaunch, group_addresses
from quire.wire.handshake import ClientAddresses, CoordinatorAddresses, EngineZmqAddresses
from quire.wire.nodes import NUM_PORTS, derive_keys, network_addresses, read_fleet_key
from quire.wire.shared_memory import clear_factors, clear_generation, make_experts_file, make_group_file
from quire.wire.sockets import CurveDoor, CurveKeys, SocketDirectory, bind_network, bound_address, make_zmq_socket

logger = init_logger(__name__)


GROUP_FILE = "group"


class SharingGroup(NamedTuple):
    """Engines that share experts: with another number of engines, or after a restart of all, they are another group."""

    num_engines: int
    generation: int
    page: Path


class SharedExperts:
    """The file of engines that share experts, and their group."""

    def __init__(self, directory: Path, num_engines: int, network: GroupNetwork | None = None) -> None:
        """`network`: the hub of the group, if other machines have some of the engines. Raises OSError."""
        self.file, self.network = make_experts_file(), network
        self.group = SharingGroup(num_engines, 0, directory / GROUP_FILE)
        self._last = 0
        self.standby: frozenset[int] = frozenset()
        """Engines that are started for a group which does not compute yet: without them the others go on."""

    def begin(self, num_engines: int) -> SharingGroup:
        """Returns a group that may take the place of the present one."""
        self._last += 1
        page = self.group.page.with_name(f"{GROUP_FILE}.{self._last}")
        make_group_file(page)
        return SharingGroup(num_engines, self._last, page)

    def retire(self, group: SharingGroup) -> None:
        """Gives back the memory of a group whose engines have left it, and of those that have ended."""
        clear_generation(self.file, group.generation)
        for engine in range(self.group.num_engines, group.num_engines):
            clear_factors(self.file, engine)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


ACTOR_MANAGER = "quire.on_ray.manager:CoreEngineActorManager"


class ActorManager(Protocol):
    """The thread that keeps engines as actors of Ray."""

    def start(self) -> None:
        """Starts it."""

    def stop(self) -> None:
        """Asks it to end the actors and itself. From any thread."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""

    def is_alive(self) -> bool:
        """Returns whether it runs."""


class EngineLauncher:
    """The sockets of the client that starts the engines, and what every engine is started with."""

    def __init__(
        self,
        config: EngineConfig,
        context: zmq.Context[Any],
        directory: SocketDirectory,
        *,
        log_stats: bool,
        client_count: int = 1,
    ) -> None:
        """Raises ConfigError for sockets that cannot be."""
        parallel = config.parallel_config
        host = parallel.engine_host
        if host is not None and client_count > 1:
            raise ConfigError(f"--engine-host {host}: an engine core that is reached over TCP has one client")
        if parallel.num_remote_engines and client_count > 1:
            raise ConfigError(
                f"--api-server-count {client_count - 1}: engines on other machines (--data-parallel-size-local "
                f"{parallel.num_local_engines} of {parallel.data_parallel_size}) have one client; leave it out"
            )
        self._config, self._context, self._directory, self._log_stats = config, context, directory, log_stats
        self._pinned = config
        """Configuration of later cores of an engine, and of further engines."""
        self._incarnations: dict[int, int] = {}
        """Number of the next core of each engine that was removed."""
        self._ours: CurveKeys | None = None
        self._the_cores: CurveKeys | None = None
        if host is not None:
            self._ours, self._the_cores = CurveKeys.make_pair()
        self.door = None if self._ours is None else CurveDoor(context, [self._ours.peer_public])
        self.input_socket, self.output_socket = self._bind("input-0", zmq.ROUTER), self._bind("output-0", zmq.PULL)
        others = [make_client_addresses(directory, index) for index in range(1, client_count)]
        self._addresses = EngineZmqAddresses(
            [bound_address(self.input_socket), *(other.input_address for other in others)],
            [bound_address(self.output_socket), *(other.output_address for other in others)],
        )
        self.coordinator: CoordinatorSupervisor | None = None
        """Set by `start_coordinator`, for engines that step together."""
        self.sharing: SharedExperts | None = None
        """Set by `start_coordinator`, for engines that share experts."""
        self._fleet_key = b""
        self._nodes: zmq.Socket[Any] | None = None
        if parallel.num_remote_engines:
            try:
                self._nodes = self._open_to_nodes(parallel)
            except BaseException:
                self.input_socket.close(linger=0)  # else the end of the context would wait for them
                self.output_socket.close(linger=0)
                raise

    def start_coordinator(self, on_gone: Callable[[QuireError], None]) -> CoordinatorLink:
        """Starts the coordinator of engines that step together, and waits for it. Returns our connection to it. Raises
        EngineDeadError if it cannot be started."""
        front, back, intake = (self._make_address(f"coordinator-{name}") for name in ("front", "back", "intake"))
        parallel, hub, network = self._config.parallel_config, None, None
        if parallel.spans_machines:
            hub, network = self._plan_group(parallel)
        # engines of other machines are not waited for: what they miss, the hub makes good
        num_expected = parallel.data_parallel_size if hub is None else 1
        plan = CoordinatorPlan(CoordinatorAddresses(front, back, intake), num_expected, self._ours, hub)
        self.coordinator = CoordinatorSupervisor(plan, self._config.lifecycle_config, on_gone)
        self.coordinator.start()
        try:
            bound = self.coordinator.addresses.result()
        except BaseException:
            self.input_socket.close(linger=0)
            self.output_socket.close(linger=0)
            raise
        self._addresses.coordinator_input, self._addresses.coordinator_output = bound.back, bound.intake
        self._addresses.frontend_stats_publish_address = bound.front
        make_group_file(self._directory.path / GROUP_FILE)
        if parallel.shares_experts:
            self.sharing = SharedExperts(self._directory.path, parallel.data_parallel_size, network)
        return CoordinatorLink(self._context, bound.front, self._the_cores)

    def _plan_group(self, parallel: ParallelConfig) -> tuple[HubLaunch, GroupNetwork]:
        """Returns how the coordinator is the hub of the group, and how the engines of this machine reach it."""
        host, port = self._find_host(parallel), parallel.data_parallel_rpc_port + NUM_PORTS
        addresses, silence_s = group_addresses(host, port), parallel.engine_link_timeout_s
        ours, _ = derive_keys(self._fleet_key, silence_s)
        network = GroupNetwork(
            addresses.hub, addresses.exchange, self._fleet_key, silence_s, machine=secrets.token_bytes(8)
        )
        hub = HubLaunch(parallel.data_parallel_size, addresses.back, addresses.intake, addresses.hub, ours)
        return hub, network

    def _find_host(self, parallel: ParallelConfig) -> str:
        """Returns the address that other machines have of this one. Raises ConfigError."""
        anywhere = "0.0.0.0" if parallel.is_on_ray else parallel.master_addr  # with a key, on all of them
        return find_own_address(parallel.data_parallel_address or anywhere)

    def _open_to_nodes(self, parallel: ParallelConfig) -> zmq.Socket[Any]:
        """Lets cores of other machines connect to the sockets that those of this one use. Returns the socket of the
        machines themselves. Raises ConfigError for a key or an address that cannot be used."""
        self._fleet_key = secrets.token_bytes(32) if parallel.fleet_key is None else read_fleet_key(parallel.fleet_key)
        ours, _ = derive_keys(self._fleet_key, parallel.engine_link_timeout_s)
        self.door = CurveDoor(self._context, [ours.peer_public])
        host = self._find_host(parallel)
        own, inputs, outputs = network_addresses(host, parallel.data_parallel_rpc_port)
        bind_network(self.input_socket, inputs, ours)
        bind_network(self.output_socket, outputs, ours)
        try:
            return make_zmq_socket(self._context, own, zmq.ROUTER, bind=True, linger_ms=FAREWELL_MS, curve=ours)
        except zmq.ZMQError as e:
            raise ConfigError(f"{own} cannot be listened on: {e}") from e

    def make_node_listener(self, thread: LinkThread) -> NodeListener | None:
        """Returns the thread that speaks with other machines, not started; None if there are to be none."""
        parallel = self._config.parallel_config
        if self._nodes is None:
            return None

        def look(engine: int) -> Served:
            link = thread.links.links[engine]
            ready = link.ready_response
            connected, num_blocks = (-1, 0) if ready is None else (ready.incarnation, ready.num_gpu_blocks)
            return Served(link.is_needed, connected, num_blocks)

        table = NodeTable(
            parallel.remote_engines,
            parallel.data_parallel_size,
            describe_engine(self._config),
            parallel.engine_link_timeout_s,
            _RemoteReports(thread),
            look,
        )
        logger.info(
            "engines %s are expected from other machines, at %s",
            ", ".join(map(str, parallel.remote_engines)),
            bound_address(self._nodes),
        )
        return NodeListener(table, self._nodes)

    def _bind(self, name: str, socket_type: int) -> zmq.Socket[Any]:
        return make_zmq_socket(self._context, self._make_address(name), socket_type, bind=True, curve=self._ours)

    def _make_address(self, name: str) -> str:
        """Returns what a socket of that name binds to."""
        host = self._config.parallel_config.engine_host
        return self._directory.endpoint(name) if host is None else f"tcp://{host}:0"

    def make_actor_manager(self, thread: LinkThread) -> ActorManager | None:
        """Returns the thread that keeps engines as actors, not started; None where Ray has none of them.

        Raises ConfigError if Ray is not installed, or has no room.
        """
        if not self._config.parallel_config.is_on_ray:
            return None
        try:
            make = resolve(ACTOR_MANAGER)
        except ImportError as e:
            raise ConfigError(
                f"--data-parallel-backend ray: Ray cannot be imported ({e}); pip install 'quire[ray]', or use mp"
            ) from e
        made: ActorManager = make(
            self._config,
            self._fleet_key,
            on_failed=lambda error: thread.post(lambda: thread.fail(error)),
            has_served=lambda engine: thread.links.links[engine].ready_response is not None,
        )
        return made

    def make_supervisor(self, engine: int, thread: LinkThread, group: SharingGroup | None = None) -> CoreSupervisor:
        """Returns the supervisor of an engine, not started. It reports to `thread`. `group` is one that does not
        compute yet; None: the present one, if there is one."""
        config, sharing = self._pinned, self.sharing
        if group is not None:
            config = config.with_engines(group.num_engines, group.generation)
        present = None if self.coordinator is None else self._directory.path / GROUP_FILE
        network = None if sharing is None else sharing.network
        if sharing is not None:
            present = None if network is not None else (group or sharing.group).page
        first = self._incarnations.get(engine, 0)  # the sockets of a removed engine may close later than it ends
        launch = CoreLaunch(
            self._addresses,
            encode_config(config),
            self._log_stats,
            envs.ENGINE_READY_TIMEOUT_S.number(),
            self._the_cores,
            engine_index=engine,
            is_one_of_several=config.parallel_config.num_engines > 1,
            preload=config.parallel_config.core_names(config.model_config.implementation.name),
            group_file=None if present is None else str(present),
            experts_file=-1 if sharing is None else sharing.file,
            experts_generation=0 if sharing is None else (group or sharing.group).generation,
            is_scale_up_launch=group is not None,
            group_network=network,
        )

        def is_needed() -> bool:
            link = thread.links.links.get(engine)
            return link is not None and link.is_needed

        return CoreSupervisor(
            launch,
            config.lifecycle_config,
            self._bind(f"handshake-{engine}-{first}", zmq.ROUTER),
            self._directory.path,
            on_death=lambda death: thread.post(lambda: thread.report_death(death, engine)),
            on_gone=lambda error: thread.post(lambda: thread.fail(error, self._lost_with(engine))),
            was_connected=lambda incarnation: thread.was_connected(incarnation, engine),
            has_live_requests=is_needed,
            first_incarnation=first,
        )

    def _lost_with(self, engine: int) -> int | None:
        """Returns the engine that is lost if there will be no core of it any more; None: all are, because they cannot
        go on without its experts."""
        return engine if self.sharing is None or engine in self.sharing.standby else None

    def adopt_group(self, group: SharingGroup, supervisors: Mapping[int, CoreSupervisor]) -> None:
        """Makes all later cores those of another group."""
        assert self.sharing is not None, "the engines share experts"
        self.sharing.group, self.sharing.standby = group, frozenset()
        self._config = self._config.with_engines(group.num_engines, group.generation)
        self._pinned = self._pinned.with_engines(group.num_engines, group.generation)
        for engine, supervisor in supervisors.items():
            if engine < group.num_engines:
                supervisor.set_group(encode_config(self._pinned), str(group.page), group.generation)

    def close(self) -> None:
        """Closes the file of experts. Called once all cores have ended."""
        if self.sharing is not None:
            self.sharing.close()

    @property
    def shares_experts(self) -> bool:
        """True if no engine can go on without the others."""
        return self._config.parallel_config.shares_experts

    @property
    def most_engines(self) -> int:
        """Most engines that share experts which there may be."""
        return self._config.parallel_config.most_engines

    @property
    def may_scale(self) -> bool:
        """True if all engines are those of this client, with their workers on this machine."""
        parallel = self._config.parallel_config
        return parallel.num_local_engines == parallel.data_parallel_size and parallel.has_own_workers

    def note_removed(self, engine: int, supervisor: CoreSupervisor) -> None:
        """Records that an engine was removed: if there is one of its index again, its cores have other numbers."""
        self._incarnations[engine] = supervisor.incarnation + 1

    def pin(self, supervisor: CoreSupervisor, max_model_len: int, ready: EngineCoreReadyResponse) -> None:
        """Makes later cores of an engine serve what this one does: live requests were promised its context, and with
        several engines on the machine the free memory no longer shows how many blocks there may be."""
        config = self._config
        is_alone = len(config.parallel_config.machine_engines) == 1 and not self.shares_experts
        pinned = pin_config(config, max_model_len, None if is_alone else ready.num_gpu_blocks)
        if pinned != config:
            self._pinned = pinned
            supervisor.set_engine_config(encode_config(pinned))


class _RemoteReports:
    """Passes on to the links what happens on other machines."""

    def __init__(self, thread: LinkThread) -> None:
        self._thread = thread

    def note_joined(self, engine: int) -> None:
        thread = self._thread
        thread.post(lambda: thread.links.regain(engine))

    def note_lost(self, engine: int, why: str) -> None:
        thread = self._thread
        thread.post(lambda: thread.lose(engine, why))

    def note_death(self, engine: int, incarnation: int, death: CoreDeath) -> None:
        thread = self._thread

        def report() -> None:
            if thread.was_connected(incarnation, engine):
                thread.report_death(death, engine)

        thread.post(report)

    def note_ending(self, engine: int) -> None:
        thread = self._thread
        thread.post(lambda: thread.links.drain(engine, moves=True))


def find_own_address(host: str) -> str:
    """Returns the numeric address of a host name, as a socket is bound to it. Raises ConfigError for an unknown one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    except OSError as e:
        raise ConfigError(f"--data-parallel-address {host} is no address of this machine: {e}") from e


def make_client_addresses(
    directory: SocketDirectory, client_index: int, *, is_judged: bool = False, board_path: str = ""
) -> ClientAddresses:
    """Returns the addresses of client `client_index` of the core in this directory. Raises ConfigError for too long a
    path."""
    return ClientAddresses(
        client_index,
        directory.endpoint(f"input-{client_index}"),
        directory.endpoint(f"output-{client_index}"),
        is_judged,
        board_path,
    )
