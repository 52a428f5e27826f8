"""Engines on two "machines" of one loopback interface: a node is killed, comes back, ends, and is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.link import LinkState
from quire.frontend.supervision.node import NodeAgent
from quire.testing.history import History
from quire.wire.nodes import NUM_PORTS
from tests.ports import free_ports

from .background import BackgroundProgram
from .background import running as running_program
from .harness import Engine, FakeLoad, check_free, fake_args, read, running
from .serving import SRC, ServerProcess, environment, serve_command, serving
from .test_engine_set import dp_client, wait_for


@pytest.fixture
def key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["fleet", "key"]) == 0
    path = tmp_path / "fleet.key"
    path.write_text(capsys.readouterr().out)
    path.chmod(0o600)
    return str(path)


def fleet_args(key: str, port: int, **fields: Any) -> dict[str, Any]:
    return {
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_rpc_port": port,
        "fleet_key": key,
    } | fields


@contextlib.contextmanager
def node_process(key: str, port: int) -> Iterator[BackgroundProgram]:
    fields = fake_args("Calm", **fleet_args(key, port, data_parallel_start_rank=1, headless=True)).non_default
    flags: list[str] = []
    for name, value in fields.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    with running_program(serve_command(*flags), cwd=SRC.parent, env=environment()) as program:
        program.wait_for(lambda line: "waiting for the server" in line, 300)
        yield program


def state_of(client: DPLBAsyncMPClient, engine: int) -> LinkState:
    return client.engines.links[engine].state


def incarnation(client: DPLBAsyncMPClient) -> int:
    ready = client.engines.links[1].ready_response
    return -1 if ready is None else ready.incarnation


async def pid_of(client: DPLBAsyncMPClient) -> int:
    """Returns the process of the node's engine, which the node reports after the core is connected."""
    await wait_for(lambda: client.list_engines()[1].pid is not None)
    pid = client.list_engines()[1].pid
    assert pid is not None
    return pid


async def read_while(engine: Engine, work: Any, num_streams: int = 8) -> None:
    """Readers come and go until `work` has ended: every token is checked."""
    history, load = History(), FakeLoad(random.Random(1))

    async def begin() -> None:
        await wait_for(lambda: history.num_tokens >= 200)
        await work

    worker = asyncio.create_task(begin())

    async def read_on() -> None:
        while not worker.done():
            request_id, prompt, params = load.make()
            await read(engine, history, request_id, {"prompt_token_ids": prompt}, params)

    await asyncio.gather(*(read_on() for _ in range(num_streams)))
    await worker
    assert history.problems() == []
    assert history.token_differences(load.expected) == []


class Proxy(threading.Thread):
    """Passes bytes between a node and its head, unless it stalls: a network that loses everything."""

    def __init__(self, head: int, count: int = NUM_PORTS) -> None:
        super().__init__(name="Proxy", daemon=True)
        self.first = free_ports(count)
        self._listeners = {socket.create_server(("127.0.0.1", self.first + i)): head + i for i in range(count)}
        self._peers: dict[socket.socket, socket.socket] = {}
        self._stalled: frozenset[int] = frozenset()
        self._reader, self._writer = socket.socketpair()
        self._head = head
        self._ports: dict[socket.socket, int] = {}
        self.start()

    def stall(self, *ports: int) -> None:
        """Lets nothing through at these ports of `NUM_PORTS`, in either direction; without any, at none."""
        self._stalled = frozenset(ports)
        self._writer.send(b".")

    def run(self) -> None:
        while True:
            open_ = [
                s for s, port in {**self._listeners, **self._ports}.items() if port - self._head not in self._stalled
            ]
            for source in select.select([self._reader, *open_], [], [])[0]:
                if source is self._reader:
                    if not self._reader.recv(64):
                        return
                elif source in self._listeners:
                    self._connect(source, self._listeners[source])
                elif source in self._peers:
                    self._pass_on(source)

    def _connect(self, listener: socket.socket, port: int) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", port))
        except OSError:
            near.close()
            return
        self._peers |= {near: far, far: near}
        self._ports |= {near: port, far: port}

    def _pass_on(self, source: socket.socket) -> None:
        peer = self._peers[source]
        with contextlib.suppress(OSError):
            if data := source.recv(1 << 16):
                peer.sendall(data)
                return
        for end in (source, peer):
            del self._peers[end], self._ports[end]
            end.close()

    def close(self) -> None:
        self._writer.close()
        self.join()
        for end in (*self._listeners, *self._peers, self._reader):
            end.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_node_is_killed_and_comes_back(key: str) -> None:
    port = free_ports(NUM_PORTS)

    async def run() -> None:
        async with running(fake_args("Calm", **fleet_args(key, port))) as engine:
            client = dp_client(engine)
            assert (client.num_engines_up, state_of(client, 1)) == (1, LinkState.DOWN), "it serves without the other"

            async def work() -> None:
                links = client.engines.links
                with node_process(key, port) as node:
                    await wait_for(lambda: state_of(client, 1) is LinkState.UP)
                    await wait_for(lambda: links[1].num_live_requests > 1)
                    core = await pid_of(client)
                    assert client.list_engines()[1].host == socket.gethostname()
                    os.kill(core, signal.SIGKILL)
                    await wait_for(lambda: incarnation(client) == 1 and state_of(client, 1) is LinkState.UP)
                    await wait_for(lambda: client.restarts == {"killed": 1})  # the node reports it, not the core
                    await wait_for(lambda: links[1].num_live_requests > 1)
                    core = await pid_of(client)
                    node.process.kill()
                    await wait_for(lambda: not links[1].num_live_requests)
                    await wait_for(lambda: not is_running(core))
                with node_thread(key, port) as agent:
                    await wait_for(lambda: state_of(client, 1) is LinkState.UP)
                    assert incarnation(client) > 1
                    await wait_for(lambda: links[1].num_live_requests > 1)
                    agent.ask_end()
                    await wait_for(lambda: state_of(client, 1) is LinkState.DOWN)

            await read_while(engine, work())
            counts = client.counts
            assert min(counts[f"moves.1.{why}"] for why in ("killed", "lost", "drain")) > 0
            assert counts["poisoned_requests"] == 0

    asyncio.run(run())


@contextlib.contextmanager
def node_thread(key: str, port: int, **fields: Any) -> Iterator[NodeAgent]:
    """A node in this process."""
    fields = fleet_args(key, port, data_parallel_start_rank=1, headless=True, **fields)
    agent = NodeAgent(fake_args("Calm", **fields).create_engine_config("serving"))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(agent.run)
        try:
            yield agent
        finally:
            agent.ask_end()
            serving.result()


@pytest.mark.slow
def test_a_partition_heals(key: str) -> None:
    """The node is silent alone, then its core is, too: nothing of before counts, and the core goes on."""
    port = free_ports(NUM_PORTS)
    proxy = Proxy(port)
    timeout = {"engine_link_timeout_s": 1.0}

    async def run() -> None:
        async with running(fake_args("Calm", **fleet_args(key, port, **timeout))) as engine:
            client = dp_client(engine)
            link = client.engines.links[1]

            async def work() -> None:
                pid = await pid_of(client)
                for ports in ((0,), range(NUM_PORTS)):
                    await wait_for(lambda: link.num_live_requests > 1)
                    proxy.stall(*ports)
                    await wait_for(lambda: link.state is LinkState.DOWN)
                    await wait_for(lambda: not link.num_live_requests)
                    proxy.stall()
                    await wait_for(lambda: link.state is LinkState.UP)
                    await wait_for(lambda: link.num_live_requests > 1)
                assert client.list_engines()[1].pid == pid, "its core lives on"

            with node_thread(key, proxy.first, **timeout):
                await wait_for(lambda: client.list_engines()[1].pid is not None and link.state is LinkState.UP)
                await read_while(engine, work())
                await check_free(engine)
            assert client.counts["moves.1.lost"] > 0
            assert client.counts["stale"] > 0

    try:
        asyncio.run(run())
    finally:
        proxy.close()


@pytest.mark.slow
def test_the_commands_end_in_good_order(key: str) -> None:
    """A head without engines, and a node: Ctrl-C at the head ends both."""
    port = free_ports(NUM_PORTS)
    shared = ("--data-parallel-size", "1", "--data-parallel-rpc-port", str(port), "--fleet-key", key)

    def start_node(server: ServerProcess) -> None:
        command = serve_command(*shared, "--headless")
        nodes.append(stack.enter_context(running_program(command, cwd=SRC.parent, env=environment())))

    with contextlib.ExitStack() as stack:
        nodes: list[Any] = []
        server = stack.enter_context(serving(*shared, "--data-parallel-size-local", "0", while_loading=start_node))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 0
        assert [node.process.wait(120) for node in nodes] == [0]
