"""Engines, and the workers of an engine, as actors of a Ray cluster on this machine: one is killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from quire import LoRARequest
from quire.errors import ConfigError
from quire.frontend.client.link import LinkState
from quire.wire.group import NUM_GROUP_PORTS
from quire.wire.nodes import NUM_PORTS
from tests.ports import free_ports

from .harness import check_free, fake_args, running
from .test_engine_set import dp_client, wait_for
from .test_nodes import is_running, pid_of, read_while
from .test_workers import PROMPTS, adapter, expected, tokens_of
from .test_workers import make as make_llm

__all__ = ["adapter", "expected"]  # fixtures

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one processor."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    ray.init(address=made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def ray_args(size: int = 2) -> Any:
    return fake_args(data_parallel_size=size, data_parallel_backend="ray", data_parallel_rpc_port=free_ports(NUM_PORTS))


def test_a_killed_actor_loses_no_stream(cluster: Any) -> None:
    async def run() -> None:
        async with running(ray_args()) as engine:
            client = dp_client(engine)
            await wait_for(lambda: client.num_engines_up == 2)
            link = client.engines.links[1]

            async def work() -> None:
                manager: Any = client.resources.actors
                await wait_for(lambda: link.num_live_requests > 1)
                core = await pid_of(client)
                ray.kill(manager._engines[1].actor)
                await wait_for(lambda: link.state is LinkState.DOWN and not link.num_live_requests)
                await wait_for(lambda: not is_running(core))
                await wait_for(lambda: link.state is LinkState.UP)
                core = await pid_of(client)
                await wait_for(lambda: link.num_live_requests > 1)
                os.kill(core, signal.SIGKILL)
                await wait_for(lambda: client.restarts == {"killed": 1})
                await wait_for(lambda: link.state is LinkState.UP)

            await read_while(engine, work())
            await check_free(engine)
            assert min(client.counts["moves.1.lost"], client.counts["moves.1.killed"]) > 0

    asyncio.run(run())


def test_a_killed_actor_of_engines_that_share_experts_costs_no_token(cluster: Any) -> None:
    """The first engine's actor is where all exchange hidden states: in its place comes one with another address."""
    port = free_ports(NUM_PORTS + NUM_GROUP_PORTS)
    fields = {"enable_expert_parallel": True, "data_parallel_backend": "ray", "data_parallel_rpc_port": port}

    async def run() -> None:
        async with running(fake_args("Sharing", data_parallel_size=2, engine_link_timeout_s=1.0, **fields)) as engine:
            client = dp_client(engine)
            await wait_for(lambda: client.num_engines_up == 2)

            async def work() -> None:
                manager: Any = client.resources.actors
                for victim in (0, 1):
                    link = client.engines.links[victim]
                    await wait_for(lambda link=link: link.num_live_requests > 1)
                    ray.kill(manager._engines[victim].actor)
                    await wait_for(lambda link=link: link.state is LinkState.DOWN)
                    await wait_for(lambda link=link: link.state is LinkState.UP)
                core = await pid_of(client)
                os.kill(core, signal.SIGKILL)
                await wait_for(lambda: client.restarts == {"killed": 1})
                await wait_for(lambda: client.engines.links[1].state is LinkState.UP)

            await read_while(engine, work())
            await check_free(engine)
            assert client.counts["poisoned_requests"] == 0

    asyncio.run(run())


def test_a_cluster_without_room_is_named(cluster: Any) -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match="1 of 3 engines find no room in the Ray cluster: each takes 1 CPUs"):
            async with running(ray_args(3)):
                pass

    asyncio.run(run())


def test_an_engine_that_cannot_start_ends_the_server_with_its_error(cluster: Any) -> None:
    async def run() -> None:
        args = ray_args()
        args = type(args)(**{**args.non_default, "distributed_executor_backend": "tests.process.executors:Unloadable"})
        with pytest.raises(Exception, match=r"has no tensor 'lm_head.weight'"):
            async with running(args):
                pass

    asyncio.run(run())


def actors_with_workers() -> list[int]:
    """Returns the process ids of the actors that have workers of an engine."""
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"quire.worker.proc" in (path / "cmdline").read_bytes():
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if b"WorkersActor" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    found.add(parent)
    return sorted(found)


def test_a_killed_actor_with_workers_costs_no_token(
    cluster: Any, expected: list[list[int]], adapter: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage is on each node of the cluster; the other engine has one worker."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)

    async def run() -> None:
        llm = make_llm(pipeline_parallel_size=2, distributed_executor_backend="ray")
        try:
            started, client = asyncio.Event(), cast(Any, llm.engine_core)
            streams = [asyncio.create_task(tokens_of(llm, i, adapter, started)) for i in range(len(PROMPTS))]
            await asyncio.wait_for(started.wait(), 120)
            first, second = actors_with_workers()
            os.kill(second, signal.SIGKILL)
            assert await asyncio.wait_for(asyncio.gather(*streams), 180) == expected
            assert client.counts["worker_deaths.killed"] == 1
            assert first not in actors_with_workers(), "the next life of the engine has actors of its own"
        finally:
            llm.shutdown()
        await wait_for(lambda: not actors_with_workers())

    asyncio.run(run())


@pytest.fixture
def room(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cluster has a processor for each stage of two engines."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    yield
    for node in nodes:
        cluster.remove_node(node)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("victim", ["workers", "engine"])
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_engines_whose_workers_ray_places(
    backend: str, victim: str, expected: list[list[int]], adapter: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage of both engines is on a node of its own. The cores are processes of the server, or actors, too. The
    streams of an engine that loses a stage, or whose core is killed, go on at the other."""
    monkeypatch.setenv("QUIRE_RAY_DP_PACK_STRATEGY", "span")
    sizes: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    if backend == "ray":
        sizes |= {"data_parallel_backend": "ray", "data_parallel_rpc_port": free_ports(NUM_PORTS)}
    else:
        sizes |= {"distributed_executor_backend": "ray"}

    async def run() -> None:
        llm = make_llm(**sizes)
        try:
            started, client = asyncio.Event(), cast(Any, llm.engine_core)
            await wait_for(lambda: client.num_engines_up == 2)
            before = actors_with_workers()
            assert len(before) == 4
            streams = [asyncio.create_task(tokens_of(llm, i, adapter, started)) for i in range(len(PROMPTS))]
            await asyncio.wait_for(started.wait(), 120)
            lost = next(i for i, link in client.engines.links.items() if link.num_live_requests)
            if victim == "workers":
                os.kill(before[0], signal.SIGKILL)
            else:
                os.kill(client.list_engines()[lost].pid, signal.SIGKILL)
            assert await asyncio.wait_for(asyncio.gather(*streams), 180) == expected
            await wait_for(lambda: client.num_engines_up == 2 and len(actors_with_workers()) == 4)
            after = actors_with_workers()
            assert len(set(before) & set(after)) == 2, "the other engine has its actors still"
            if backend == "mp":  # else the end is that of a remote engine
                assert client.counts["worker_deaths.killed"] == (1 if victim == "workers" else 0)
        finally:
            llm.shutdown()
        await wait_for(lambda: not actors_with_workers())

    asyncio.run(run())


def test_several_engines_need_a_cluster_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.on_ray.executor import RayExecutor

    def init(address: str | None, **_: Any) -> None:
        raise ConnectionError(f"none by {address}")

    monkeypatch.setattr(ray, "init", init)
    executor = object.__new__(RayExecutor)
    executor._num_engines = 2
    with pytest.raises(ConfigError, match=r"no Ray cluster that the engines could share \(none by auto\); start one"):
        executor._join_cluster()


def test_an_engine_without_room_in_the_cluster_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(ConfigError, match="2 stages of 2 CPUs each find no room in the Ray cluster"):
        make_llm(pipeline_parallel_size=2, tensor_parallel_size=2, distributed_executor_backend="ray")
