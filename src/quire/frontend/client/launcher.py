"""Starts the engines of one client: a supervisor for each, on sockets that all share.

`EngineLauncher` binds the sockets once. Every engine connects to the same addresses under its own identity, so that one
more engine needs no further socket of the client, only a handshake of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.server import encode_config
from quire.errors import ConfigError, QuireError
from quire.frontend.client.coordinator_link import CoordinatorLink
from quire.frontend.client.link_thread import LinkThread
from quire.frontend.supervision.coordinator_launch import CoordinatorPlan, CoordinatorSupervisor
from quire.frontend.supervision.launch import CoreLaunch
from quire.frontend.supervision.supervisor import CoreSupervisor
from quire.wire.engine_core import EngineCoreReadyResponse
from quire.wire.handshake import ClientAddresses, CoordinatorAddresses, EngineZmqAddresses
from quire.wire.shared_memory import make_group_file
from quire.wire.sockets import CurveDoor, CurveKeys, SocketDirectory, bound_address, make_zmq_socket


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
        self._host = config.parallel_config.engine_host
        if self._host is not None and client_count > 1:
            raise ConfigError(f"--engine-host {self._host}: an engine core that is reached over TCP has one client")
        self._config, self._context, self._directory, self._log_stats = config, context, directory, log_stats
        self._pinned = config
        """Configuration of later cores of an engine, and of further engines."""
        self._incarnations: dict[int, int] = {}
        """Number of the next core of each engine that was removed."""
        self._ours: CurveKeys | None = None
        self._the_cores: CurveKeys | None = None
        if self._host is not None:
            self._ours, self._the_cores = CurveKeys.make_pair()
        self.door = None if self._ours is None else CurveDoor(context, [self._ours.peer_public])
        self.input_socket, self.output_socket = self._bind("input-0", zmq.ROUTER), self._bind("output-0", zmq.PULL)
        others = [make_client_addresses(directory, index) for index in range(1, client_count)]
        self._addresses = EngineZmqAddresses(
            [bound_address(self.input_socket), *(other.input_address for other in others)],
            [bound_address(self.output_socket), *(other.output_address for other in others)],
        )
        self._group_file: Path | None = None
        self.coordinator: CoordinatorSupervisor | None = None
        """Set by `start_coordinator`, for engines that step together."""

    def start_coordinator(self, on_gone: Callable[[QuireError], None]) -> CoordinatorLink:
        """Starts the coordinator of engines that step together, and waits for it. Returns our connection to it. Raises
        EngineDeadError if it cannot be started."""
        front, back, intake = (
            f"tcp://{self._host}:0" if self._host is not None else self._directory.endpoint(f"coordinator-{name}")
            for name in ("front", "back", "intake")
        )
        plan = CoordinatorPlan(
            CoordinatorAddresses(front, back, intake), self._config.parallel_config.data_parallel_size, self._ours
        )
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
        self._group_file = self._directory.path / "group"
        make_group_file(self._group_file)
        return CoordinatorLink(self._context, bound.front, self._the_cores)

    def _bind(self, name: str, socket_type: int) -> zmq.Socket[Any]:
        address = f"tcp://{self._host}:0" if self._host is not None else self._directory.endpoint(name)
        return make_zmq_socket(self._context, address, socket_type, bind=True, curve=self._ours)

    def make_supervisor(self, engine: int, thread: LinkThread) -> CoreSupervisor:
        """Returns the supervisor of an engine, not started. It reports to `thread`."""
        config = self._pinned
        first = self._incarnations.get(engine, 0)  # the sockets of a removed engine may close later than it ends
        launch = CoreLaunch(
            self._addresses,
            encode_config(config),
            self._log_stats,
            envs.ENGINE_READY_TIMEOUT_S.number(),
            self._the_cores,
            engine_index=engine,
            is_one_of_several=config.parallel_config.num_local_engines > 1,
            preload=config.parallel_config.core_names(config.model_config.implementation.name),
            group_file=None if self._group_file is None else str(self._group_file),
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
            on_gone=lambda error: thread.post(lambda: thread.fail(error, engine)),
            was_connected=lambda incarnation: thread.was_connected(incarnation, engine),
            has_live_requests=is_needed,
            first_incarnation=first,
        )

    @property
    def may_scale(self) -> bool:
        """True if all engines are those of this client."""
        parallel = self._config.parallel_config
        return parallel.num_local_engines == parallel.data_parallel_size

    def note_removed(self, engine: int, supervisor: CoreSupervisor) -> None:
        """Records that an engine was removed: if there is one of its index again, its cores have other numbers."""
        self._incarnations[engine] = supervisor.incarnation + 1

    def pin(self, supervisor: CoreSupervisor, max_model_len: int, ready: EngineCoreReadyResponse) -> None:
        """Makes later cores of an engine serve what this one does: live requests were promised its context, and with
        several engines on the machine the free memory no longer shows how many blocks there may be."""
        config = self._config
        model, cache = config.model_config, config.cache_config
        is_alone = config.parallel_config.num_local_engines == 1
        if max_model_len != model.model_len:
            model = dataclasses.replace(model, max_model_len=max_model_len)
        if not is_alone:
            cache = dataclasses.replace(cache, num_gpu_blocks_override=ready.num_gpu_blocks)
        if (model, cache) != (config.model_config, config.cache_config):
            self._pinned = dataclasses.replace(config, model_config=model, cache_config=cache)
            supervisor.set_engine_config(encode_config(self._pinned))


def make_client_addresses(directory: SocketDirectory, client_index: int, *, is_judged: bool = False) -> ClientAddresses:
    """Returns the addresses of client `client_index` of the core in this directory. Raises ConfigError for too long a
    path."""
    return ClientAddresses(
        client_index,
        directory.endpoint(f"input-{client_index}"),
        directory.endpoint(f"output-{client_index}"),
        is_judged,
    )
