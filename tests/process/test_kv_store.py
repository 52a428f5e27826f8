"""A restart is warm: a core that was killed, and an engine that was started again, read what was computed before."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs, RequestOutputKind, SamplingParams
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import follow, open_extent

from .harness import Engine, running

PROMPT_LEN = 400
NUM_READ = (PROMPT_LEN - 1) // 16 * 16
"""Tokens of the prompt that are read: the last one is computed, and blocks have 16."""
LONG = 400


def engine_args(directory: Path, **flags: Any) -> EngineArgs:
    return EngineArgs("demo", kv_store=str(directory), kv_store_size=1 << 30, kv_cache_memory_bytes=32 << 20, **flags)


async def answer(
    engine: Engine, name: str, max_tokens: int = 8, seen: asyncio.Event | None = None
) -> tuple[list[int], int]:
    """Returns the tokens of an answer, and how much of its prompt was cached. Sets `seen` when half of it is there."""
    prompt = {"prompt_token_ids": [300 + i * i % 1000 for i in range(PROMPT_LEN)]}
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    async for output in engine.llm.generate(prompt, params, name):
        last = output
        if seen is not None and len(last.outputs[0].token_ids) >= max_tokens // 2:
            seen.set()
    return list(last.outputs[0].token_ids), last.num_cached_tokens or 0


async def until_stored(directory: Path, num_blocks: int) -> None:
    """Waits until there are records of so many blocks; those of several workers' parts count each."""
    store = StoreDirectory.open(directory, 1 << 30)
    while True:
        found = set()
        for extent in store.list_extents():
            descriptor = open_extent(store.descriptor, extent.name)
            entries = follow(descriptor, 0, bytes.fromhex(extent.namespace))
            found |= {(extent.namespace, entry.digest) for entry in entries}
            os.close(descriptor)
        if len(found) >= num_blocks:
            break
        await asyncio.sleep(0.005)
    store.close()


def foreign_args(directory: Path, **flags: Any) -> EngineArgs:
    """Flags of the tests' connector that is written for vLLM's interface; its loads are asynchronous."""
    module = "tests.unit.engine.kv_cache.disk_connector"
    transfer = {"kv_connector": "DiskConnector", "kv_connector_module_path": module, "kv_role": "kv_both"}
    extra = {"shared_storage_path": str(directory), "is_async": True, "waits": False}
    transfer = {**transfer, "kv_connector_extra_config": extra}
    return EngineArgs("demo", kv_transfer_config=transfer, kv_cache_memory_bytes=32 << 20, **flags)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_worker_that_dies_in_a_load_of_a_foreign_connector_costs_nothing(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is killed while it loads: the answer has the tokens of one worker without a connector."""
    directory, deaths = tmp_path / "store", tmp_path / "deaths"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))

    async def run() -> None:
        async with running(EngineArgs("demo", kv_cache_memory_bytes=32 << 20)) as engine:
            expected, _ = await answer(engine, "one worker", 40)
        async with running(foreign_args(directory, **{size: 2})) as engine:
            assert await answer(engine, "computed", 40) == (expected, 0)
        monkeypatch.setenv("QUIRE_FAILPOINTS", f"kv.read=kill,skip=7,times=1,tally={deaths}")
        async with running(foreign_args(directory, **{size: 2})) as engine:
            assert (await answer(engine, "killed", 40))[0] == expected
            assert deaths.exists()
            assert engine.counts["worker_deaths.killed"] == 1
            assert count_external_hits(engine) > 0, "the next workers have loaded"
        async with running(foreign_args(directory, **{size: 2})) as engine:
            assert await answer(engine, "the next engine", 40) == (expected, NUM_READ)

    asyncio.run(run())


def count_external_hits(engine: Engine) -> float:
    metrics = engine.llm.pipeline.stats.metrics
    assert metrics is not None
    return metrics.snapshot().value("vllm:external_prefix_cache_hits")


def test_a_killed_core_and_another_engine_read_what_was_computed(tmp_path: Path) -> None:
    directory = tmp_path / "store"

    async def run() -> None:
        async with running(engine_args(directory)) as engine:
            tokens, num_cached = await answer(engine, "cold")
            assert num_cached == 0
            await until_stored(directory, PROMPT_LEN // 16)
            half = asyncio.Event()
            task = asyncio.create_task(answer(engine, "long", LONG, half))
            await half.wait()
            assert count_external_hits(engine) == 0
            engine.signal_core()  # in the middle of a request: the next core reads what is stored of it
            interrupted, _ = await task
            assert interrupted[:8] == tokens
            assert count_external_hits(engine) >= NUM_READ
            await until_stored(directory, (PROMPT_LEN + LONG - 1) // 16)
        async with running(engine_args(directory)) as engine:
            assert await answer(engine, "another engine", LONG) == (interrupted, NUM_READ)
            assert count_external_hits(engine) == NUM_READ

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("place", ["kv.read", "kv.write"])
def test_a_worker_that_dies_in_a_transfer_costs_nothing(
    size: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is killed in the middle of a load or a save: the answer has the tokens of one without a store."""
    directory, deaths = tmp_path / "store", tmp_path / "deaths"

    async def run() -> None:
        async with running(EngineArgs("demo", kv_cache_memory_bytes=32 << 20)) as engine:
            expected, _ = await answer(engine, "one worker", 40)
        if place == "kv.read":
            async with running(engine_args(directory, **{size: 2})) as engine:
                assert await answer(engine, "computed", 40) == (expected, 0)
                await until_stored(directory, 2 * (PROMPT_LEN // 16))
        monkeypatch.setenv("QUIRE_FAILPOINTS", f"{place}=kill,skip=7,times=1,tally={deaths}")
        async with running(engine_args(directory, **{size: 2})) as engine:
            assert (await answer(engine, "killed", 40))[0] == expected
            while not deaths.exists():  # a save may come later than its answer
                await asyncio.sleep(0.005)
            assert (await answer(engine, "again", 40))[0] == expected
            assert engine.counts["worker_deaths.killed"] >= 1
            await until_stored(directory, 2 * (PROMPT_LEN // 16))
        async with running(engine_args(directory, **{size: 2})) as engine:
            assert await answer(engine, "the next engine", 40) == (expected, NUM_READ)

    asyncio.run(run())
