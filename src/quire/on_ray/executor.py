"""An executor whose workers Ray places: `--distributed-executor-backend ray`. Each engine of a server has its own.

The workers of a stage are processes of one actor, on a bundle of the engine's placement group. An actor is a machine to
the executor, which speaks with it by the link of workers on several machines (`engine/executor/worker_hub.py`): Ray
carries no call and no result. An actor that dies is a machine that is lost: the core ends, and that in its place makes
a placement group and actors of its own.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.server import decode_config, encode_config
from quire.engine.executor.multiproc import MultiprocExecutor
from quire.engine.executor.worker_hub import WorkerHub
from quire.engine.executor.worker_node import WorkersNode
from quire.errors import ConfigError, NodesMissingError, QuireError, ServerError
from quire.logger import init_logger
from quire.on_ray.placement import RayNode, StagePlan, actor_environment, plan_stages
from quire.timeline import stamp
from quire.wire.handshake import HANDSHAKE_TIMEOUT_S

try:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as e:
    raise ConfigError(
        f"--distributed-executor-backend ray: Ray cannot be imported ({e}); pip install 'quire[ray]', or use mp"
    ) from e

logger = init_logger(__name__)

END_S = 15.0
"""Time for the actors to end with the executor."""


class WorkersActor:
    """The actor that has the workers of one stage: a machine of the engine, for one life of it."""

    def __init__(self, engine_config: bytes, fleet_key: bytes, node: int, num_nodes: int, num_neighbours: int) -> None:
        """`node` to `num_neighbours` are those of `WorkersNode`."""
        self._node = WorkersNode(
            decode_config(engine_config),
            fleet_key,
            node,
            num_nodes,
            num_neighbours=num_neighbours,
            serves_once=True,
        )

    def run(self) -> None:
        """Serves until the executor has ended. Raises as `WorkersNode.run`."""
        self._node.run()


class RayExecutor(MultiprocExecutor):
    """Owns the actors of one engine, and their placement group."""

    def __init__(self, config: EngineConfig) -> None:
        self._actors, self._ends = list[Any](), list[Any]()
        """The actors, and references to the results of their `run`."""
        self._bundles: Any = None
        """The placement group."""
        self._plan: StagePlan | None = None
        self._num_engines = config.parallel_config.data_parallel_size
        stamp("ray", allowance_s=HANDSHAKE_TIMEOUT_S)
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._join_cluster()
        super().__init__(config)

    def _join_cluster(self) -> None:
        """Connects to the cluster. One engine alone begins one where there is none. Raises ConfigError."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that begins here reports no usage
        is_single, on_term = self._num_engines == 1, signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=None if is_single else "auto", log_to_driver=True, include_dashboard=False)
        except ConnectionError as e:
            raise ConfigError(
                f"--data-parallel-size {self._num_engines} with --distributed-executor-backend ray: there is no Ray "
                f"cluster that the engines could share ({e}); start one (ray start --head), or set RAY_ADDRESS"
            ) from e
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)  # Ray has set its own, which would end a core in the middle

    def _find_parts(self) -> list[int]:
        parallel = self.config.parallel_config
        nodes = [
            RayNode(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0))
            for node in ray.nodes()
            if node["Alive"]
        ]
        threads = os.environ.get("OMP_NUM_THREADS", "")
        self._plan = plan_stages(
            nodes,
            parallel.pipeline_parallel_size,
            parallel.tensor_parallel_size,
            int(threads) if threads.isdigit() and int(threads) else None,
            envs.RAY_DP_PACK_STRATEGY.get() if envs.RAY_DP_PACK_STRATEGY.is_set else None,
            self._num_engines,
        )
        return [0, *[parallel.tensor_parallel_size] * parallel.pipeline_parallel_size]

    def _make_hub(self, parts: Sequence[int]) -> WorkerHub:
        ip, key = ray.util.get_node_ip_address(), secrets.token_bytes(32)
        hub = WorkerHub(self.config, key, parts, self._late.theirs.send, self._waiter.bell, host=ip)
        try:
            self._start_actors(hub.config, key, len(parts))
        except BaseException:
            hub.end()
            raise
        return hub

    def _start_actors(self, config: EngineConfig, key: bytes, num_machines: int) -> None:
        plan = self._plan
        assert plan is not None, "the stages have places"
        self._bundles = placement_group(plan.bundles, strategy=plan.strategy)
        if not ray.wait([self._bundles.ready()], timeout=HANDSHAKE_TIMEOUT_S, fetch_local=False)[0]:
            raise NodesMissingError(
                f"the Ray cluster had no room for {len(plan.bundles)} times {plan.bundles[0]} within "
                f"{HANDSHAKE_TIMEOUT_S:g} s; end other programs there, or add nodes"
            )
        nodes: dict[int, str] = placement_group_table(self._bundles)["bundles_to_node_id"]
        counts, size = Counter(nodes.values()), config.parallel_config.tensor_parallel_size
        cpus = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes()}
        parallel = config.parallel_config
        if parallel.cpu_bind == "auto":  # stages on one node would be bound to the same processors
            parallel = dataclasses.replace(parallel, cpu_bind="none")
        if self._num_engines > 1:  # those of others on its node are neighbours: not each node has all engines
            parallel = dataclasses.replace(
                parallel,
                headless=True,
                data_parallel_size_local=1,
                data_parallel_start_rank=parallel.engine_index,
                data_parallel_backend="mp",
                dp_coordinator="auto",
                fleet_key="given",
            )
        config = dataclasses.replace(config, parallel_config=parallel)
        make: Any = ray.remote(WorkersActor)
        for index in range(len(plan.bundles)):
            strategy = PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=index)
            options = {
                "num_cpus": 0,
                "max_restarts": 0,
                "scheduling_strategy": strategy,
                "runtime_env": {"env_vars": actor_environment(os.environ, plan.threads)},
            }
            own = counts[nodes[index]]
            num_neighbours = (own - 1 + plan.count_others(cpus[nodes[index]], own, self._num_engines)) * size
            actor = make.options(**options).remote(encode_config(config), key, index + 1, num_machines, num_neighbours)
            self._actors.append(actor)
            self._ends.append(actor.run.remote())
            logger.info("the workers of stage %d are an actor on Ray node %s", index, nodes[index])

    def _check_starting(self) -> None:
        super()._check_starting()
        for end in ray.wait(self._ends, num_returns=len(self._ends), timeout=0, fetch_local=False)[0]:
            try:
                ray.get(end)
            except ray.exceptions.RayTaskError as e:
                raise e.cause if isinstance(e.cause, QuireError) else ServerError(str(e.cause)) from e
            except ray.exceptions.RayError as e:
                raise ServerError(f"an actor of the engine is gone: {type(e).__name__}") from e

    def shutdown(self) -> None:
        super().shutdown()
        if self._actors:
            ray.wait(self._ends, num_returns=len(self._ends), timeout=END_S, fetch_local=False)
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._ends = [], []
        if self._bundles is not None:
            remove_placement_group(self._bundles)
            self._bundles = None
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()
