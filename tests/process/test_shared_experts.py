"""Engines that share experts, in processes: none steps without the others, and the end of one loses nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ClientError, EngineDeadError, GenerationError, ModelLoadError, ServerError, ValidationError
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.link import LinkState
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from tests.checkpoints import MakeCheckpoint, make_tiny_checkpoint
from tests.unit.worker.parallel.test_adapters import targets_of, write_whole_adapter

from .harness import FAKE_MODEL_LEN, Engine, fake_args, running
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
        with pytest.raises(ClientError, match="resume them before their number is changed"):
            await client.scale(3)
        await client.call_utility_async("resume_scheduler")
        assert [status.pid == pids[status.engine] for status in client.list_engines()] == [True, False]
        for refused, why in (
            (client.remove_engine(1), "are removed from the last one on"),
            (client.restart_engines(mode="wait"), "restart together"),
        ):
            with pytest.raises(ClientError, match=why):
                await refused

    counts = asyncio.run(read_while(work, num_streams=24, **SHARED))
    assert (counts["deaths"], counts["poisoned_requests"]) == (1, 0)
    assert counts["moves.1.killed"] > 0


def pids_of(client: DPLBAsyncMPClient) -> list[int | None]:
    return [status.pid for status in client.list_engines()]


@pytest.mark.slow
def test_their_number_changes_and_all_restart_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine 1 is killed in the one moment in which there is no way back: it is started again in the new group."""
    monkeypatch.setenv("QUIRE_FAILPOINTS", "group.switch=kill,key=1")

    async def work(client: DPLBAsyncMPClient) -> None:
        engines, before = client._link_thread.links, pids_of(client)
        with pytest.raises(ValidationError, match="at most 3 engines share experts"):
            await client.scale(4)
        monkeypatch.setenv("QUIRE_FAILPOINTS", "core.start=exit(3)")
        with pytest.raises(ServerError, match="engine 2 could not be started"):
            await client.scale(3)
        assert pids_of(client) == before
        monkeypatch.delenv("QUIRE_FAILPOINTS")
        await client.scale(3)
        assert [pid in before for pid in pids_of(client)] == [True, False, False]
        await wait_for(lambda: engines.links[2].num_live_requests > 0)
        await client.scale(1)
        assert pids_of(client) == before[:1]
        await client.restart_engine(0)
        assert not set(pids_of(client)) & {*before, None}
        assert client.num_engines_up == 1

    counts = asyncio.run(read_while(work, num_streams=16, elastic_ep_max_dp_size=3, **SHARED))
    assert (counts["deaths"], counts["poisoned_requests"]) == (1, 0)
    assert counts["moves.2.drain"] > 0
    assert counts["elastic.RECONFIGURE_FINISHED"] == 1 + 1
    assert counts["elastic.SHUTDOWN_COMPLETE"] == 2


def follows(tokens: list[int], prompt: list[int], params: SamplingParams) -> bool:
    """Returns whether the first tokens are those of the former weights, and all that follow those of the new ones."""

    def expected(start: list[int], num_tokens: int, weights: str) -> list[int]:
        model, own = dataclasses.replace(FakeModel(), weights=weights), params.clone()
        own.max_tokens = num_tokens
        return list(expected_output(model, [*prompt, *start], own, FAKE_MODEL_LEN).token_ids)

    former = expected([], len(tokens), FakeModel().weights)
    same = next((i for i, pair in enumerate(zip(tokens, former, strict=True)) if pair[0] != pair[1]), len(tokens))
    return same < len(tokens) and tokens[same:] == expected(tokens[:same], len(tokens) - same, "/new")


def test_new_weights_reach_all_engines_at_the_same_step_and_outlive_a_death() -> None:
    """The tokens of the fake model show which weights a step had."""
    params = SamplingParams(max_tokens=600, ignore_eos=True, detokenize=False)

    async def run() -> None:
        async with running(fake_args(data_parallel_size=2, **SHARED)) as engine:
            client, seen = dp_client(engine), [0] * 4

            async def stream(number: int) -> list[int]:
                tokens: list[int] = []
                prompt = {"prompt_token_ids": [number, 7, 8]}
                async for output in engine.llm.generate(prompt, params, f"r{number}"):
                    tokens = list(output.outputs[0].token_ids)
                    seen[number] = len(tokens)
                return tokens

            tasks = [asyncio.create_task(stream(i)) for i in range(4)]
            await wait_for(lambda: min(seen) > 20)
            assert await engine.llm.update_weights("/new", "v1") == "v1"
            await wait_for(lambda: min(seen) > 60)
            await kill_and_wait(client, 1)
            with pytest.raises(ModelLoadError, match="an expert holds NaN"):
                await engine.llm.update_weights("/half")
            assert await engine.llm.get_weight_version() == "v1"
            assert not await client.call_utility_async("is_scheduler_paused")
            for number, tokens in enumerate(await asyncio.gather(*tasks)):
                assert len(tokens) == 600
                assert follows(tokens, [number, 7, 8], params)

    asyncio.run(run())


@pytest.mark.slow
def test_engines_that_are_killed_while_their_number_changes_lose_nothing() -> None:
    """At any time: what was prepared is discarded, or the engine is started again in the new group."""
    dice, outcomes = random.Random(7), [0, 0]

    async def work(client: DPLBAsyncMPClient) -> None:
        engines = client._link_thread.links
        for _ in range(30):
            live = [entry.request_id for link in engines.links.values() for entry in list(link._journal)]
            before = len(engines.links)
            size = dice.choice([n for n in (1, 2, 3) if n != before])
            scaling = asyncio.create_task(client.scale(size))
            if dice.random() < 0.4:
                await asyncio.sleep(dice.random() * 0.8)
            else:  # when there is no way back
                await wait_for(lambda s=size, t=scaling: t.done() or client._sharing.group.num_engines == s)
                await asyncio.sleep(dice.random() * 0.02)
            victim = dice.choice(list(client.resources.supervisors))
            if (pid := client.resources.supervisors[victim].core_pid) is not None:
                os.kill(pid, signal.SIGKILL)
            try:
                await scaling
            except (ServerError, EngineDeadError):
                outcomes[0] += 1
                assert len(engines.links) == before
            else:
                outcomes[1] += 1
                assert len(engines.links) == size
            await wait_for(lambda: all(link.state is LinkState.UP for link in engines.links.values()))
            await wait_for(lambda live=live: not any(engines.engine_of(request) is not None for request in live))

    counts = asyncio.run(read_while(work, num_streams=16, core_restart_limit=100, **SHARED))
    assert min(outcomes) > 2, outcomes
    assert counts["poisoned_requests"] == 0


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


async def generate(engine: Engine, request_id: int, num_tokens: int, adapter: LoRARequest | None = None) -> list[int]:
    """Returns the tokens of a request that depends on its number."""
    prompt = [(7 * request_id + i) % 200 + 3 for i in range(5 + 11 * request_id)]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=request_id, detokenize=False)
    given = {"prompt_token_ids": prompt}, params, f"r{request_id}"
    outputs = [output async for output in engine.llm.generate(*given, lora_request=adapter)]
    return list(outputs[-1].outputs[0].token_ids)


async def kill_one(client: DPLBAsyncMPClient) -> None:
    link = client._link_thread.links.links[1]
    await wait_for(lambda: link.num_live_requests > 0)
    await kill_and_wait(client, 1)


async def resize(client: DPLBAsyncMPClient) -> None:
    pid = client.list_engines()[0].pid
    for size in (3, 1, 2):
        await wait_for(lambda: client.num_live_requests > 0)
        await client.scale(size)
    assert client.list_engines()[0].pid == pid


async def generate_all(
    path: Path,
    size: int,
    disturb: Callable[[DPLBAsyncMPClient], Awaitable[None]] | None = None,
    num_tokens: int = 60,
    **fields: Any,
) -> list[list[int]]:
    """Returns the texts of six requests, which are repeated while `disturb` goes on."""
    async with mixture(path, size, **fields) as engine:
        disturbing = None if disturb is None else asyncio.create_task(disturb(dp_client(engine)))  # type: ignore[arg-type]
        rounds = [await asyncio.gather(*(generate(engine, i, num_tokens) for i in range(6)))]
        while disturbing is not None and not disturbing.done():  # it wants requests as long as it goes on
            rounds.append(await asyncio.gather(*(generate(engine, i, num_tokens) for i in range(6))))
        if disturbing is not None:
            await disturbing
        assert engine.counts["deaths"] == (disturb is kill_one)
        assert all(tokens == rounds[0] for tokens in rounds)
        return rounds[0]


def mixture_args(path: Path, **fields: Any) -> EngineArgs:
    return EngineArgs(
        str(path),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        device="cpu",
        kv_cache_memory_bytes=1 << 24,
        skip_tokenizer_init=True,
        **fields,
    )


def mixture(path: Path, size: int, **fields: Any) -> AbstractAsyncContextManager[Engine]:
    return running(mixture_args(path, data_parallel_size=size, **fields))


@pytest.mark.slow
def test_a_mixture_on_two_engines_answers_as_on_one(tiny_checkpoint: MakeCheckpoint) -> None:
    path = tiny_checkpoint("mixtral")
    expected = asyncio.run(generate_all(path, 1))
    for fields in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}):
        assert asyncio.run(generate_all(path, 2, kill_one, enable_expert_parallel=True, **fields)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"quantization": "int8", "expert_placement_strategy": "round_robin"}])
def test_a_mixture_answers_the_same_while_the_number_of_engines_changes(
    fields: dict[str, Any], tiny_checkpoint: MakeCheckpoint
) -> None:
    path = tiny_checkpoint("mixtral")
    placement = {k: fields[k] for k in fields if k == "expert_placement_strategy"}
    alone = {k: fields[k] for k in fields if k not in placement}
    expected = asyncio.run(generate_all(path, 1, num_tokens=400, **alone))
    assert asyncio.run(generate_all(path, 2, resize, 400, enable_expert_parallel=True, **fields)) == expected


@pytest.mark.slow
def test_a_mixture_takes_new_weights_and_keeps_them(tmp_path: Path) -> None:
    """Also at engines that are started later: after a death, for another number, in a restart of all."""
    first, second = (make_tiny_checkpoint(tmp_path / str(seed), "mixtral", seed=seed) for seed in (0, 1))
    expected = asyncio.run(generate_all(second, 1))

    async def run() -> None:
        async with mixture(first, 2, enable_expert_parallel=True) as engine:
            client = dp_client(engine)

            async def all_tokens() -> list[list[int]]:
                return list(await asyncio.gather(*(generate(engine, i, 60) for i in range(6))))

            assert await all_tokens() != expected
            assert await engine.llm.update_weights(str(second), "v1") == "v1"
            assert await all_tokens() == expected
            await kill_and_wait(client, 1)
            assert await all_tokens() == expected
            await client.scale(3)
            assert await all_tokens() == expected
            await client.restart_engines()
            assert await all_tokens() == expected
            assert await engine.llm.update_weights(str(first), "v0") == "v0"
            assert await all_tokens() != expected

    asyncio.run(run())


@pytest.mark.slow
def test_a_mixture_with_adapters_answers_as_one_engine(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "mixtral", seed=0)
    adapters = [None, *(write_whole_adapter(tmp_path / str(i), targets_of(path), 5, i) for i in (1, 2))]

    async def run(size: int, **fields: Any) -> list[list[int]]:
        async with mixture(path, size, enable_lora=True, **fields) as engine:
            tasks = [asyncio.create_task(generate(engine, i, 100, adapters[i % 3])) for i in range(6)]
            if size > 1:
                await kill_and_wait(dp_client(engine), 1)
                await dp_client(engine).scale(3)
            return list(await asyncio.gather(*tasks))

    plain = asyncio.run(generate_all(path, 1, num_tokens=100))
    expected = asyncio.run(run(1))
    assert [own == other for own, other in zip(plain, expected, strict=True)] == [True, False, False] * 2
    assert asyncio.run(run(2, enable_expert_parallel=True)) == expected
