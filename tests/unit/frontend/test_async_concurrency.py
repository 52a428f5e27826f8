"""Promises P6 and P19 on the real core, on a thread of this process: a crowd of readers who all use one id."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import ClassVar

import pytest

from quire.config.engine_args import EngineArgs
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.base import make_async_client
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_model import FakeModel
from quire.testing.metrics_audit import audited

from .crowd import run_crowd

MAX_MODEL_LEN = 128


class SmallCache(FakeExecutor):
    """Too few blocks for those who run: preemptions."""

    available_bytes: ClassVar[int] = 1 << 12


@pytest.mark.parametrize(("seed", "size", "max_num_seqs"), [(1, 500, 64), (2, 120, 4), (3, 200, 256)])
def test_a_crowd_with_one_id(seed: int, size: int, max_num_seqs: int) -> None:
    flags = EngineArgs(
        "demo",
        distributed_executor_backend=f"{__name__}:SmallCache",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=48,
    )

    async def run() -> Counter[str]:
        config = flags.create_engine_config("serving")
        async with AsyncLLM(config, client=make_async_client(config, log_stats=True, multiprocess=False)) as llm:
            metrics = llm.pipeline.stats.metrics
            assert metrics is not None
            async with audited(metrics, 0.01) as audit:
                outcomes = await run_crowd(llm, seed, size, model=FakeModel(), max_model_len=MAX_MODEL_LEN)
            assert audit.num_checks > 1
            assert await llm.collective_rpc(_num_live_requests) == [0]
        return outcomes

    outcomes = asyncio.run(asyncio.wait_for(run(), 120))
    assert outcomes.keys() == {"done", "left", "cancelled"}


def _num_live_requests(executor: FakeExecutor) -> int:
    return executor.num_live_requests
