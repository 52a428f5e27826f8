"""Engines on two "machines" of one loopback interface: a node is killed, comes back, ends, and is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.errors import ConfigError
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.link import LinkState
from quire.frontend.supervision.node import NodeAgent
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.testing.history import History
from quire.wire.nodes import NUM_PORTS

from .background import BackgroundProgram
from .background import running as running_program
from .harness import FAKE_MODEL_LEN, Engine, FakeLoad, fake_args, read, running
from .serving import SRC, environment, serve_command
from .test_engine_set import dp_client, wait_for


@pytest.fixture
def key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["fleet", "key"]) == 0
    path = tmp_path / "fleet.key"
    path.write_text(capsys.readouterr().out)
    path.chmod(0o600)
    return str(path)


def free_ports(count: int = NUM_PORTS) -> int:
    """Returns the first of ports that follow one another and are free."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for i in range(1, count):
                stack.enter_context(socket.create_server(("127.0.0.1", first + i)))
            return int(first)


def fleet_args(key: str, port: int, **fields: Any) -> dict[str, Any]:
    return {
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_rpc_port": port,
        "fleet_key": key,
    } | fields


@contextlib.contextmanager
def node_process(key: str, port: int) -> Iterator[BackgroundProgram]:
    fields = fake_args(**fleet_args(key, port, data_parallel_start_rank=1, headless=True)).non_default
    flags: list[str] = []
    for name, value in fields.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    with running_program(serve_command(*flags), cwd=SRC.parent, env=environment()) as program:
        program.wait_for(lambda line: "waiting for the server" in line, 60)
        yield program


def state_of(client: DPLBAsyncMPClient, engine: int) -> LinkState:
    return client.engines.links[engine].state


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


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_node_is_killed_and_comes_back(key: str) -> None:
    port = free_ports()

    async def run() -> None:
        async with running(fake_args(**fleet_args(key, port))) as engine:
            client = dp_client(engine)
            assert (client.num_engines_up, state_of(client, 1)) == (1, LinkState.DOWN), "it serves without the other"

            async def work() -> None:
                links = client.engines.links
                with node_process(key, port) as node:
                    await wait_for(lambda: state_of(client, 1) is LinkState.UP)
                    await wait_for(lambda: links[1].num_live_requests > 1)
                    core = client.list_engines()[1].pid
                    assert core is not None
                    assert client.list_engines()[1].host == socket.gethostname()
                    os.kill(core, signal.SIGKILL)
                    await wait_for(
                        lambda: links[1].ready_response.incarnation == 1 and state_of(client, 1) is LinkState.UP
                    )
                    assert client.restarts == {"killed": 1}
                    await wait_for(lambda: links[1].num_live_requests > 1)
                    core = client.list_engines()[1].pid
                    assert core is not None
                    node.process.kill()
                    await wait_for(lambda: not links[1].num_live_requests)
                    await wait_for(lambda: not is_running(core))
                with node_process(key, port) as node:
                    await wait_for(lambda: state_of(client, 1) is LinkState.UP)
                    assert links[1].ready_response.incarnation > 1
                    await wait_for(lambda: links[1].num_live_requests > 1)
                    node.process.send_signal(signal.SIGINT)
                    assert await asyncio.to_thread(node.process.wait, 30) == 0
                    await wait_for(lambda: state_of(client, 1) is LinkState.DOWN)

            await read_while(engine, work())
            counts = client.counts
            assert min(counts[f"moves.1.{why}"] for why in ("killed", "lost", "drain")) > 0
            assert counts["poisoned_requests"] == 0

    asyncio.run(run())
