"""Engines that step together, in processes: the coordinator is killed, an engine in a wave, and all are paused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import random
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.engine import LifecycleConfig
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.link import LinkState
from quire.frontend.supervision.coordinator_launch import CoordinatorPlan, CoordinatorSupervisor
from quire.testing.history import History
from quire.wire.handshake import CoordinatorAddresses

from .harness import FakeLoad, fake_args, read, running
from .test_engine_set import dp_client, kill, read_while, wait_for

WAVES: dict[str, Any] = {"dp_coordinator": "always", "num_streams": 16, "executor": "Steady"}


def coordinator_of(client: DPLBAsyncMPClient) -> CoordinatorSupervisor:
    launcher = client.resources.launcher
    assert launcher is not None
    assert launcher.coordinator is not None
    return launcher.coordinator


async def kill_coordinator(client: DPLBAsyncMPClient) -> None:
    coordinator = coordinator_of(client)
    before = coordinator.num_restarts
    assert coordinator.pid is not None
    os.kill(coordinator.pid, signal.SIGKILL)
    await wait_for(lambda: coordinator.num_restarts > before and coordinator.pid is not None)


def test_deaths_of_the_coordinator_and_of_an_engine_in_a_wave_lose_nothing() -> None:
    """First requests one by one, each a wave, where a start that is lost would make both engines wait for ever; then
    many at once."""

    async def run() -> None:
        history, load = History(), FakeLoad(random.Random(3))
        async with running(fake_args(data_parallel_size=2, dp_coordinator="always")) as engine:
            client = dp_client(engine)
            follower, metrics = client._link_thread.coordinator, engine.llm.pipeline.stats.metrics
            assert follower is not None
            assert metrics is not None

            async def send() -> None:
                request_id, prompt, params = load.make()
                await read(engine, history, request_id, {"prompt_token_ids": prompt}, params)

            await send()
            await wait_for(lambda: follower.wave >= 1)
            await kill_coordinator(client)
            wave = follower.wave
            await send()
            await wait_for(lambda: follower.wave > wave)
            await wait_for(lambda: metrics.snapshot().value("quire_dp_wave") > wave)
            await wait_for(lambda: metrics.snapshot().value("quire_dummy_batches") > 0)

            worker = asyncio.create_task(_kill_and_pause(client))

            async def read_on() -> None:
                while not worker.done():
                    await send()

            await asyncio.gather(*(read_on() for _ in range(16)))
            await worker
            counts, pid = engine.counts, coordinator_of(client).pid
        assert (counts["deaths"], counts["poisoned_requests"]) == (1, 0)
        assert counts["moves.1.killed"] > 0
        assert history.problems() == history.token_differences(load.expected) == []
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(run())


async def _kill_and_pause(client: DPLBAsyncMPClient) -> None:
    """Kills engine 1 while it has requests, waits until it has some again, and pauses all."""
    link = client._link_thread.links.links[1]
    await wait_for(lambda: link.num_live_requests > 3)
    kill(client, 1)
    await wait_for(lambda: link.state is LinkState.DOWN)
    await wait_for(lambda: not link.num_live_requests)  # they have moved, and the other engine goes on alone
    await wait_for(lambda: link.state is LinkState.UP)
    await wait_for(lambda: link.num_live_requests > 0)
    await client.call_utility_async("pause_scheduler", "keep", False)
    assert await client.call_utility_async("is_scheduler_paused")
    await client.call_utility_async("resume_scheduler")


def test_a_coordinator_that_cannot_start_or_has_no_restart_left_says_so(tmp_path: Path) -> None:
    addresses = CoordinatorAddresses(*(f"ipc://{tmp_path}/{name}" for name in ("a", "b", "c")))
    gone: queue.SimpleQueue[QuireError] = queue.SimpleQueue()
    supervisor = CoordinatorSupervisor(CoordinatorPlan(addresses, 1), LifecycleConfig(core_restart_limit=0), gone.put)
    supervisor.start()
    assert supervisor.addresses.result(60) == addresses
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    assert "was killed by SIGKILL, and its budget of 0 restarts" in str(gone.get(timeout=60))
    supervisor.join(60)

    nowhere = CoordinatorPlan(msgspec.structs.replace(addresses, back=f"ipc://{tmp_path}/none/b"), 1)
    supervisor = CoordinatorSupervisor(nowhere, LifecycleConfig(), gone.put)
    supervisor.start()
    with pytest.raises(EngineDeadError, match="ended before it was ready"):
        supervisor.addresses.result(60)
    supervisor.join(60)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "2 to 64 engines"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, "one server"),
    ],
)
def test_waves_need_several_engines_of_one_server(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        fake_args(dp_coordinator="always", **fields).create_engine_config("serving")


@pytest.mark.slow
def test_many_deaths_in_waves_lose_nothing() -> None:
    dice = random.Random(11)

    async def work(client: DPLBAsyncMPClient) -> None:
        links = client._link_thread.links.links
        for _ in range(60):
            if dice.random() < 0.4:
                await kill_coordinator(client)
                continue
            engine = dice.choice(sorted(links))
            link = links[engine]
            await wait_for(lambda link=link: link.state is LinkState.UP)
            with contextlib.suppress(AssertionError, ProcessLookupError):  # it died a moment ago
                kill(client, engine)
            await asyncio.sleep(dice.random() * 0.2)
            if dice.random() < 0.3:
                await client.call_utility_async("pause_scheduler", "keep", False)
                await client.call_utility_async("resume_scheduler")

        await wait_for(lambda: client.num_engines_up == 3)
        await client.restart_engines()
        await client.scale(4)
        await client.scale(1)
        await client.scale(2)

    counts = asyncio.run(read_while(work, size=3, **WAVES))
    assert counts["deaths"] > 20
