"""`quire serve` as its users meet it: a process, a port, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import openai
import pytest

from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.testing.metrics_audit import MetricsAudit, read_exposition

from .api_clients import wait_until
from .scraping import scraped
from .serving import ServerProcess, serving

HI = [{"role": "user", "content": "Hi"}]
TIME_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One with a fake model of 20 ms a step, and the admin routes. The last of its tests ends it."""
    flags = ("--enable-admin", "--admin-port", "0", "--api-key", "secret", "--shutdown-timeout", "600")
    with serving(*flags, executor="Patient") as running:
        yield running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=TIME_LIMIT_S) as client:
        yield client


def test_openais_client_is_served(client: openai.OpenAI, server: ServerProcess) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    answer = client.chat.completions.create(model="demo", messages=HI, max_tokens=4)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    streamed = client.chat.completions.create(
        model="demo",
        messages=HI,  # type: ignore[arg-type]
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(streamed)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    completion = client.completions.create(model="demo", prompt=["a", "b"], max_tokens=3, extra_body={"top_k": 5})
    assert [choice.index for choice in completion.choices] == [0, 1]

    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="demo", prompt="x", temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_the_admin_listener(server: ServerProcess) -> None:
    assert server.admin_url is not None
    headers = {"authorization": "Bearer secret"}
    with httpx2.Client(timeout=TIME_LIMIT_S, headers=headers) as client:
        assert client.post(f"{server.url}/pause").status_code == 404
        assert client.get(f"{server.admin_url}/is_paused").json() == {"is_paused": False}
        assert client.get(f"{server.admin_url}/is_paused", headers={"authorization": ""}).status_code == 401
        assert client.get(f"{server.admin_url}/is_paused", headers={"host": "evil.example"}).status_code == 403


def test_its_state_is_shown_across_the_death_of_the_core(server: ServerProcess) -> None:
    """A request and its blocks, in the core that dies and in the next; and on the admin listener, which can abort."""
    headers = {"authorization": "Bearer secret"}
    body = {"prompt": [50] * 40, "max_tokens": 1500, "ignore_eos": True, "stream": True, "request_id": "watched"}

    def look(client: httpx2.Client, url: str) -> dict[str, Any]:
        while not (state := client.get(f"{url}/debug/state").json()).get("requests"):
            pass
        return state

    with (
        httpx2.Client(timeout=TIME_LIMIT_S, headers=headers) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        states = [look(client, server.url)]
        os.kill(server.core_pid(), signal.SIGKILL)
        states.append(look(client, server.admin_url or ""))
        for state in states:
            (request,) = state["requests"]
            held = sum(length for _, length in request["blocks"])
            assert request["id"] == "cmpl-watched"
            assert held == request["num_blocks"] == state["kv_cache"]["total"] - 1 - state["kv_cache"]["free"]
        assert [state["abort"] for state in states] == ["admin", "here"]
        client.post(f"{server.admin_url}/abort_requests", json={"request_ids": ["cmpl-watched"]})
        assert '"finish_reason":"abort"' in "".join(lines)


def test_a_stream_survives_the_death_of_the_core(
    client: openai.OpenAI, server: ServerProcess, stack: ExitStack
) -> None:
    """Unnoticed by its reader: the same text as undisturbed, and one end."""
    options = {"model": "demo", "prompt": [50, 51], "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    with server.pace.hurried():
        expected = client.completions.create(**options)  # type: ignore[call-overload]
    texts, ends = [], []
    for number, chunk in enumerate(client.completions.create(**options, stream=True)):  # type: ignore[call-overload]
        if number == 5:
            os.kill(server.core_pid(), signal.SIGKILL)
            stack.enter_context(server.pace.hurried())
        texts.append(chunk.choices[0].text)
        ends.append(chunk.choices[0].finish_reason)
    assert "".join(texts) == expected.choices[0].text
    assert [end for end in ends if end] == ["length"]


def test_a_crowd_some_of_whom_leave_while_the_core_dies(server: ServerProcess) -> None:
    """Everyone who stays gets the answer to their own prompt; nothing is left of anyone."""
    seeds, num_readers = random.Random(5), 60
    headers = {"authorization": "Bearer secret"}

    async def ask(client: httpx2.AsyncClient, number: int) -> None:
        body = {"prompt": [40 + number, 50], "max_tokens": 10 + number % 30, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        leaves_after, tokens = seeds.choice([None, None, 3]), []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = (line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: "))
            async for line in lines:
                if line == "[DONE]":
                    break
                tokens += json.loads(line)["choices"][0]["token_ids"]
                if leaves_after is not None and len(tokens) >= leaves_after:
                    return
        params = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True)
        assert tokens == expected_output(FakeModel(), body["prompt"], params, 2048).token_ids

    async def run() -> None:
        limits = httpx2.Limits(max_connections=num_readers + 1)
        async with (
            scraped(server.url),
            httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=TIME_LIMIT_S, limits=limits) as client,
        ):
            readers = [asyncio.create_task(ask(client, number)) for number in range(num_readers)]
            await readers[0]
            os.kill(server.core_pid(), signal.SIGKILL)
            await asyncio.gather(*readers)
            while (await client.get("/load")).json() != {"server_load": 0}:
                pass

    asyncio.run(asyncio.wait_for(run(), 5 * TIME_LIMIT_S))


def test_the_books_of_drafts_add_up() -> None:
    """Answers have the figures of their drafts, and these are all drafts of the server. At its end a signal goes to
    every process."""
    text = "the scheduler decides at every step which requests run, "
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False})
    predicted = {"messages": HI, "prediction": {"type": "content", "content": 3 * text}}
    asks: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", predicted),
        ("completions", {"prompt": 2 * text, "temperature": 0, "ignore_eos": True}),
        ("completions", {"prompt": 3 * text, "seed": 1, "logprobs": 2}),
        ("completions", {"prompt": text, "structured_outputs": {"regex": "(ab|cd){9} the scheduler [0-9]{2,9}"}}),
        ("completions", {"prompt": text, "temperature": 0, "vllm_xargs": {"num_speculative_tokens": 1}}),
    ]

    async def ask(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await client.post(f"/v1/{path}", json={"max_tokens": 40, **body})
        assert response.status_code == 200, response.text
        answer = response.json()
        if path == "chat/completions":
            details = answer["usage"]["completion_tokens_details"]
            assert min(details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) >= 0
            assert sum(details.values()) <= answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
        found: dict[str, Any] = answer["metrics"]["speculative_decoding"]
        return found

    async def run(url: str) -> None:
        async with scraped(url) as scraper, httpx2.AsyncClient(base_url=url, timeout=TIME_LIMIT_S) as client:
            found = await asyncio.gather(*(ask(client, *one) for one in asks * 3))
            snapshot = await scraper.check_at_rest()
        for name, shown in (
            ("drafts", "num_spec_steps"),
            ("draft_tokens", "num_draft_tokens"),
            ("accepted_tokens", "num_accepted_draft_tokens"),
        ):
            assert snapshot.value(f"vllm:spec_decode_num_{name}") == sum(drafts[shown] for drafts in found) > 0
        assert snapshot.value("quire_late_tokens") == 0

    with serving("-sc", drafts, "--per-request-spec-decode-metrics", "summary", "--max-model-len", "256") as server:
        asyncio.run(asyncio.wait_for(run(server.url), TIME_LIMIT_S))
        for pid in (server.core_pid(), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert server.process.wait(TIME_LIMIT_S) == 0
        log = server.program.read_log()
    assert "starting engine core" not in log, log


def test_sigterm_gives_streams_their_time_and_tells_the_rest() -> None:
    """One request ends within --shutdown-timeout; a new one is refused; the exit code is 0 and no core is left."""
    audit = MetricsAudit()
    with serving("--shutdown-timeout", "120", executor="Patient") as server:
        core = server.core_pid()
        with httpx2.Client(base_url=server.url, timeout=TIME_LIMIT_S) as client:
            body = {"prompt": [50], "max_tokens": 1000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                while (ready := client.get("/health/ready")).status_code == 200:
                    audit.check(read_exposition(client.get("/metrics").text))
                refused = client.post("/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 503, (ready.text, refused.text)
                server.pace.hurry()
                *_, end = (line for line in lines if line)
                assert end == "data: [DONE]"
        assert server.process.wait(TIME_LIMIT_S) == 0
        assert not os.path.exists(f"/proc/{core}")


@pytest.mark.parametrize(
    "first",
    ["server", pytest.param("core", marks=pytest.mark.slow)],  # of several API processes in test_api_processes.py
)
def test_sigterm_to_every_process_starts_no_other_core(first: str) -> None:
    """systemd and a container's stop send it like this. Requests under way have their time all the same."""
    with serving("--shutdown-timeout", "120", executor="Patient") as server:
        pids = [server.process.pid, server.core_pid()]
        body = {"prompt": [50], "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=TIME_LIMIT_S) as response:
            lines = response.iter_lines()
            next(lines)
            for pid in pids if first == "server" else reversed(pids):
                os.kill(pid, signal.SIGTERM)
            server.pace.hurry()
            *_, last, end = (line for line in lines if line)
        assert '"finish_reason":"length"' in last
        assert end == "data: [DONE]"
        assert server.process.wait(TIME_LIMIT_S) == 0
        log = server.program.read_log()
    assert "starting engine core" not in log, log
    assert " ERROR " not in log, log


def test_sigterm_to_the_core_alone_is_a_restart(client: openai.OpenAI, server: ServerProcess) -> None:
    core = server.core_pid()
    os.kill(core, signal.SIGTERM)
    wait_until(lambda: server.core_pids() not in ([], [core]))
    answer = client.completions.create(model="demo", prompt="x", max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_a_second_signal_ends_streams_with_an_error(server: ServerProcess) -> None:
    """The last test of this server."""
    lines: list[str] = []
    begun = threading.Event()
    headers = {"authorization": "Bearer secret"}

    def read() -> None:
        body = {"prompt": [50], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx2.stream("POST", url, json=body, headers=headers, timeout=TIME_LIMIT_S) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(TIME_LIMIT_S)
    server.process.send_signal(signal.SIGTERM)
    while httpx2.get(f"{server.url}/health/ready", timeout=TIME_LIMIT_S).status_code == 200:
        pass
    server.process.send_signal(signal.SIGTERM)
    reader.join(TIME_LIMIT_S)
    *_, error, end = (line for line in lines if line)
    assert '"code":503' in error
    assert end == "data: [DONE]"
    assert server.process.wait(TIME_LIMIT_S) == 0
