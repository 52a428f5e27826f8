"""Several engines in processes: one is killed, all are restarted, their number changes, and no reader notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire import LLM
from quire.cli.main import main
from quire.errors import ClientError, ConfigError, GenerationError, NotFoundError, ServerError, ValidationError
from quire.frontend.client.dp import DPLBAsyncMPClient
from quire.frontend.client.link import LinkState
from quire.frontend.client.mp import SyncMPClient
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.testing.history import History
from quire.testing.metrics_audit import read_exposition

from .api_clients import Stream, client_of, clients_of_each, closing_clients
from .harness import FAKE_MODEL_LEN, Engine, FakeLoad, fake_args, read, running
from .serving import serving

NUM_STREAMS = 64
Work = Callable[[DPLBAsyncMPClient], Awaitable[None]]


def dp_client(engine: Engine) -> DPLBAsyncMPClient:
    assert isinstance(engine.client, DPLBAsyncMPClient)
    return engine.client


async def read_while(
    work: Callable[[DPLBAsyncMPClient], Awaitable[None]],
    *,
    seed: int = 1,
    size: int = 2,
    num_streams: int = NUM_STREAMS,
    executor: str = "Calm",
    **fields: Any,
) -> dict[str, int]:
    """Readers come and go until `work` has ended. Returns the counts, once every token has been checked."""
    history, load = History(), FakeLoad(random.Random(seed))
    async with running(fake_args(executor, data_parallel_size=size, **fields)) as engine:
        worker = asyncio.create_task(_begin_when_busy(work, dp_client(engine), history))

        async def read_on() -> None:
            while not worker.done():
                request_id, prompt, params = load.make()
                await read(engine, history, request_id, {"prompt_token_ids": prompt}, params)

        await asyncio.gather(*(read_on() for _ in range(num_streams)))
        await worker
        counts = engine.counts
        assert engine.llm.get_num_unfinished_requests() == engine.client.num_live_requests == 0
    assert history.problems() == []
    assert history.token_differences(load.expected) == []
    assert len(history.streams) == len(load.expected) >= num_streams
    return counts


async def _begin_when_busy(
    work: Callable[[DPLBAsyncMPClient], Awaitable[None]], client: DPLBAsyncMPClient, history: History
) -> None:
    while history.num_tokens < 200:
        await asyncio.sleep(0.005)
    await work(client)


def kill(client: DPLBAsyncMPClient, engine: int) -> None:
    pid = client.resources.supervisors[engine].core_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def wait_for(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not is_so():
            await asyncio.sleep(0.005)


def test_streams_of_a_killed_engine_go_on_at_the_other() -> None:
    async def work(client: DPLBAsyncMPClient) -> None:
        links = client._link_thread.links.links
        for engine in (1, 0):
            kill(client, engine)
            await wait_for(lambda engine=engine: links[engine].state is LinkState.DOWN)
            await wait_for(lambda engine=engine: not links[engine].num_live_requests)  # they have moved
            assert client.is_ready
            await wait_for(lambda engine=engine: links[engine].state is LinkState.UP)

    counts = asyncio.run(read_while(work, num_streams=24))
    assert counts["deaths"] == 2
    assert counts["moves.0.killed"] > 0
    assert counts["moves.1.killed"] > 0
    assert counts["poisoned_requests"] == 0


def test_a_roll_and_another_size_under_load() -> None:
    async def work(client: DPLBAsyncMPClient) -> None:
        before = {status.engine: status.pid for status in client.list_engines()}
        await client.restart_engines()
        after = {status.engine: status.pid for status in client.list_engines()}
        assert all(after[engine] != before[engine] for engine in before)
        await client.scale(3)
        assert [status.state for status in client.list_engines()] == ["up"] * 3
        await wait_for(lambda: client._link_thread.links.links[2].num_live_requests > 0)
        await client.scale(1)
        await client.scale(2)
        assert sorted(client.resources.supervisors) == [0, 1]

    counts = asyncio.run(read_while(work, num_streams=16))
    assert counts["deaths"] == 0
    assert counts["moves.0.drain"] > 0
    assert counts["moves.2.drain"] > 0


def test_an_engine_that_cannot_start_leaves_the_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: DPLBAsyncMPClient) -> None:
        monkeypatch.setenv("QUIRE_FAILPOINTS", "core.start=exit(3)")
        with pytest.raises(ServerError, match="engine 2 could not be started: the engine core exited with code 3"):
            await client.scale(3)
        assert not client.is_scaling
        monkeypatch.delenv("QUIRE_FAILPOINTS")
        assert [(status.engine, status.state) for status in client.list_engines()] == [(0, "up"), (1, "up")]
        await client.scale(3)
        assert client.num_engines_up == 3

    asyncio.run(read_while(work, num_streams=8))


def test_a_request_that_kills_its_engine_reaches_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the two engines refuse what cannot be done with them."""
    monkeypatch.setenv("QUIRE_FAILPOINTS", "core.step.execute=segv,key=poison")

    async def run() -> None:
        async with running(fake_args(data_parallel_size=2)) as engine:
            client, params = dp_client(engine), SamplingParams(max_tokens=200, ignore_eos=True)
            prompts = {f"r{i}": [i, *range(20)] for i in range(16)}
            history = History()
            readers = [
                asyncio.create_task(read(engine, history, name, {"prompt_token_ids": prompt}, params))
                for name, prompt in prompts.items()
            ]
            await wait_for(lambda: history.num_tokens > 100)
            with pytest.raises(GenerationError, match="was in the last step of an engine core that failed"):
                async for _ in engine.llm.generate({"prompt_token_ids": [1]}, params, "poison"):
                    pass
            await asyncio.gather(*readers)
            expected = {
                (name, 0): list(expected_output(FakeModel(), prompt, params, FAKE_MODEL_LEN).token_ids)
                for name, prompt in prompts.items()
            }
            assert history.problems() == []
            assert history.token_differences(expected) == []
            restarts = sorted(sum(status.restarts.values()) for status in client.list_engines())
            assert restarts[0] == 0, "one engine has not noticed"
            assert restarts[1] in (1, 2)
            await wait_for(lambda: client.num_engines_up == 2)
            await check_refused_operations(engine)

    asyncio.run(run())


async def check_refused_operations(engine: Engine) -> None:
    """Ends with engine 1 alone."""
    client = dp_client(engine)
    with pytest.raises(ValidationError, match="1 to 64 engines"):
        await client.scale(0)
    with pytest.raises(NotFoundError, match="there is no engine 7; there are 0, 1"):
        await client.restart_engine(7)
    await client.drain_engine(0)
    with pytest.raises(ClientError, match="engine 1 is the only one that takes requests"):
        await client.drain_engine(1)
    await client.resume_engine(0)
    await client.remove_engine(0)
    with pytest.raises(ClientError, match="engine 1 is the last one"):
        await client.remove_engine(1)
    with pytest.raises(ValidationError, match=r"name an engine of this server \(1\), got 0"):
        await engine.llm.add_request("r", {"prompt_token_ids": [1]}, SamplingParams(), data_parallel_rank=0)


def test_a_program_with_several_engines() -> None:
    llm = LLM(**fake_args(data_parallel_size=2).non_default)
    try:
        client, params = llm.llm_engine.engine_core, SamplingParams(max_tokens=60, ignore_eos=True)
        assert isinstance(client, SyncMPClient)
        prompts = [[i, *range(30)] for i in range(12)]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = expected_output(FakeModel(), prompt, params, FAKE_MODEL_LEN)
            assert output.outputs[0].token_ids == list(expected.token_ids)
        assert all(client.engines.router._directory._caches[engine].num_blocks for engine in (0, 1)), "both had some"
        assert llm.collective_rpc("echo", args=(1,)) == [[1], [1]]
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("fields", "engines"),
    [
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}, [2, 3]),
        ({"data_parallel_size": 3, "data_parallel_rank": 2}, [2]),
    ],
    ids=["hybrid", "external"],
)
def test_a_server_with_a_part_of_the_engines(fields: dict[str, int], engines: list[int]) -> None:
    async def run() -> None:
        async with running(fake_args(**fields)) as engine:
            client = dp_client(engine)
            assert [status.engine for status in client.list_engines()] == engines
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            outputs = [output async for output in engine.llm.generate({"prompt_token_ids": [1]}, params, "r")]
            assert len(outputs[-1].outputs[0].token_ids) == 20
            with pytest.raises(ValidationError, match="must name an engine of this server"):
                await engine.llm.add_request("s", {"prompt_token_ids": [1]}, params, data_parallel_rank=0)
            with pytest.raises(ClientError, match="a part of the engines"):
                await client.scale(3)

    asyncio.run(run())


def test_several_engines_need_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    with pytest.raises(ConfigError, match="--data-parallel-size 2: several engines need processes of their own"):
        LLM(**fake_args(data_parallel_size=2).non_default)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def _post(url: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def test_the_routes_and_commands_of_an_operator(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--data-parallel-size", "2", "--enable-admin", "--admin-port", "0", "--max-model-len", "256")
    with serving(*flags, executor="Steady") as server:
        url, admin = server.url, server.admin_url
        assert admin is not None
        up = [{"engine": engine, "state": "up"} for engine in (0, 1)]
        assert _get(f"{url}/health/engines") == {"num_up": 2, "engines": up}
        for rank in (0, 1):
            status, _ = _post(
                f"{url}/v1/completions", {"prompt": [1, 2], "max_tokens": 2}, X_data_parallel_rank=str(rank)
            )
            assert status == 200
        for rank, why in (
            ("2", "name an engine of this server (0, 1), got 2"),
            ("x", "must be the number of an engine"),
        ):
            status, body = _post(f"{url}/v1/completions", {"prompt": [1]}, X_data_parallel_rank=rank)
            assert (status, body["error"]["param"]) == (400, "data_parallel_rank")
            assert why in body["error"]["message"]
        before = {row["engine"]: row["pid"] for row in _get(f"{admin}/admin/engines")["engines"]}
        assert main(["fleet", "restart", admin, "--engine", "1"]) == 0
        after = {row["engine"]: row["pid"] for row in _get(f"{admin}/admin/engines")["engines"]}
        assert (after[0], after[1] == before[1]) == (before[0], False)
        assert _post(f"{admin}/scale_elastic_ep", {"new_data_parallel_size": 1}) == (
            200,
            {"message": "Scaled to 1 data parallel engines"},
        )
        assert _post(f"{admin}/is_scaling_elastic_ep", {}) == (200, {"is_scaling_elastic_ep": False})
        assert _post(f"{admin}/scale_elastic_ep", {"new_data_parallel_size": 0})[0] == 400
        assert main(["fleet", "scale", admin, "--size", "2"]) == 0
        capsys.readouterr()
        assert main(["fleet", "status", admin]) == 0
        rows = capsys.readouterr().out.splitlines()
        assert [row.split()[:3] for row in rows[1:]] == [["0", "up", "0"], ["1", "up", "0"]]
        assert main(["fleet", "restart", admin, "--engine", "5"]) == 2
        assert _post(f"{admin}/admin/engines/0/drain?mode=later", {})[0] == 400
        assert _post(f"{admin}/admin/engines/0/drain?timeout_s=-1", {})[0] == 400
    assert main(["fleet", "status", "http://127.0.0.1:1"]) == 2
    assert main(["fleet", "status", "somewhere"]) == 2
    assert main(["fleet", "scale", admin]) == 2


def test_streams_of_several_api_processes_move_to_the_other_engine() -> None:
    flags = ("--data-parallel-size", "2", "--api-server-count", "2", "--enable-admin", "--admin-port", "0")
    with serving(*flags, executor="Leisurely") as server, closing_clients():
        streams = [
            Stream(client_of(server, pid), [100 + 10 * index + i], 1000)
            for index, pid in enumerate(server.api_pids())
            for i in range(4)
        ]
        for stream in streams:
            stream.read(3)
        os.kill(server.core_pids()[0], signal.SIGKILL)
        for stream in streams:
            stream.read(3)
        assert all(client.ask("GET", "/health/ready")[0] == 200 for client in clients_of_each(server).values())
        with server.pace.hurried():
            for stream in streams:
                assert stream.read() == stream.expected
        text = client_of(server, server.api_pids()[0]).begin("GET", "/metrics").read().decode()
        assert read_exposition(text).value("quire_engine_moves") == 4
        assert server.admin_url is not None
        status, body = _post(f"{server.admin_url}/scale_elastic_ep", {"new_data_parallel_size": 3})
        assert (status, "without --api-server-count" in body["error"]["message"]) == (400, True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_engines_are_killed_again_and_again(seed: int) -> None:
    async def work(client: DPLBAsyncMPClient) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            running_now = [i for i, s in client.resources.supervisors.items() if s.core_pid is not None]
            with contextlib.suppress(ProcessLookupError):  # it has ended in its start, which is noticed later
                if running_now:
                    kill(client, rng.choice(running_now))
            await asyncio.sleep(rng.uniform(0.0, 0.5))

    counts = asyncio.run(read_while(work, seed=seed, size=3, executor="Steady"))
    assert counts["moved_requests"] > 30
