"""An engine of two workers, which share layers or have half of them each: killed under load it loses no token, and it
leaves no process behind. A request with an adapter goes on with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from quire import EngineArgs, LoRARequest, RequestOutputKind, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from tests.adapters import write_demo_adapter

PROMPTS = ["Hello, what is a KV cache?", "Tell me about tensor parallelism.", "What can you do?"]
PARAMS = SamplingParams(temperature=0.9, seed=11, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def workers_of(pid: int) -> list[int]:
    """Returns the process ids of the workers of a core."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return [child for child in found if b"quire.worker.proc" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def tokens_of(
    llm: AsyncLLM, number: int, adapter: LoRARequest, started: asyncio.Event | None = None
) -> list[int]:
    """Returns the tokens of a prompt; the second one has the adapter."""
    tokens, lora = list[int](), adapter if number == 1 else None
    async for output in llm.generate(PROMPTS[number], PARAMS, f"r{number}", lora_request=lora):
        tokens += output.outputs[0].token_ids
        if started is not None and len(tokens) > 5:
            started.set()
    return tokens


def make(**sizes: int) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        EngineArgs("demo", max_model_len=256, max_num_seqs=4, num_gpu_blocks_override=64, enable_lora=True, **sizes)
    )


async def all_tokens(adapter: LoRARequest) -> list[list[int]]:
    llm = make()
    try:
        return await asyncio.gather(*(tokens_of(llm, i, adapter) for i in range(len(PROMPTS))))
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    return LoRARequest("an adapter", 1, str(write_demo_adapter(tmp_path_factory.mktemp("adapter"), seed=1)))


@pytest.fixture(scope="module")
def expected(adapter: LoRARequest) -> list[list[int]]:
    """The tokens of one worker, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
        return asyncio.run(all_tokens(adapter))


@pytest.mark.parametrize(
    ("size", "victim"),
    [
        ("tensor_parallel_size", 1),
        pytest.param("pipeline_parallel_size", 0, marks=pytest.mark.slow),  # ends and begins as those that share layers
    ],
)
def test_a_killed_worker_costs_no_token(
    size: str, victim: int, expected: list[list[int]], adapter: LoRARequest
) -> None:
    asyncio.run(killed_worker({size: 2}, victim, expected, adapter))


async def killed_worker(sizes: dict[str, int], victim: int, expected: list[list[int]], adapter: LoRARequest) -> None:
    llm = make(**sizes)
    try:
        core = llm.engine_core.core_pid  # type: ignore[attr-defined]
        workers = workers_of(core)
        assert len(workers) == 2
        started = asyncio.Event()
        streams = [asyncio.create_task(tokens_of(llm, i, adapter, started)) for i in range(len(PROMPTS))]
        await asyncio.wait_for(started.wait(), 60)
        os.kill(workers[victim], signal.SIGKILL)
        assert await asyncio.wait_for(asyncio.gather(*streams), 120) == expected
        after = llm.engine_core.core_pid  # type: ignore[attr-defined]
        assert after != core, "the core was started again"
        assert llm.engine_core.counts["worker_deaths.killed"] == 1  # type: ignore[attr-defined]
        others = workers_of(after)
        assert len(others) == 2
    finally:
        llm.shutdown()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}/stat").exists() for pid in [*workers, *others]):
        assert time.monotonic() < deadline, "no worker outlives its engine"
        await asyncio.sleep(0.05)
