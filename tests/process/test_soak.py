"""Promise P5 over time: memory, file descriptors and threads of both processes stay flat over many requests, aborts and
restarts."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.testing.history import History

from .harness import Engine, FakeLoad, fake_args, read, running

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
NUM_STREAMS = 32


class Usage(NamedTuple):
    """What a process holds."""

    rss_mib: float
    num_fds: int
    num_threads: int


def _usage(pid: int | str) -> Usage:
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    return Usage(
        int(status["VmRSS"].split()[0]) / 1024,
        len(list(Path(f"/proc/{pid}/fd").iterdir())),
        int(status["Threads"]),
    )


async def _round(engine: Engine, rng: random.Random, num_requests: int) -> None:
    """Requests to their end, some left before it."""
    load, history = FakeLoad(rng), History()
    name = f"{rng.random()}"

    async def worker(number: int) -> None:
        for turn in range(num_requests // NUM_STREAMS):
            _, prompt, params = load.make()
            reading = read(engine, history, f"{name}/{number}/{turn}", {"prompt_token_ids": prompt}, params)
            if rng.random() < 0.2:
                task = asyncio.create_task(reading)
                await asyncio.sleep(rng.uniform(0, 0.05))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                await reading

    await asyncio.gather(*(worker(number) for number in range(NUM_STREAMS)))
    assert not [problem for problem in history.problems() if "0 ends" not in problem]
    assert engine.llm.get_num_unfinished_requests() == 0
    assert engine.client.mp.num_live_requests == 0


async def _soak(num_rounds: int, num_requests: int, num_restarts: int, max_growth_mib: float) -> None:
    rng = random.Random(1)
    async with running(fake_args("Quick", num_gpu_blocks_override=500)) as engine:
        for _ in range(2):  # until everything has been used once
            await _round(engine, rng, num_requests)
        core_pid = engine.core_pid
        assert core_pid is not None
        before = _usage("self"), _usage(core_pid)
        for _ in range(num_rounds):
            await _round(engine, rng, num_requests)
        assert engine.core_pid == core_pid
        _check_flat(before[0], _usage("self"), max_growth_mib)
        _check_flat(before[1], _usage(core_pid), max_growth_mib)

        for _ in range(num_restarts):
            dead = engine.signal_core()
            await _round(engine, rng, NUM_STREAMS)
            assert engine.core_pid != dead
        _check_flat(before[0], _usage("self"), max_growth_mib)
        assert engine.core_pid is not None
        _check_flat(before[1], _usage(engine.core_pid), max_growth_mib)


def _check_flat(before: Usage, after: Usage, max_growth_mib: float) -> None:
    """Descriptors and threads exactly, memory nearly."""
    assert after.num_fds <= before.num_fds, "file descriptors"
    assert after.num_threads <= before.num_threads, "threads"
    assert after.rss_mib <= before.rss_mib + max_growth_mib, "memory"


def test_a_short_soak() -> None:
    asyncio.run(_soak(num_rounds=4, num_requests=160, num_restarts=5, max_growth_mib=4.0))


@pytest.mark.slow
def test_a_long_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.process.harness.DEADLINE_S", 7200.0)
    asyncio.run(_soak(num_rounds=300, num_requests=640, num_restarts=200, max_growth_mib=16.0))
