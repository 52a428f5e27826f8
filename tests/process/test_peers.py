"""Prefill and decode apart: the engine that decodes has the same tokens as one alone, whatever happens to the other."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs, SamplingParams

from ..seeds import seed_of
from .harness import Engine, running

PROMPT_LEN, BLOCK_SIZE = 400, 16
NUM_BLOCKS = (PROMPT_LEN - 1) // BLOCK_SIZE
NUM_ROUNDS = 60


def engine_args(directory: Path, role: str, **flags: Any) -> EngineArgs:
    # blocks are taken however long it takes: on a quick machine computing them soon seems to be better, after deaths
    extra = {"path": str(directory), "load_bias": 1e9}
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return EngineArgs(
        "demo", kv_transfer_config=transfer, kv_cache_memory_bytes=32 << 20, core_restart_limit=10_000,
        core_restart_window_s=1.0, **flags,
    )  # fmt: skip


async def answer(
    engine: Engine, name: str, seed: int, max_tokens: int, transfer: dict[str, Any] | None = None
) -> tuple[list[int], int, dict[str, Any] | None]:
    """Returns the tokens of an answer, how much of its prompt was cached, and its kv_transfer_params."""
    rng = random.Random(seed)
    prompt = {"prompt_token_ids": [rng.randrange(300, 1300) for _ in range(PROMPT_LEN)]}
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra)
    async for output in engine.llm.generate(prompt, params, name):
        last = output
    return list(last.outputs[0].token_ids), last.num_cached_tokens or 0, last.kv_transfer_params


async def answer_apart(p: Engine, d: Engine, seed: int) -> tuple[list[int], int]:
    """Returns the tokens of D's answer, and how many of its prompt it did not compute."""
    first, _, transfer = await answer(p, f"prefill {seed}", seed, 1, {"do_remote_decode": True})
    tokens, num_cached, _ = await answer(d, f"decode {seed}", seed, 8, transfer)
    assert tokens[:1] == first
    return tokens, num_cached


def external_hits(engine: Engine) -> float:
    metrics = engine.llm.pipeline.stats.metrics
    assert metrics is not None
    return metrics.snapshot().value("vllm:external_prefix_cache_hits")


async def check_one(p: Engine, d: Engine, seed: int) -> int:
    """Compares an answer of both with one of P alone. Returns how many blocks D has taken."""
    alone, *_ = await answer(p, f"alone {seed}", seed, 8)
    before = external_hits(d)
    tokens, num_cached = await answer_apart(p, d, seed)
    assert tokens == alone
    assert num_cached == external_hits(d) - before
    return num_cached // BLOCK_SIZE


def test_blocks_are_taken_from_the_engine_that_prefilled_until_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    armed, tally = tmp_path / "armed", tmp_path / "killed"

    async def run() -> None:
        async with running(engine_args(tmp_path / "key", "kv_consumer")) as d:
            # When it is armed, P is killed in the middle of a request's blocks.
            kill = f"kv.peer.send=kill,after={armed},skip=5,times=1,tally={tally}"
            monkeypatch.setenv("QUIRE_FAILPOINTS", kill)
            async with running(engine_args(tmp_path / "key", "kv_producer")) as p:
                seeds = itertools.count()
                while await check_one(p, d, next(seeds)) < NUM_BLOCKS:
                    pass  # the machine was so slow that it was computed
                armed.touch()
                num_taken = NUM_BLOCKS
                while not tally.exists():
                    num_taken = await check_one(p, d, next(seeds))
                assert num_taken <= 5

    asyncio.run(run())


def storm() -> list[list[str]]:
    """Returns a hundred faults, those that are met together in one list: P dies at each message that it gets and before
    each block that it sends, D at each block, and at the greeting of the core that follows."""
    blocks = range(NUM_BLOCKS)
    faults = [[f"kv.peer.send=kill,skip={index}"] for index in blocks]
    faults += [[f"kv.peer.message=kill,key={name}"] for name in ("Hello", "Proof", "Get", "Release") for _ in range(4)]
    faults += [[f"kv.peer.message=kill,key=Credit,skip={index}"] for index in range(12)]
    faults += [[f"kv.peer.answer=kill,key=Block,skip={index}", "kv.peer.answer=kill,key=Welcome"] for index in blocks]
    return faults


@pytest.mark.slow
def test_a_hundred_deaths_at_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = storm()
    assert sum(map(len, faults)) == 100
    armed = [
        f"{fault},after={tmp_path}/armed{number},times=1,tally={tmp_path}/killed{number}.{index}"
        for number, group in enumerate(faults)
        for index, fault in enumerate(group)
    ]
    monkeypatch.setenv("QUIRE_FAILPOINTS", ";".join(armed))  # of both: a core that is started again reads it anew
    taken: Counter[int] = Counter()

    async def run() -> None:
        async with (
            running(engine_args(tmp_path / "key", "kv_consumer")) as d,
            running(engine_args(tmp_path / "key", "kv_producer")) as p,
        ):
            seeds = itertools.count()
            for number, group in enumerate(faults):
                (tmp_path / f"armed{number}").touch()
                for _ in range(20):
                    taken[await check_one(p, d, next(seeds))] += 1
                    if len(list(tmp_path.glob(f"killed{number}.*"))) == len(group):
                        break
                else:
                    pytest.fail(f"{group} was never met")
            assert await check_one(p, d, next(seeds)) <= NUM_BLOCKS

    asyncio.run(run())
    with capsys.disabled():
        print(f"\n100 deaths in {taken.total()} runs; blocks taken: {sorted(taken.items())}")


@pytest.mark.slow
def test_engines_that_prefill_die_at_any_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(engine_args(tmp_path / "key", "kv_consumer")) as d:
            monkeypatch.setenv("QUIRE_FAILPOINTS", f"kv.peer.send=kill,p=0.03,seed={seed_of(4)}")
            async with running(engine_args(tmp_path / "key", "kv_producer")) as p:
                numbers = [await check_one(p, d, seed) for seed in range(NUM_ROUNDS)]
                assert max(numbers) == NUM_BLOCKS
                assert len(set(numbers)) > 2

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_workers_take_their_parts_until_one_is_killed(
    size: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both engines have two workers. The tokens are those of one worker alone."""
    armed, tally = tmp_path / "armed", tmp_path / "killed"

    async def run() -> None:
        async with running(EngineArgs("demo", kv_cache_memory_bytes=32 << 20)) as engine:
            alone = [(await answer(engine, f"one worker {seed}", seed, 8))[0] for seed in range(4)]
        async with running(engine_args(tmp_path / "key", "kv_consumer", **{size: 2})) as d:
            kill = f"kv.peer.send=kill,after={armed},skip=5,times=1,tally={tally}"
            monkeypatch.setenv("QUIRE_FAILPOINTS", kill)
            async with running(engine_args(tmp_path / "key", "kv_producer", **{size: 2})) as p:
                taken = [await answer_apart(p, d, seed) for seed in range(3)]
                assert [tokens for tokens, _ in taken] == alone[:3]
                assert max(num_cached for _, num_cached in taken) == NUM_BLOCKS * BLOCK_SIZE
                armed.touch()
                tokens, _ = await answer_apart(p, d, 3)
                assert tokens == alone[3]

    asyncio.run(run())
