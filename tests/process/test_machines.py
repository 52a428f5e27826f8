"""Engines whose workers are on two "machines" of one loopback interface: the texts of one worker, also when a worker or
a machine is killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs, LoRARequest
from quire.frontend.async_llm import AsyncLLM
from quire.wire.nodes import make_fleet_key
from tests.ports import free_ports

from .background import BackgroundProgram
from .background import running as running_program
from .serving import SRC, environment, serve_command
from .test_engine_set import wait_for
from .test_nodes import is_running
from .test_workers import PROMPTS, adapter, expected, tokens_of, workers_of

__all__ = ["adapter", "expected"]  # fixtures


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    """Flags of both machines."""
    key = tmp_path / "fleet.key"
    key.write_text(make_fleet_key())
    key.chmod(0o600)
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 64, "enable_lora": True}
    sizes["engine_link_timeout_s"] = 1.0
    return {**sizes, "nnodes": 2, "master_port": free_ports(4), "fleet_key": str(key)}


@contextlib.contextmanager
def machine(fields: dict[str, Any]) -> Iterator[BackgroundProgram]:
    """The second machine."""
    flags = ["demo", "--headless", "--node-rank", "1"]
    for name, value in fields.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with running_program(serve_command(*flags), cwd=SRC.parent, env=environment()) as program:
        program.wait_for(lambda line: "waiting for the server" in line, 300)
        yield program


@pytest.mark.slow  # calls and deaths are in test_worker_hub.py, bits in test_net.py
@pytest.mark.parametrize("victim", ["worker", "machine", "link"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    ],
)
def test_a_death_on_another_machine_costs_no_token(
    sizes: dict[str, int], victim: str, fields: dict[str, Any], expected: list[list[int]], adapter: LoRARequest
) -> None:
    """Two engines have a worker each on both machines."""
    asyncio.run(killed({**fields, **sizes}, victim, expected, adapter))


async def killed(fields: dict[str, Any], victim: str, expected: list[list[int]], adapter: LoRARequest) -> None:
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(machine(fields))
        llm = AsyncLLM.from_engine_args(EngineArgs("demo", **fields))
        stack.callback(llm.shutdown)
        client: Any = llm.engine_core
        started = asyncio.Event()
        streams = [asyncio.create_task(tokens_of(llm, i, adapter, started)) for i in range(len(PROMPTS))]
        await asyncio.wait_for(started.wait(), 60)
        theirs, num_engines = workers_of(node.process.pid), fields.get("data_parallel_size", 1)
        assert len(theirs) == num_engines
        if victim == "worker":
            os.kill(theirs[0], signal.SIGKILL)
            theirs = theirs[:1]
        elif victim == "machine":
            node.process.kill()
        else:
            node.process.send_signal(signal.SIGSTOP)  # its end of the link falls silent
        await wait_for(lambda: client.counts["worker_deaths.killed"] == len(theirs))
        node.process.send_signal(signal.SIGCONT)
        await wait_for(lambda: not any(map(is_running, theirs)))
        if victim == "machine":
            node = stack.enter_context(machine(fields))
        assert await asyncio.wait_for(asyncio.gather(*streams), 120) == expected
        node.process.terminate()
        assert await asyncio.to_thread(node.process.wait, 120) == 0
