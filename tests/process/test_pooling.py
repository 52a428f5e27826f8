"""Pooling requests and the death of the core: they are computed again, and their callers do not notice."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from quire import PoolingParams

from .harness import Engine, fake_args, running


async def pool(engine: Engine, request_id: str, prompt: list[int]) -> float:
    """The one output of a request."""
    (output,) = [o async for o in engine.llm.encode({"prompt_token_ids": prompt}, PoolingParams(), request_id)]
    assert (output.finished, output.finish_reason, output.prompt_token_ids) == (True, "stop", prompt)
    return float(output.outputs.data.item())


def run_all(prompts: list[list[int]]) -> tuple[list[float], int]:
    """The results of all prompts at once, and how many cores died meanwhile."""

    async def run() -> tuple[list[float], int]:
        async with running(fake_args("Pools", max_num_batched_tokens=64)) as engine:
            pooled = await asyncio.gather(*(pool(engine, f"r{i}", prompt) for i, prompt in enumerate(prompts)))
            assert engine.counts["poisoned_requests"] == 0
            return pooled, engine.counts["deaths"]

    return asyncio.run(run())


@pytest.mark.parametrize("place", ["core.step.execute", "core.step.update"])
def test_a_death_is_not_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 150))] for _ in range(24)]
    expected, num_deaths = run_all(prompts)
    assert num_deaths == 0
    assert len(set(expected)) > 20
    monkeypatch.setenv("QUIRE_FAILPOINTS", f"{place}=kill,skip=5,times=1,tally={tmp_path / 'tally'}")
    assert run_all(prompts) == (expected, 1)
