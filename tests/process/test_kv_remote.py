"""A store on another machine: an engine has the tokens of one alone, whatever its server does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import EngineArgs

from .harness import Engine, running
from .test_kv_store import NUM_READ, PROMPT_LEN, answer, until_stored
from .test_kv_store import engine_args as storing_args

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def serving(directory: Path, address: str = "tcp://127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves a directory, and its address."""
    command = [sys.executable, "-m", "quire", "kv-store", "serve", str(directory), "--listen", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


def reading_args(address: str) -> EngineArgs:
    return EngineArgs("demo", kv_store_remote=address, kv_cache_memory_bytes=32 << 20)


async def answer_anew(engine: Engine, name: str) -> tuple[list[int], int]:
    """Returns an answer with nothing of its prompt in memory, and how many tokens came from elsewhere."""
    assert await engine.llm.reset_prefix_cache()
    return await answer(engine, name)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with the blocks of the prompt, whose key all processes have."""
    directory = tmp_path / "store"

    async def fill() -> None:
        async with running(storing_args(directory)) as engine:
            await answer(engine, "computed")
            await until_stored(directory, PROMPT_LEN // 16)

    asyncio.run(fill())
    monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(directory / "key"))
    return directory


async def until_read(engine: Engine, expected: list[int]) -> None:
    """Answers until all is read from the server: one that was dead is tried again after its rest."""
    while True:
        tokens, num_cached = await answer_anew(engine, "read")
        assert tokens == expected
        if num_cached == NUM_READ:
            return
        await asyncio.sleep(0.2)


def test_an_engine_reads_from_a_server_that_hangs_dies_and_comes_back(directory: Path) -> None:
    async def run() -> None:
        with serving(directory) as (server, address):
            async with running(reading_args(address)) as engine:
                tokens, _ = await answer(engine, "the first")
                await until_read(engine, tokens)
                os.kill(server.pid, signal.SIGSTOP)
                assert await answer_anew(engine, "hung") == (tokens, 0)
                assert await answer_anew(engine, "hung still") == (tokens, 0)
                os.kill(server.pid, signal.SIGCONT)
                await until_read(engine, tokens)
                server.kill()
                server.wait()
                assert await answer_anew(engine, "dead") == (tokens, 0)
                with serving(directory, address):
                    await until_read(engine, tokens)

    asyncio.run(run())


@pytest.mark.parametrize("place", ["kv.peer.send=kill,skip=5", "kv.peer.send=hang,skip=5", "kv.peer.message=raise"])
def test_a_server_with_a_fault_costs_blocks_and_no_answer(
    place: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(address: str) -> None:
        async with running(EngineArgs("demo", kv_cache_memory_bytes=32 << 20)) as engine:
            expected, _ = await answer(engine, "alone")
        async with running(reading_args(address)) as engine:
            for number in range(3):
                tokens, num_cached = await answer_anew(engine, f"read {number}")
                assert tokens == expected
                assert num_cached <= 5 * 16

    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as faults:
            faults.setenv("QUIRE_FAILPOINTS", place)
            _, address = stack.enter_context(serving(directory))
        asyncio.run(run(address))


def test_ctrl_c_ends_a_server(directory: Path) -> None:
    with serving(directory) as (server, _):
        server.send_signal(signal.SIGINT)
        assert server.wait() == 0
