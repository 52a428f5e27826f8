"""A program that soaks an engine: many requests, aborts and restarts. It fails if what either process holds has grown.

It is a program, so that the frontend's memory is that of a frontend: in a test process thousands of tests have left
holes in the heap, and what fills them is not the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import random
from pathlib import Path
from typing import NamedTuple

from quire.testing.history import History

from . import harness
from .harness import Engine, FakeLoad, check_free, fake_args, read, running

NUM_STREAMS = 32


class Usage(NamedTuple):
    """The resources of a process."""

    rss_mib: float
    num_fds: int
    num_threads: int


def _own_usage() -> Usage:
    """Returns the resources of this process, after it has given back the memory that it only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return usage("self")


def usage(pid: int | str) -> Usage:
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
    await check_free(engine)


async def _soak(num_rounds: int, num_requests: int, num_restarts: int, max_growth_mib: float) -> None:
    rng = random.Random(1)
    async with running(fake_args("Quick", num_gpu_blocks_override=500)) as engine:
        for _ in range(2):  # until everything has been used once
            await _round(engine, rng, num_requests)
        core_pid = engine.core_pid
        assert core_pid is not None
        before = _own_usage(), usage(core_pid)
        for _ in range(num_rounds):
            await _round(engine, rng, num_requests)
        assert engine.core_pid == core_pid
        _check_flat(before[0], _own_usage(), max_growth_mib)
        _check_flat(before[1], usage(core_pid), max_growth_mib)

        for _ in range(num_restarts):
            dead = engine.signal_core()
            await _round(engine, rng, NUM_STREAMS)
            assert engine.core_pid != dead
        _check_flat(before[0], _own_usage(), max_growth_mib)
        assert engine.core_pid is not None
        _check_flat(before[1], usage(engine.core_pid), max_growth_mib)


def _check_flat(before: Usage, after: Usage, max_growth_mib: float) -> None:
    """Descriptors and threads exactly, memory nearly."""
    print(f"{before} -> {after}", flush=True)
    assert after.num_fds <= before.num_fds, "file descriptors"
    assert after.num_threads <= before.num_threads, "threads"
    assert after.rss_mib <= before.rss_mib + max_growth_mib, "memory"


def main() -> None:
    """Soak an engine; an AssertionError says what has grown."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=160, help="in each round")
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--max-growth-mib", type=float, default=4.0)
    parser.add_argument("--deadline-s", type=float, default=300.0)
    args = parser.parse_args()
    harness.DEADLINE_S = args.deadline_s
    asyncio.run(_soak(args.rounds, args.requests, args.restarts, args.max_growth_mib))


if __name__ == "__main__":
    main()
