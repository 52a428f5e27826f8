"""Engines that share experts on two "machines" of one loopback interface: no death of either costs a token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ClientError
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.link import LinkState
from quire.wire.group import NUM_GROUP_PORTS
from quire.wire.nodes import NUM_PORTS
from tests.checkpoints import make_tiny_checkpoint
from tests.ports import free_ports

from .background import BackgroundProgram
from .background import running as running_program
from .harness import check_free, fake_args, running
from .serving import SRC, environment, serve_command
from .test_engine_set import dp_client, kill, wait_for
from .test_nodes import Proxy, fleet_args, key, pid_of, read_while, state_of
from .test_shared_experts import generate, generate_all, mixture_args

__all__ = ["key"]  # a fixture
pytestmark = pytest.mark.slow  # the group is in test_coordinator.py and test_net_group.py, its steps in test_pool.py

SILENCE_S = 1.0
NUM = NUM_PORTS + NUM_GROUP_PORTS


def shared_args(key: str, port: int, **fields: Any) -> dict[str, Any]:
    fields = {"enable_expert_parallel": True, "engine_link_timeout_s": SILENCE_S, **fields}
    return fleet_args(key, port, **fields)


def node_process(key: str, port: int) -> contextlib.AbstractContextManager[BackgroundProgram]:
    return node(fake_args("Sharing", **shared_args(key, port, data_parallel_start_rank=1, headless=True)))


@contextlib.contextmanager
def node(args: EngineArgs) -> Iterator[BackgroundProgram]:
    flags: list[str] = []
    for name, value in args.non_default.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    with running_program(serve_command(*flags), cwd=SRC.parent, env=environment()) as program:
        program.wait_for(lambda line: "waiting for the server" in line, 300)
        yield program


class Scene:
    """A server with one engine, and a node with the other."""

    def __init__(self, client: DPLBAsyncMPClient, node: BackgroundProgram, key: str, proxy: Proxy) -> None:
        self.client, self.node, self.key, self.proxy = client, node, key, proxy
        self.stack = contextlib.ExitStack()

    async def is_back(self, engine: int) -> None:
        await wait_for(lambda: state_of(self.client, engine) is not LinkState.UP)
        await wait_for(lambda: state_of(self.client, engine) is LinkState.UP)


async def kill_the_engine_of_the_node(scene: Scene) -> None:
    pid = await pid_of(scene.client)
    os.kill(pid, signal.SIGKILL)
    await scene.is_back(1)


async def kill_the_engine_of_the_server(scene: Scene) -> None:
    kill(scene.client, 0)
    await scene.is_back(0)


async def kill_the_node(scene: Scene) -> None:
    scene.node.process.kill()
    await wait_for(lambda: state_of(scene.client, 1) is LinkState.DOWN)
    scene.node = scene.stack.enter_context(node_process(scene.key, scene.proxy.first))
    await wait_for(lambda: state_of(scene.client, 1) is LinkState.UP)


async def kill_the_coordinator(scene: Scene) -> None:
    launcher = scene.client.resources.launcher
    assert launcher is not None
    assert launcher.coordinator is not None
    pid = launcher.coordinator.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await wait_for(lambda: launcher.coordinator is not None and launcher.coordinator.num_restarts == 1)


async def cut_the_network(scene: Scene) -> None:
    pid = await pid_of(scene.client)
    scene.proxy.stall(*range(NUM))
    await wait_for(lambda: state_of(scene.client, 1) is LinkState.DOWN)
    scene.proxy.stall()
    await wait_for(lambda: state_of(scene.client, 1) is LinkState.UP)
    assert await pid_of(scene.client) == pid, "it begins again, without a restart"


async def end_the_node(scene: Scene) -> None:
    scene.node.process.terminate()
    assert await asyncio.to_thread(scene.node.process.wait, 120) == 0
    scene.node = scene.stack.enter_context(node_process(scene.key, scene.proxy.first))
    await wait_for(lambda: state_of(scene.client, 1) is LinkState.UP)


EVENTS = (
    kill_the_engine_of_the_node,
    kill_the_engine_of_the_server,
    kill_the_node,
    kill_the_coordinator,
    cut_the_network,
    end_the_node,
)


@pytest.mark.parametrize("event", EVENTS)
def test_a_death_on_either_machine_costs_no_token(key: str, event: Callable[[Scene], Awaitable[None]]) -> None:
    asyncio.run(survive(key, event))


async def survive(key: str, event: Callable[[Scene], Awaitable[None]]) -> None:
    """The executor fails if the engines are not at the same step; then there would be more deaths."""
    port = free_ports(NUM)
    with contextlib.closing(Proxy(port, NUM)) as proxy, node_process(key, proxy.first) as program:
        async with running(fake_args("Sharing", **shared_args(key, port))) as engine:
            scene = Scene(dp_client(engine), program, key, proxy)
            with scene.stack:
                await wait_for(lambda: scene.client.num_engines_up == 2)

                async def work() -> None:
                    await event(scene)
                    links = scene.client.engines.links.values()
                    live = [entry.request_id for link in links for entry in list(link._journal)]
                    await wait_for(lambda: not any(link.has_request(i) for i in live for link in links))
                    with pytest.raises(ClientError, match="end the server, which ends its nodes"):
                        await scene.client.restart_engines()

                await read_while(engine, work(), 16)
                await check_free(engine)
                assert scene.client.counts["poisoned_requests"] == 0
                assert scene.client.counts["deaths"] <= 1
                scene.node.process.terminate()
                assert await asyncio.to_thread(scene.node.process.wait, 120) == 0


def test_a_node_outlives_its_server_and_joins_the_next(key: str) -> None:
    """To the node the first server is gone without a word; its engine knows greater waves and epochs than the next."""
    port = free_ports(NUM)

    async def serve(proxy: Proxy, events: Callable[[DPLBAsyncMPClient], Awaitable[None]]) -> int:
        async with running(fake_args("Sharing", **shared_args(key, port))) as engine:
            client = dp_client(engine)
            proxy.stall()
            await wait_for(lambda: client.num_engines_up == 2)
            await read_while(engine, events(client))
            await check_free(engine)
            assert client.counts["poisoned_requests"] == 0
            pid = await pid_of(client)
            proxy.stall(*range(NUM))
            await wait_for(lambda: state_of(client, 1) is LinkState.DOWN)  # no farewell can reach the node
        return pid

    async def nothing(client: DPLBAsyncMPClient) -> None:
        await wait_for(lambda: client.engines.links[1].num_live_requests > 0)

    with contextlib.closing(Proxy(port, NUM)) as proxy, node_process(key, proxy.first):
        assert len({asyncio.run(serve(proxy, nothing)) for _ in range(3)}) == 1


def test_a_mixture_on_two_machines_answers_as_on_one_engine(key: str, tmp_path: Path) -> None:
    """The node has two of three engines; one is killed, then one at the server, and then all get new weights."""
    first, second = (make_tiny_checkpoint(tmp_path / str(seed), "mixtral", seed=seed) for seed in (0, 1))
    expected = [asyncio.run(generate_all(path, 1)) for path in (first, second)]
    sizes = {"data_parallel_size": 3, "expert_placement_strategy": "round_robin"}
    fields = shared_args(key, free_ports(NUM), **sizes)

    async def run() -> None:
        args = mixture_args(first, **fields | {"data_parallel_size_local": 2})
        args = EngineArgs(**args.non_default | {"headless": True, "data_parallel_start_rank": 1})
        with node(args) as program:
            async with running(mixture_args(first, **fields)) as engine:
                client = dp_client(engine)
                await wait_for(lambda: client.num_engines_up == 3)
                for victim in (2, 0):
                    tasks = [asyncio.create_task(generate(engine, i, 60)) for i in range(6)]
                    link = client.engines.links[victim]
                    await wait_for(lambda link=link: link.num_live_requests > 0)
                    pid = client.list_engines()[victim].pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    assert await asyncio.gather(*tasks) == expected[0]
                    await wait_for(lambda link=link: link.state is LinkState.UP)
                assert await engine.llm.update_weights(str(second), "v1") == "v1"
                assert list(await asyncio.gather(*(generate(engine, i, 60) for i in range(6)))) == expected[1]
                program.process.terminate()
                assert await asyncio.to_thread(program.process.wait, 120) == 0

    asyncio.run(run())
