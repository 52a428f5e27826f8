"""A client and the core it has started: how the two begin, what a death costs, and that nothing is left behind.

What becomes of requests under every fault is tried in test_deaths.py and test_kills.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.config.engine import EngineConfig, LifecycleConfig
from quire.config.hf_config import HFConfig
from quire.config.parallel import ParallelConfig
from quire.errors import ConfigError, EngineDeadError, ModelLoadError, ServerError, ValidationError
from quire.frontend.client.base import make_async_client, make_client
from quire.frontend.client.link_thread import AttachedLinkThread
from quire.frontend.client.mp import AsyncMPClient, BackgroundResources, MPClient, SyncMPClient
from quire.frontend.llm_engine import LLMEngine
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.engine_core import EngineCoreRequest, FinishReason
from quire.wire.handshake import ClientAddresses

from .pace import Pace
from .peer import DEADLINE_S, make_config

Clients = Callable[..., SyncMPClient]


def config_with(executor: str = "Steady", **lifecycle: Any) -> EngineConfig:
    return dataclasses.replace(make_config(executor), lifecycle_config=LifecycleConfig(**lifecycle))


@pytest.fixture
def start() -> Iterator[Clients]:
    """Starts cores; afterwards neither process nor directory is left of any."""
    with contextlib.ExitStack() as stack:

        def make(config: EngineConfig | None = None, **options: Any) -> SyncMPClient:
            client = SyncMPClient(config or make_config(), log_stats=False, **options)
            stack.callback(check_nothing_left, client.resources)
            stack.callback(client.shutdown)
            return client

        yield make


@pytest.fixture(scope="module")
def owner() -> Iterator[SyncMPClient]:
    """A client with a core that another one may attach to. A test leaves no request, and uses names of its own."""
    client = SyncMPClient(config_with(core_restart_limit=100), log_stats=False, client_count=2)
    yield client
    client.shutdown()
    check_nothing_left(client.resources)


def core_pid(mp: MPClient) -> int:
    assert mp.resources.supervisor is not None
    wait_until(lambda: mp.resources.supervisor.core_pid is not None)
    pid = mp.resources.supervisor.core_pid
    assert pid is not None
    return pid


def check_nothing_left(resources: BackgroundResources) -> None:
    assert resources.supervisor is None or not resources.supervisor.is_alive()
    assert resources.link_thread is None or not resources.link_thread.is_alive()
    assert resources.directory is None or not resources.directory.path.exists()
    assert resources.context.closed


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for a condition that no message announces."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)


def make_request(request_id: str, max_tokens: int = 30, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(
        request_id, [1, 2, *request_id.encode()], params, None, **{"arrival_time": time.time(), **fields}
    )


def expected_tokens(request: EngineCoreRequest) -> list[int]:
    assert request.sampling_params is not None
    model = FakeModel((None,), 256)
    return list(expected_output(model, request.prompt_token_ids or [], request.sampling_params, 4096).token_ids)


def read(
    client: SyncMPClient,
    num_ends: int,
    on_output: Callable[[int], None] = lambda n: None,
    failing: Collection[str] = (),
) -> dict[str, list[int]]:
    """The tokens of every request until so many have ended: by their length, or the `failing` ones by an error."""
    tokens: dict[str, list[int]] = {}
    ends: set[str] = set()
    while len(ends) < num_ends:
        for output in client.get_output().outputs:
            assert output.request_id not in ends
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                reason = FinishReason.ERROR if output.request_id in failing else FinishReason.LENGTH
                assert output.finish_reason is reason, output.error_message
                ends.add(output.request_id)
        on_output(sum(map(len, tokens.values())))
    return tokens


# -- begin ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "error", "message"),
    [
        ("Unloadable", ModelLoadError, "model.safetensors has no tensor 'lm_head.weight'"),
        ("Broken", EngineDeadError, "could not start: KeyError: 'surprise'"),
        # an error of ours, as the first; the core's side of it is tried in test_core_process.py
        pytest.param("Missing", ConfigError, "has no 'Missing'", marks=pytest.mark.slow),
    ],
)
def test_what_keeps_a_core_from_starting_is_raised_here(
    start: Clients, executor: str, error: type[Exception], message: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error, match=message) as raised:
        start(make_config(executor))
    assert type(raised.value) is error or error is EngineDeadError
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("core.start=exit(7)", "exited with code 7 before it was ready"),
        ("core.ready=segv", "was killed by SIGSEGV before it was ready"),
    ],
)
def test_a_core_that_dies_at_its_start_is_not_started_again(
    start: Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, message: str
) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", f"{fault},tally={tmp_path}/starts")
    with pytest.raises(EngineDeadError, match=message):
        start()
    assert (tmp_path / "starts").stat().st_size == 1


def test_a_core_that_takes_too_long_is_given_up(start: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_READY_TIMEOUT_S", "1")
    with pytest.raises(EngineDeadError, match="not ready within 1 s; QUIRE_ENGINE_READY_TIMEOUT_S gives it longer"):
        start(make_config("SlowToLoad"))


def test_an_error_meanwhile_ends_the_start_at_once(start: Clients) -> None:
    def fail() -> None:
        raise ConfigError("a broken tokenizer")

    with pytest.raises(ConfigError, match="a broken tokenizer"):
        start(make_config("SlowToLoad"), meanwhile=fail)  # which would take a minute


@pytest.mark.parametrize(("multiprocess", "name"), [("1", "MPClient"), ("0", "InprocClient")])
def test_the_environment_chooses_the_client(monkeypatch: pytest.MonkeyPatch, multiprocess: str, name: str) -> None:
    """One variable chooses between a core of its own process and one in this process."""
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", multiprocess)
    for kind in (SyncMPClient, AsyncMPClient):  # the others need a core to be made
        monkeypatch.setattr(kind, "__init__", lambda *args, **options: None)
        monkeypatch.setattr(kind, "shutdown", lambda self: None)
    for make, prefix in ((make_client, "Sync"), (make_async_client, "Async")):
        client = make(make_config(), log_stats=False)
        expected = prefix + name if multiprocess == "1" or prefix == "Async" else name
        assert type(client).__name__ == expected
        client.shutdown()


def test_what_the_client_owns(start: Clients) -> None:
    """The client owns a context of two threads, and private sockets that are bound before the core gets their
    addresses. What is done meanwhile begins once the core runs."""
    seen: list[bool] = []
    client = start(meanwhile=lambda: seen.append(True))
    assert seen == [True]
    names = [stamp.name for stamp in client.ready_response.stamps]
    assert names == ["process", "interpreter", "imports", "configuration", "engine core", "ready"]
    assert client.ready_response.peak_memory_bytes > 0
    resources = client.resources
    assert resources.context.get(zmq.IO_THREADS) == 2
    assert resources.directory is not None
    path = resources.directory.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {file.name for file in path.iterdir() if file.is_socket()} == {"input-0", "output-0", "handshake-0-0"}
    assert [file.name for file in path.glob("heartbeat*")] == ["heartbeat-0-0"]


def test_a_core_in_this_process_cannot_be_shared() -> None:
    addresses = ClientAddresses(1, "ipc:///in", "ipc:///out")
    with pytest.raises(ConfigError, match="only an engine core in a process of its own can be shared"):
        make_async_client(make_config(), log_stats=False, multiprocess=False, client_addresses=addresses)


# -- death ------------------------------------------------------------------------------------------------------------


def test_requests_go_on_after_each_of_three_kills(start: Clients, pace: Pace) -> None:
    client = start(config_with("Patient", core_restart_limit=3))
    requests = [make_request(name, 1000) for name in "abcdefgh"]
    for request in requests:
        client.add_request(request)
    kill_at = [60, 200, 300]
    victims: list[int] = []

    def kill(num_tokens: int) -> None:
        pid = core_pid(client)
        if num_tokens < kill_at[len(victims)] or pid in victims:  # what a dead one has sent still comes
            return
        os.kill(pid, signal.SIGKILL)
        victims.append(pid)
        if len(victims) == len(kill_at):
            kill_at.append(10**9)
            pace.hurry()

    tokens = read(client, len(requests), kill)
    assert tokens == {request.request_id: expected_tokens(request) for request in requests}
    assert client.ready_response.incarnation == client.restarts["killed"] == 3
    assert client.is_ready


def test_a_stopped_core_is_found_and_replaced(start: Clients, pace: Pace) -> None:
    client = start(config_with("Patient", core_hang_timeout_s=2.0))
    client.add_request(request := make_request("a", 1000))
    stopped: list[int] = []

    def stop(num_tokens: int) -> None:
        if not stopped:
            stopped.append(core_pid(client))
            os.kill(stopped[0], signal.SIGSTOP)
            pace.hurry()

    assert read(client, 1, stop) == {"a": expected_tokens(request)}
    assert client.restarts == {"hang": 1}
    assert not is_running(stopped[0])


def test_past_the_budget_requests_end_with_an_error_and_calls_raise(
    start: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", "core.step.schedule=exit(9)")
    client = start(config_with(core_restart_limit=1))
    for name in "ab":
        client.add_request(make_request(name))
    ends = {}
    while len(ends) < 2:
        for output in client.get_output().outputs:
            assert output.finish_reason is FinishReason.ERROR
            ends[output.request_id] = output.error_message or ""
    assert any("computed alone" in message for message in ends.values()), "one was found guilty on the way"
    assert any("its budget of 1 restarts in 60 s is used up" in message for message in ends.values())
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="budget"):
            client.get_output()
    with pytest.raises(EngineDeadError, match="budget"):
        client.add_request(make_request("c"))
    with pytest.raises(EngineDeadError, match="budget"):
        client.call_utility("is_sleeping")
    client.abort_requests(["a"])
    assert (client.engine_dead, client.is_ready) == (True, False)


def test_control_calls_over_a_death(owner: SyncMPClient) -> None:
    client = owner
    client.call_utility("pause_scheduler", "keep")
    os.kill(core_pid(client), signal.SIGKILL)
    assert client.call_utility("is_scheduler_paused"), "the new core is paused as the old one was"
    client.call_utility("resume_scheduler")
    assert client.call_utility("collective_rpc", "echo", None, (1, "x")) == [[1, "x"]]
    with pytest.raises(ServerError, match="asked to fail"):
        client.call_utility("collective_rpc", "fail")
    with pytest.raises(ValidationError, match="no control verb 'is_asleep'; did you mean"):
        client.call_utility("is_asleep")
    with pytest.raises(ValidationError, match="cannot be sent to the engine core"):
        client.call_utility("collective_rpc", object())
    with pytest.raises(ValidationError, match=r"<lambda>.*another process; name a method of the worker class"):
        client.call_utility("collective_rpc", lambda worker: worker)


def run_session(engine: LLMEngine, kill_before: set[int]) -> list[list[int]]:
    """The answers to three inputs; the second is added while the first is answered. Before the steps with these
    numbers the core is killed."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    inputs = [[1, 2, 3], [51, 60], [52, 60], []]
    engine.add_request("s", {"prompt_token_ids": inputs.pop(0)}, params, resumable=True)
    engine.add_request("s", {"prompt_token_ids": inputs.pop(0)}, params, resumable=True)
    answers: list[list[int]] = []
    for number in range(1000):
        if number in kill_before:
            os.kill(core_pid(engine.engine_core), signal.SIGKILL)  # type: ignore[attr-defined]
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            (completion,) = output.outputs
            if output.finished:
                return answers
            if completion.finish_reason is not None:
                answers.append(list(completion.token_ids))
                if len(answers) > 1:
                    prompt = inputs.pop(0)
                    engine.add_request("s", {"prompt_token_ids": prompt}, params, resumable=bool(prompt))
    raise AssertionError("the session does not end")


def test_a_session_survives_kills_in_and_between_its_segments(start: Clients) -> None:
    config = config_with(core_restart_limit=100, core_restart_window_s=0.01)
    model = HFConfig({"max_position_embeddings": 4096, "vocab_size": 256}, Path())
    config = dataclasses.replace(
        config, model_config=dataclasses.replace(config.model_config, hf_config=model, skip_tokenizer_init=True)
    )
    engine = LLMEngine(config, client=start(config), log_stats=False)
    undisturbed = run_session(engine, set())
    assert [len(answer) for answer in undisturbed] == [6, 6, 6]
    for kill_before in ({0, 8}, {1, 2, 12}):
        assert run_session(engine, kill_before) == undisturbed, kill_before


# -- end --------------------------------------------------------------------------------------------------------------


def test_shutdown_gives_live_requests_an_end(start: Clients) -> None:
    client = start()
    pid = core_pid(client)
    client.add_request(make_request("a", 4000))
    client.get_output()
    client.shutdown()
    client.shutdown()
    assert not is_running(pid)
    with contextlib.suppress(EngineDeadError):
        while not any(output.finished for output in client.get_output().outputs):
            pass
    with pytest.raises(EngineDeadError, match="shut down"):
        client.get_output()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.add_request(make_request("b"))


@pytest.mark.parametrize("kind", [SyncMPClient, AsyncMPClient])
def test_a_client_that_is_garbage_ends_its_core(kind: Any) -> None:
    client = kind(make_config(), log_stats=False)
    resources, pid = client.resources, core_pid(client)
    del client
    gc.collect()
    check_nothing_left(resources)
    assert not is_running(pid)


def test_an_engine_that_ends_on_a_thread_of_another_does_not_hold_that_up(start: Clients, owner: SyncMPClient) -> None:
    """Garbage is collected by whichever thread comes to it, that of an engine included, which has work to do."""
    garbage, other = start(), owner
    resources, ended_on = garbage.resources, []
    end = resources._close
    resources._close = lambda: (ended_on.append(threading.current_thread().name), end())  # type: ignore[method-assign]
    assert other.resources.link_thread is not None
    other.resources.link_thread.post(resources.close)
    wait_until(lambda: resources.directory is not None and not resources.directory.path.exists())
    assert ended_on == ["EngineCoreCloser"]
    assert other.call_utility("is_sleeping") is False


def test_a_fork_neither_uses_nor_ends_the_engine(owner: SyncMPClient) -> None:
    client = owner
    child = os.fork()
    if child == 0:  # nothing of pytest's may run here
        code = 3
        with contextlib.suppress(BaseException):
            try:
                client.add_request(make_request("of a fork"))
            except ServerError:
                client.shutdown()
                code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    client.add_request(request := make_request("after a fork"))
    assert read(client, 1) == {"after a fork": expected_tokens(request)}


# -- several clients --------------------------------------------------------------------------------------------------


def test_two_clients_share_a_core_and_both_survive_its_death(start: Clients, pace: Pace) -> None:
    """Each client has its own sockets and its own journal."""
    config = config_with("Patient")
    owner = start(config, client_count=2)
    other = start(config, client_addresses=owner.get_client_addresses(1))
    requests = {owner: make_request("same", 1000), other: make_request("same", 900)}
    requests[other].prompt_token_ids = [9, 9]
    tokens: dict[SyncMPClient, dict[str, list[int]]] = {}

    def run(client: SyncMPClient) -> None:
        client.add_request(requests[client])
        tokens[client] = read(client, 1)

    # One id for both would be refused by the core, which knows requests by id only: the internal ones are unique.
    requests[other].request_id = "other"
    threads = [threading.Thread(target=run, args=(client,)) for client in requests]
    for thread in threads:
        thread.start()
    wait_until(lambda: owner.num_live_requests + other.num_live_requests == 2)
    os.kill(core_pid(owner), signal.SIGKILL)
    pace.hurry()
    for thread in threads:
        thread.join(DEADLINE_S)
    for client, request in requests.items():
        assert tokens[client] == {request.request_id: expected_tokens(request)}
    assert other.counts["deaths"] == owner.counts["deaths"] == 1
    with pytest.raises(ConfigError, match="only the client that starts the core"):
        other.get_client_addresses(1)


def test_a_client_that_goes_leaves_the_others_alone(start: Clients, owner: SyncMPClient) -> None:
    config = config_with()
    other = SyncMPClient(config, log_stats=False, client_addresses=owner.get_client_addresses(1))
    other.add_request(make_request("theirs", 4000))
    other.get_output()
    other.shutdown()
    owner.add_request(request := make_request("ours"))
    assert read(owner, 1) == {"ours": expected_tokens(request)}
    pid = core_pid(owner)
    again = start(config, client_addresses=owner.get_client_addresses(1))
    again.add_request(request := make_request("again"))
    assert read(again, 1) == {"again": expected_tokens(request)}
    assert core_pid(owner) == pid


def test_a_poison_of_an_attached_client_fails_alone_in_all_clients(
    start: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attached client sees no heartbeat: it takes deaths without a token in between for a reason to suspect."""
    monkeypatch.setenv("QUIRE_FAILPOINTS", "core.step.execute=exit(3),key=poison")
    config = config_with()
    owner = start(config, client_count=2)
    other = start(config, client_addresses=owner.get_client_addresses(1))
    requests = {owner: [make_request(f"ours{i}", 100) for i in range(3)]}
    requests[other] = [make_request("theirs", 100), make_request("poison"), make_request("too", 100)]
    tokens: dict[SyncMPClient, dict[str, list[int]]] = {}
    for client in (owner, other):
        for request in requests[client]:
            client.add_request(request)

    def run(client: SyncMPClient) -> None:
        tokens[client] = read(client, 3, failing={"poison"})

    threads = [threading.Thread(target=run, args=(client,)) for client in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    expected = {r.request_id: expected_tokens(r) for r in (*requests[owner], *requests[other])}
    assert tokens[owner] == {name: expected[name] for name in tokens[owner]}
    assert {**tokens[owner], **tokens[other]} == {**expected, "poison": []}
    assert owner.counts["poisoned_requests"] == 0
    assert other.counts["poisoned_requests"] == 1


def test_an_attached_client_gives_up_when_no_core_comes_back(start: Clients) -> None:
    config = config_with()
    owner = start(config, client_count=2)
    other = start(config, client_addresses=owner.get_client_addresses(1))
    link_thread = other.resources.link_thread
    assert isinstance(link_thread, AttachedLinkThread)
    link_thread.patience_s = 1.0
    other.add_request(make_request("a", 4000))
    other.get_output()
    owner.shutdown()
    end = None
    while end is None:
        for output in other.get_output().outputs:
            end = output.error_message
    assert end.startswith("no engine core was there for 1 s")
    with pytest.raises(EngineDeadError, match="no engine core was there for 1 s"):
        other.get_output()
    assert other.engine_dead


# -- over TCP ---------------------------------------------------------------------------------------------------------


def test_over_tcp_with_keys(start: Clients) -> None:
    config = dataclasses.replace(
        config_with(),
        parallel_config=ParallelConfig(**{**vars(config_with().parallel_config), "engine_host": "127.0.0.1"}),
    )
    client = start(config)
    client.add_request(request := make_request("a"))
    assert read(client, 1) == {"a": expected_tokens(request)}
    os.kill(core_pid(client), signal.SIGKILL)
    client.add_request(request := make_request("b"))
    assert read(client, 1) == {"b": expected_tokens(request)}
    with pytest.raises(ConfigError, match="reached over TCP has one client"):
        start(config, client_count=2)


async def read_to_the_end(client: AsyncMPClient) -> None:
    while True:
        await client.get_output_async()


# -- asyncio ----------------------------------------------------------------------------------------------------------


def test_the_asyncio_client_serves_as_the_other_does() -> None:
    async def run() -> None:
        client = await asyncio.to_thread(AsyncMPClient, config_with(core_restart_limit=1), log_stats=False)
        try:
            requests = [make_request(name) for name in "abc"]
            for request in requests:
                await client.add_request_async(request)
            tokens: dict[str, list[int]] = {name: [] for name in "abc"}
            num_left, was_killed = len(requests), False
            while num_left:
                for output in (await client.get_output_async()).outputs:
                    tokens[output.request_id] += output.new_token_ids
                    num_left -= output.finished
                if not was_killed:
                    was_killed = True
                    os.kill(core_pid(client), signal.SIGKILL)
            assert tokens == {request.request_id: expected_tokens(request) for request in requests}
            assert await client.call_utility_async("is_sleeping") is False
            await client.add_request_async(make_request("d", 4000))
            await client.get_output_async()
            await client.abort_requests_async(["d"])
            reader = asyncio.create_task(read_to_the_end(client))
            await asyncio.to_thread(client.shutdown)
            with pytest.raises(EngineDeadError, match="shut down"):
                await reader
        finally:
            client.shutdown()
        check_nothing_left(client.resources)

    asyncio.run(run())
