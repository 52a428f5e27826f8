"""Promises P9 and P17 on the real engine core, in virtual time: one step per millisecond, more asked than it can do."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import DeadlineExceededError, OverloadedError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.inproc import InprocClient
from quire.sampling_params import SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.testing.metrics_audit import audited

from .async_fake_client import AsyncFakeClient
from .virtual_loop import run_virtually

STEP_S = 0.001
PROMPT_LEN, OUTPUT_LEN = 8, 20
MAX_NUM_SEQS, MAX_QUEUED = 16, 32
CAPACITY = MAX_NUM_SEQS / OUTPUT_LEN / STEP_S
"""Requests per second, when all seats are taken all the time."""


class Roomy(FakeExecutor):
    available_bytes: ClassVar[int] = 1 << 20


class SteppingClient(AsyncFakeClient):
    """The real core, which computes a step every virtual millisecond."""

    def __init__(self, core: InprocClient) -> None:
        super().__init__(core)  # type: ignore[arg-type]
        self.inproc = core

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self.send(self.inproc.get_output())


@dataclass
class Load:
    """The outcomes of the requests that were offered."""

    llm: AsyncLLM
    outcomes: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0

    async def request(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        prompt = [number % 200 + 20, *([number // 200 % 200 + 20] * (PROMPT_LEN - 1))]
        num_read = 0
        try:
            async for _ in self.llm.generate(prompt, SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True), "r"):
                if not num_read:
                    self.first_token_s.append(loop.time() - start)
                num_read += 1
        except OverloadedError:
            assert loop.time() == start, "refused at once"
            self.outcomes["refused"] += 1
        else:
            assert num_read == OUTPUT_LEN
            self.outcomes["served"] += 1


def run(test: Callable[[AsyncLLM, FakeExecutor], Awaitable[Any]], **flags: Any) -> Any:
    args = EngineArgs(
        "demo",
        distributed_executor_backend=f"{__name__}:Roomy",
        max_model_len=128,
        skip_tokenizer_init=True,
        slow_client_timeout_s=0.0,
        **flags,
    )

    async def main() -> Any:
        config = args.create_engine_config("serving")
        client = SteppingClient(InprocClient(config, log_stats=True))
        llm = AsyncLLM(config, client=client)
        metrics = llm.pipeline.stats.metrics
        assert metrics is not None
        core = asyncio.create_task(client.run())
        try:
            async with audited(metrics, 5 * STEP_S):
                return await test(llm, client.inproc.engine_core.executor)
        finally:
            core.cancel()
            llm.shutdown()

    return run_virtually(main(), debug=False)


@pytest.mark.parametrize(("times", "duration_s"), [(0.8, 0.5), (5, 0.25), (20, 0.25)])
def test_overload_costs_those_who_are_served_nothing(times: float, duration_s: float) -> None:
    async def offer(llm: AsyncLLM, executor: FakeExecutor) -> Load:
        rng, load, loop = random.Random(1), Load(llm), asyncio.get_running_loop()
        start, tasks = loop.time(), []
        while loop.time() < start + duration_s:
            await asyncio.sleep(rng.expovariate(times * CAPACITY))
            tasks.append(asyncio.create_task(load.request(len(tasks))))
        await asyncio.gather(*tasks)
        load.elapsed_s = loop.time() - start
        assert (llm.admission.num_reqs, llm.admission.num_tokens) == (0, 0)
        assert load.outcomes.total() == len(tasks)
        assert llm.admission.rejections["max_num_queued_reqs"] == load.outcomes["refused"]
        return load

    load = run(offer, max_num_seqs=MAX_NUM_SEQS, max_num_queued_reqs=MAX_QUEUED)
    if times < 1:
        assert not load.outcomes["refused"]
    else:
        assert load.outcomes["refused"] > load.outcomes["served"]
        assert load.outcomes["served"] >= 0.9 * CAPACITY * load.elapsed_s
    # At worst a request finds the queue full and all seats just taken.
    assert max(load.first_token_s) <= (MAX_QUEUED / MAX_NUM_SEQS + 1) * OUTPUT_LEN * STEP_S + 5 * STEP_S


def test_what_expires_in_the_queue_is_never_computed() -> None:
    async def queue_up(llm: AsyncLLM, executor: FakeExecutor) -> None:
        async def one(prompt: list[int], timeout_s: float | None) -> str:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            try:
                async for _ in llm.generate(prompt, params, "r", timeout_s=timeout_s):
                    pass
            except DeadlineExceededError:
                return "expired"
            return "served"

        seated = asyncio.create_task(one([50] * PROMPT_LEN, None))
        await asyncio.sleep(5 * STEP_S)
        queued = [asyncio.create_task(one([60] * PROMPT_LEN, 0.001 * number)) for number in range(1, 90)]
        assert set(await asyncio.gather(*queued)) == {"expired"}
        assert await seated == "served"
        assert executor.num_computed_tokens == PROMPT_LEN + 99, "of nobody but the one that was served"

    run(queue_up, max_num_seqs=1)
