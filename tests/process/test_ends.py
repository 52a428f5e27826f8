"""Promises P11 and P23: a frontend that is asked to end, and one that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.testing.history import History

from .harness import check_free, fake_args, read, running
from .pace import LEISURELY_STEP_S, processor_seconds_until
from .peer import core_environment
from .program import MAX_MODEL_LEN, NUM_STREAMS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
"""For anything a process does."""
PROMISED_S = 2.0
"""Time in which a core forgets a frontend that is dead."""


class Program:
    """A frontend process and what it has said."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.program", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=core_environment(),
            cwd=ROOT,
        )
        self.said: list[dict[str, Any]] = []

    def wait_for(self, key: str) -> Any:
        """Read on until it says so; the value."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))
            if key in self.said[-1]:
                return self.said[-1][key]
        raise AssertionError(f"it ended with {self.process.wait(LIMIT_S)} and said {self.said[-3:]}")

    def wait_exit(self) -> int:
        """Its exit code; what it said on the way is in `said`."""
        assert self.process.stdout is not None
        self.said += [json.loads(line) for line in self.process.stdout]
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Program] = []

    def make(*arguments: str) -> Program:
        programs.append(Program(*arguments))
        return programs[-1]

    yield make
    for program in programs:
        program.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- asked to end --------------------------------------------------------------------------------------------------


def _end(start: Start, delay_s: float, before: Callable[[Program, int], None] = lambda *_: None) -> None:
    """SIGTERM so long after all streams have begun: each has one end, and nothing is left."""
    program = start()
    core = program.wait_for("core")
    directory = Path(program.said[-1]["directory"])
    program.wait_for("live")
    before(program, core)
    time.sleep(delay_s)  # the phase in which the signal meets it, not a wait for something
    program.process.terminate()
    assert program.wait_exit() == 0
    ends = {said["end"]: said["reason"] for said in program.said if "end" in said}
    assert len([said for said in program.said if "end" in said]) == len(ends) == NUM_STREAMS
    assert set(ends.values()) == {"abort"}, ends
    assert program.said[-1] == {"done": True}
    assert not directory.exists()
    assert not _is_running(core)
    assert _children_left(directory) == []


def _children_left(directory: Path) -> list[str]:
    """Processes that were started for this directory's sockets (Linux)."""
    needle = str(directory).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if needle in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_asked_to_end_at_a_random_moment(start: Start) -> None:
    _end(start, random.Random(0).uniform(0.0, 0.3))


def test_asked_to_end_while_the_core_is_being_replaced(start: Start) -> None:
    _end(start, 0.1, before=lambda _, core: os.kill(core, signal.SIGKILL))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 600))
def test_asked_to_end_at_500_random_moments(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    if rng.random() < 0.3:
        _end(start, rng.uniform(0.0, 0.6), before=lambda _, core: os.kill(core, signal.SIGKILL))
    else:
        _end(start, rng.uniform(0.0, 1.0))


# -- killed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["serving", "restarting", "stopped core"])
def test_a_core_ends_with_the_frontend_that_started_it(start: Start, victim: str) -> None:
    program = start()
    core = program.wait_for("core")
    directory = Path(program.said[-1]["directory"])
    program.wait_for("live")
    if victim == "restarting":
        os.kill(core, signal.SIGKILL)
        processor_seconds_until(lambda: bool(set(_children_left(directory)) - {str(core)}))
    if victim == "stopped core":
        os.kill(core, signal.SIGSTOP)
    program.process.kill()
    assert processor_seconds_until(lambda: not _children_left(directory)) < PROMISED_S


def test_the_requests_of_a_killed_frontend_are_aborted(start: Start) -> None:
    """One that shares the core: the core and the other frontend's stream go on. Its steps are the clock, of which the
    core can make so many in the time that is promised, and fewer where it has to wait for a processor."""
    history = History()
    params = SamplingParams(max_tokens=8000, ignore_eos=True)

    async def run() -> int:
        async with running(fake_args("Leisurely", max_model_len=MAX_MODEL_LEN), client_count=2) as engine:
            ours = asyncio.create_task(read(engine, history, "ours", {"prompt_token_ids": [9]}, params))
            addresses = engine.client.get_client_addresses(1)
            other = start("attach", addresses.input_address, addresses.output_address)
            await asyncio.to_thread(other.wait_for, "live")
            core, num_tokens = engine.core_pid, history.num_tokens
            other.process.kill()
            while (await engine.llm.get_snapshot()).num_running > 1:
                assert not ours.done()
            num_steps = history.num_tokens - num_tokens
            while history.num_tokens < num_tokens + 10:
                await asyncio.sleep(0.005)
            await engine.llm.abort("ours")
            await ours
            await check_free(engine)
            assert engine.core_pid == core
            return num_steps

    assert asyncio.run(run()) * LEISURELY_STEP_S < PROMISED_S
    assert history.problems() == []
    tokens = expected_output(FakeModel(), [9], params, MAX_MODEL_LEN).token_ids
    assert history.token_differences({("ours", 0): tokens}) == []
