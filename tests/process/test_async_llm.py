"""`AsyncLLM` with its core in a process of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import DeadlineExceededError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.session import StreamingInput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.testing.fake_model import FakeModel
from tests.unit.frontend.crowd import run_crowd

MAX_MODEL_LEN = 512
TIME_LIMIT_S = 120.0


def make_args(executor: str = "Quick", max_model_len: int = MAX_MODEL_LEN) -> EngineArgs:
    return EngineArgs(
        "demo",
        distributed_executor_backend=f"tests.process.executors:{executor}",
        max_model_len=max_model_len,
        hf_overrides={"max_position_embeddings": 8192},
        max_num_seqs=64,
    )


def test_a_crowd_with_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> Counter[str]:
        async with AsyncLLM.from_engine_args(make_args()) as llm:
            return await run_crowd(llm, 7, 400, model=FakeModel(), max_model_len=MAX_MODEL_LEN)

    outcomes = asyncio.run(asyncio.wait_for(run(), TIME_LIMIT_S))
    assert outcomes.keys() == {"done", "left", "cancelled"}


def test_a_day_in_its_life() -> None:
    """Sessions, pauses, deadlines and aborts over the wire."""
    delta = SamplingParams(max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    endless = SamplingParams(max_tokens=8000, ignore_eos=True)

    async def ask() -> AsyncGenerator[StreamingInput, None]:
        for number in range(3):
            yield StreamingInput([60 + number])

    async def run() -> None:
        async with AsyncLLM.from_engine_args(make_args("Steady", 8192)) as llm:
            await llm.check_health()
            ends = [o.outputs[0].finish_reason async for o in llm.generate(ask(), delta, "session")]
            assert [end for end in ends if end is not None] == ["length"] * 3

            with pytest.raises(DeadlineExceededError):
                async for _ in llm.generate([60], endless, "late", timeout_s=0.1):
                    pass

            await llm.pause_generation(mode="keep")
            assert await llm.is_paused()
            waiting = asyncio.ensure_future(anext(llm.generate([60], delta, "waits")))
            await asyncio.sleep(0)
            assert not waiting.done()
            await llm.resume_generation()
            await asyncio.wait_for(waiting, TIME_LIMIT_S)

            stream = llm.generate([60], endless, "aborted")
            await anext(stream)
            await llm.abort("aborted")
            *_, last = [output async for output in stream]
            assert last.outputs[0].finish_reason == "abort"
            assert await llm.get_supported_tasks() == ("generate",)
        with pytest.raises(Exception, match="shut down"):
            await llm.check_health()

    asyncio.run(asyncio.wait_for(run(), TIME_LIMIT_S))
