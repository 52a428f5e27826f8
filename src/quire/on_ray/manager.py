"""The engines of a server as Ray actors: placed, started, started again elsewhere, and ended.

`CoreEngineActorManager` is the only part of Quire that speaks with Ray. The server learns what happens to the engines
by its own link (`frontend/supervision/nodes.py`), so that a slow Ray delays no move of requests.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.server import decode_config, encode_config
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.frontend.supervision.node import NodeAgent
from quire.frontend.supervision.supervisor import RestartBudget
from quire.interrupts import Wakeup
from quire.logger import init_logger
from quire.on_ray.placement import Placement, RayNode, Strategy, Wish, actor_environment, place_cores, place_engines
from quire.wire.sockets import hold_port

logger = init_logger(__name__)

LOOK_S = 0.5
"""Interval at which ended actors are looked for."""
END_S = 15.0
"""Time for the actors to end once the server has asked them to."""


class EngineCoreActor:
    """The actor that holds an engine: a node with one engine, where Ray has placed it.

    The engine's core is a child of the actor's process, as it is one of a server's: its heartbeat is read there, and it
    is started again there. The death of the actor, or of its machine, is that of a node.
    """

    def __init__(self, engine_config: bytes, fleet_key: bytes, engine: int) -> None:
        """Raises ConfigError."""
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # the core may have workers of Ray's
        self._agent = NodeAgent(decode_config(engine_config), engines=range(engine, engine + 1), fleet_key=fleet_key)

    def run(self) -> None:
        """Serves. Raises as `NodeAgent.run`. The end of the call is the end of the engine."""
        self._agent.run()


class DPMoEEngineCoreActor(EngineCoreActor):
    """The actor of an engine that shares the experts of a mixture with those of other actors.

    To the others it is a machine of its own, also where Ray has placed several on one node. The actor of the first
    engine is where all exchange hidden states; the hub of the group names its address to the others.
    """

    def __init__(self, engine_config: bytes, fleet_key: bytes, engine: int) -> None:
        ip = ray.util.get_node_ip_address()
        port, self._held_port = hold_port(ip)  # for the life of the actor: the engine listens anew in each epoch
        self._agent = NodeAgent(
            decode_config(engine_config),
            engines=range(engine, engine + 1),
            fleet_key=fleet_key,
            listens=f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}",
        )


class _Engine:
    """An engine, and the actor that holds it now."""

    def __init__(self, index: int, budget: RestartBudget) -> None:
        self.index = index
        self.budget = budget
        self.group: Any = None
        self.actor: Any = None
        self.end: Any = None
        """Reference to the result of its `run`; None: no actor."""
        self.restart_at: float | None = None


class CoreEngineActorManager(threading.Thread):
    """Keeps an actor for each engine. `stop` and `join` end them.

    `on_failed` is called with an error of the first start of an engine: what has never worked is not repeated.
    `has_served` says whether an engine has ever been ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        fleet_key: bytes,
        *,
        on_failed: Callable[[QuireError], None],
        has_served: Callable[[int], bool],
    ) -> None:
        """Places the engines. Raises ConfigError where the cluster has no room."""
        super().__init__(name="CoreEngineActorManager", daemon=True)
        self._config, self._key = config, fleet_key
        self._on_failed, self._has_served = on_failed, has_served
        self._wakeup = Wakeup()
        self._is_stopping = threading.Event()
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that begins here reports no usage
            ray.init(log_to_driver=True, include_dashboard=False)
        life = config.lifecycle_config
        self._engines = [
            _Engine(index, RestartBudget(life.core_restart_limit, life.core_restart_window_s))
            for index in config.parallel_config.remote_engines
        ]
        try:
            places = self._place(len(self._engines))
        except BaseException:
            self._leave_ray()
            raise
        self._places = dict(zip(self._engines, places, strict=True))

    def _place(self, num_engines: int) -> list[Placement]:
        parallel = self._config.parallel_config
        nodes = [
            RayNode(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
            for node in ray.nodes()
            if node["Alive"]
        ]
        text, head_ip = os.environ.get("OMP_NUM_THREADS", ""), ray.util.get_node_ip_address()
        threads = int(text) if text.isdigit() else 0
        if parallel.executor_backend == "ray":
            return place_cores(nodes, head_ip, num_engines, threads)
        wish = Wish(
            num_engines,
            parallel.world_size,
            parallel.data_parallel_size_local,
            threads or None,
            self._config.device_config.device == "cuda",
        )
        strategy: Strategy = envs.RAY_DP_PACK_STRATEGY.get() or "strict"  # type: ignore[assignment]
        return place_engines(nodes, head_ip, wish, strategy)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the thread, and with it the actors: by themselves, as the server ends, or else by force."""
        self._is_stopping.set()
        self._wakeup.set()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's body."""
        try:
            for engine in self._engines:
                self._start(engine)
            while not self._is_stopping.is_set():
                self._look()
        except Exception as e:
            if not self._is_stopping.is_set():
                logger.exception("the thread that speaks with Ray has failed")
                self._on_failed(EngineDeadError(f"the thread that speaks with Ray has failed: {e}"))
        finally:
            self._end_actors()
            self._leave_ray()
            self._wakeup.close()

    def _start(self, engine: _Engine) -> None:
        place = self._places[engine]
        engine.group = placement_group(place.bundles, strategy="STRICT_PACK", name=f"dp_rank_{engine.index}")
        strategy = PlacementGroupSchedulingStrategy(engine.group, placement_group_bundle_index=len(place.bundles) - 1)
        parallel = self._config.parallel_config
        parallel = dataclasses.replace(
            parallel,
            data_parallel_backend="mp",
            distributed_executor_backend=parallel.executor_backend,
            headless=True,
            data_parallel_size_local=place.num_on_node,
            data_parallel_address=parallel.data_parallel_address or ray.util.get_node_ip_address(),
            fleet_key="given",
        )
        config = encode_config(dataclasses.replace(self._config, parallel_config=parallel))
        make: Any = ray.remote(DPMoEEngineCoreActor if parallel.shares_experts else EngineCoreActor)
        make = make.options(
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": actor_environment(os.environ, place.threads)},
        )
        engine.actor = make.remote(config, self._key, engine.index)
        engine.end = engine.actor.run.remote()
        logger.info("engine %d is an actor on %s", engine.index, place.ip)

    def _look(self) -> None:
        """Waits for the end of an actor, and starts others in the place of those that have ended."""
        ends = {engine.end: engine for engine in self._engines if engine.end is not None}
        if ends:
            done, _ = ray.wait(list(ends), num_returns=len(ends), timeout=LOOK_S, fetch_local=False)
        else:
            done = []
            self._is_stopping.wait(LOOK_S)
        for end in done:
            if not self._is_stopping.is_set():
                self._take_end(ends[end])
        now = time.monotonic()
        for engine in self._engines:
            if engine.restart_at is not None and now >= engine.restart_at and not self._is_stopping.is_set():
                engine.restart_at = None
                logger.warning("starting engine %d in another actor", engine.index)
                self._start(engine)

    def _take_end(self, engine: _Engine) -> None:
        error = _error_of(engine.end)
        self._drop(engine)
        if error is not None and not self._has_served(engine.index):
            self._on_failed(error)
            return
        logger.error("the actor of engine %d has ended: %s", engine.index, error or "it was asked to")
        backoff_s = engine.budget.take(time.monotonic())
        if backoff_s is None:
            logger.error("engine %d is not started again: its budget of %s is used up", engine.index, engine.budget)
            if self._config.parallel_config.shares_experts:  # the others cannot go on without it
                self._on_failed(error or EngineDeadError(f"engine {engine.index} cannot be started again"))
            return
        try:
            (self._places[engine],) = self._place(1)
        except ConfigError as e:
            logger.warning("engine %d waits for room: %s", engine.index, e)
            backoff_s = max(backoff_s, LOOK_S)
        engine.restart_at = time.monotonic() + backoff_s

    def _drop(self, engine: _Engine) -> None:
        """Ends an actor that has ended, or must."""
        if engine.actor is not None:
            ray.kill(engine.actor)
        if engine.group is not None:
            remove_placement_group(engine.group)
        engine.actor = engine.end = engine.group = None

    def _end_actors(self) -> None:
        """Waits for the actors, which the server has asked to end, and ends those that do not."""
        ends = [engine.end for engine in self._engines if engine.end is not None]
        try:
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=END_S, fetch_local=False)
            for engine in self._engines:
                self._drop(engine)
        except Exception:
            logger.exception("actors could not be ended")

    def _leave_ray(self) -> None:
        if self._is_ours:
            ray.shutdown()


def _error_of(end: Any) -> QuireError | None:
    """Returns why an actor has ended; None: it was asked to."""
    try:
        ray.get(end)
    except ray.exceptions.RayTaskError as e:
        cause = e.cause
        return cause if isinstance(cause, QuireError) else EngineDeadError(str(cause))
    except ray.exceptions.RayError as e:
        return EngineDeadError(f"the actor is gone: {type(e).__name__}")
    return None
