"""Engines that share experts on two "machines" of one loopback interface: no death of either costs a token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from quire.errors import ClientError
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.link import LinkState
from quire.wire.group import NUM_GROUP_PORTS
from quire.wire.nodes import NUM_PORTS

from .background import BackgroundProgram
from .background import running as running_program
from .harness import check_free, fake_args, running
from .serving import SRC, environment, serve_command
from .test_engine_set import dp_client, kill, wait_for
from .test_nodes import fleet_args, free_ports, key, pid_of, read_while, state_of

__all__ = ["key"]  # a fixture
pytestmark = pytest.mark.slow  # the group is in test_coordinator.py and test_net_group.py, its steps in test_pool.py

SILENCE_S = 1.0


def shared_args(key: str, port: int, **fields: Any) -> dict[str, Any]:
    fields = {"enable_expert_parallel": True, "engine_link_timeout_s": SILENCE_S, **fields}
    return fleet_args(key, port, **fields)


@contextlib.contextmanager
def node_process(key: str, port: int) -> Iterator[BackgroundProgram]:
    args = fake_args("Sharing", **shared_args(key, port, data_parallel_start_rank=1, headless=True))
    flags: list[str] = []
    for name, value in args.non_default.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    with running_program(serve_command(*flags), cwd=SRC.parent, env=environment()) as program:
        program.wait_for(lambda line: "waiting for the server" in line, 60)
        yield program


class Scene:
    """A server with one engine, and a node with the other."""

    def __init__(self, client: DPLBAsyncMPClient, node: BackgroundProgram, key: str, port: int) -> None:
        self.client, self.node, self.key, self.port = client, node, key, port
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
    scene.node = scene.stack.enter_context(node_process(scene.key, scene.port))
    await wait_for(lambda: state_of(scene.client, 1) is LinkState.UP)


async def kill_the_coordinator(scene: Scene) -> None:
    launcher = scene.client.resources.launcher
    assert launcher is not None
    assert launcher.coordinator is not None
    pid = launcher.coordinator.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await wait_for(lambda: launcher.coordinator is not None and launcher.coordinator.num_restarts == 1)


EVENTS = (kill_the_engine_of_the_node, kill_the_engine_of_the_server, kill_the_node, kill_the_coordinator)


@pytest.mark.parametrize("event", EVENTS)
def test_a_death_on_either_machine_costs_no_token(key: str, event: Callable[[Scene], Awaitable[None]]) -> None:
    asyncio.run(survive(key, event))


async def survive(key: str, event: Callable[[Scene], Awaitable[None]]) -> None:
    """The executor fails if the engines are not at the same step; then there would be more deaths."""
    port = free_ports(NUM_PORTS + NUM_GROUP_PORTS)
    with node_process(key, port) as node:
        async with running(fake_args("Sharing", **shared_args(key, port))) as engine:
            scene = Scene(dp_client(engine), node, key, port)
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
                assert await asyncio.to_thread(scene.node.process.wait, 30) == 0
