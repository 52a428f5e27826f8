"""Engines that share experts, in processes: none steps without the others, and the end of one loses nothing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ClientError, EngineDeadError, GenerationError
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.link import LinkState
from quire.sampling_params import SamplingParams
from tests.checkpoints import MakeCheckpoint

from .harness import Engine, fake_args, running
from .test_engine_set import dp_client, kill, read_while, wait_for

SHARED: dict[str, Any] = {"executor": "Sharing", "enable_expert_parallel": True}


async def kill_and_wait(client: DPLBAsyncMPClient, engine: int) -> None:
    link = client._link_thread.links.links[engine]
    kill(client, engine)
    await wait_for(lambda: link.state is LinkState.DOWN)
    await wait_for(lambda: link.state is LinkState.UP)


def test_the_others_wait_for_an_engine_that_was_killed_and_no_stream_ends() -> None:
    """The executor fails if the engines are not at the same step; then there would be more deaths."""

    async def work(client: DPLBAsyncMPClient) -> None:
        pids = {status.engine: status.pid for status in client.list_engines()}
        await kill_and_wait(client, 1)
        await client.call_utility_async("pause_scheduler", "keep", False)
        await client.call_utility_async("resume_scheduler")
        assert [status.pid == pids[status.engine] for status in client.list_engines()] == [True, False]
        for refused in (client.restart_engines(), client.restart_engine(0), client.scale(3), client.remove_engine(1)):
            with pytest.raises(ClientError, match=r"engines that share experts .* restart the server"):
                await refused
        with pytest.raises(ClientError, match="keep their weights; restart the server"):
            await client.call_utility_async("update_weights", "elsewhere")

    counts = asyncio.run(read_while(work, num_streams=24, **SHARED))
    assert (counts["deaths"], counts["poisoned_requests"]) == (1, 0)
    assert counts["moves.1.killed"] > 0


@pytest.mark.slow
def test_many_deaths_of_engines_that_share_experts_lose_nothing() -> None:
    """Between two deaths the requests of the first end: one that is in the step of several is taken for their cause."""
    dice = random.Random(5)

    async def work(client: DPLBAsyncMPClient) -> None:
        links = client._link_thread.links.links.values()
        for _ in range(25):
            live = [entry.request_id for link in links for entry in list(link._journal)]
            victims = dice.sample(range(3), dice.randint(1, 2))
            await asyncio.gather(*(kill_and_wait(client, engine) for engine in victims))
            await wait_for(lambda live=live: not any(link.has_request(i) for i in live for link in links))
            if dice.random() < 0.3:
                await client.call_utility_async("pause_scheduler", "keep", False)
                await client.call_utility_async("resume_scheduler")

    counts = asyncio.run(read_while(work, size=3, num_streams=32, **SHARED))
    assert counts["deaths"] > 30
    assert counts["poisoned_requests"] == 0


@pytest.mark.slow
def test_all_end_when_an_engine_cannot_be_started_again() -> None:
    async def run() -> None:
        async with running(fake_args(data_parallel_size=2, core_restart_limit=0, **SHARED)) as engine:
            client = dp_client(engine)

            async def stream() -> None:
                async for _ in engine.llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2000), "a"):
                    begun.set()

            begun = asyncio.Event()
            reader = asyncio.create_task(stream())
            await begun.wait()
            kill(client, 1)
            with pytest.raises((EngineDeadError, GenerationError), match="its budget of 0 restarts"):
                await reader
            await wait_for(lambda: client.engine_dead)

    asyncio.run(run())


# -- a mixture ---------------------------------------------------------------------------------------------------------


async def generate(engine: Engine, request_id: int) -> list[int]:
    """Returns the tokens of a request that depends on its number."""
    prompt = [(7 * request_id + i) % 200 + 3 for i in range(5 + 11 * request_id)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=request_id, detokenize=False)
    outputs = [output async for output in engine.llm.generate({"prompt_token_ids": prompt}, params, f"r{request_id}")]
    return list(outputs[-1].outputs[0].token_ids)


async def generate_all(path: Path, size: int, **fields: Any) -> list[list[int]]:
    """Returns the texts of six requests. With several engines one of them is killed meanwhile."""
    args = EngineArgs(
        str(path),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        device="cpu",
        kv_cache_memory_bytes=1 << 24,
        skip_tokenizer_init=True,
        data_parallel_size=size,
        **fields,
    )
    async with running(args) as engine:
        tasks = [asyncio.create_task(generate(engine, i)) for i in range(6)]
        if size > 1:
            client = dp_client(engine)
            link = client._link_thread.links.links[1]
            await wait_for(lambda: link.num_live_requests > 0)
            await kill_and_wait(client, 1)
        tokens = await asyncio.gather(*tasks)
        assert engine.counts["deaths"] == size - 1
        return tokens


@pytest.mark.slow
def test_a_mixture_on_two_engines_answers_as_on_one(tiny_checkpoint: MakeCheckpoint) -> None:
    path = tiny_checkpoint("mixtral")
    expected = asyncio.run(generate_all(path, 1))
    for fields in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}):
        assert asyncio.run(generate_all(path, 2, enable_expert_parallel=True, **fields)) == expected
