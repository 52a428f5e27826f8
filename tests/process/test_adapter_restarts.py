"""Adapters outlive the engine core: it is killed while they are read, installed and removed, while many are live, and
while their files change. No token differs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import EngineArgs
from quire.config.engine import EngineConfig, LifecycleConfig
from quire.config.lora import LoRAConfig
from quire.errors import AdapterError
from quire.frontend.client.mp import SyncMPClient
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_hardware import fake_digest
from quire.testing.fake_model import FakeModel, expected_output
from quire.testing.history import History
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason
from tests.adapters import write_demo_adapter

from .harness import Assassin, Engine, running
from .peer import DEADLINE_S, make_config

NUM_TOKENS = 60


def make_adapter_config(executor: str, **lora: object) -> EngineConfig:
    return dataclasses.replace(
        make_config(executor),
        lora_config=LoRAConfig(**{"enable_lora": True, "lora_memory_bytes": 1 << 20, **lora}),  # type: ignore[arg-type]
        lifecycle_config=LifecycleConfig(core_restart_limit=100),
    )


def write(lora: LoRARequest, content: str) -> None:
    """Writes the files of an adapter of the fake model."""
    directory = Path(lora.lora_path)
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_text(content)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[SyncMPClient]:
    made = SyncMPClient(make_adapter_config(*getattr(request, "param", ["SlowAdapters"])), log_stats=False)
    yield made
    made.shutdown()


def make_request(name: str, lora: LoRARequest | None) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return EngineCoreRequest(name, [1, 2, *name.encode()], params, None, time.time(), lora_request=lora)


def right_tokens(request: EngineCoreRequest, digest: str | None = None) -> list[int]:
    lora = request.lora_request
    assert request.sampling_params is not None
    if lora is not None and digest is None:
        digest = fake_digest(lora)
    model, prompt = FakeModel((None,), 256), request.prompt_token_ids or []
    return expected_output(model, prompt, request.sampling_params, 4096, lora, adapter=digest or "").token_ids


def core_pid(client: SyncMPClient) -> int | None:
    supervisor = client.resources.supervisor
    assert supervisor is not None
    return supervisor.core_pid


def kill_core(client: SyncMPClient) -> int:
    """Returns which process it was: while it is the client's, its outputs may still arrive."""
    pid = core_pid(client)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def read_until(client: SyncMPClient, tokens: dict[str, list[int]], num_ends: int) -> list[EngineCoreOutput]:
    """Adds the tokens of all requests until so many have ended. Returns their ends."""
    ends: list[EngineCoreOutput] = []
    end = time.monotonic() + DEADLINE_S
    while len(ends) < num_ends:
        assert time.monotonic() < end
        ends += take_outputs(client, tokens)
    return ends


def take_outputs(client: SyncMPClient, tokens: dict[str, list[int]]) -> list[EngineCoreOutput]:
    """Adds the tokens of the next outputs. Returns those that are ends."""
    outputs = client.get_output().outputs
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return [output for output in outputs if output.finished]


@pytest.mark.parametrize(
    ("client", "num_adapters"),
    [(["SlowAdapters"], 20), pytest.param(["ManyAdapters"], 200, marks=pytest.mark.slow)],
    indirect=["client"],
)
def test_kills_while_adapters_load_and_run_change_no_token(
    client: SyncMPClient, tmp_path: Path, num_adapters: int
) -> None:
    loras = [LoRARequest(f"a{i}", i, str(tmp_path / f"a{i}")) for i in range(1, num_adapters + 1)]
    for lora in loras:
        write(lora, f"weights of {lora.lora_name}")
    added = client.call_utility("add_lora", loras[0])
    assert (added.lora_int_id, added.revision, added.digest) == (1, 1, fake_digest(loras[0]))
    assert client.call_utility("pin_lora", 1) is True
    requests = [make_request(f"r{i}", lora) for i, lora in enumerate([*loras, None, *loras])]
    for request in requests:
        client.add_request(request)
    killed = kill_core(client)  # the first loads have just begun
    tokens: dict[str, list[int]] = {}
    while not tokens or core_pid(client) in (None, killed):
        take_outputs(client, tokens)
    killed = kill_core(client)  # the base request runs, the others wait for their adapters
    while sum(map(len, tokens.values())) < len(requests) * NUM_TOKENS // 3 or core_pid(client) in (None, killed):
        assert not [end.error_message for end in take_outputs(client, tokens) if end.error_message]
    num_ended = sum(len(ids) == NUM_TOKENS for ids in tokens.values())
    kill_core(client)  # some have begun, some have not, some have ended
    ends = read_until(client, tokens, len(requests) - num_ended)
    assert {one.finish_reason for one in ends} == {FinishReason.LENGTH}, [one.error_message for one in ends]
    for request in requests:
        assert tokens[request.request_id] == right_tokens(request), request.request_id
    assert client.counts["deaths"] == 3
    assert 1 in client.call_utility("list_loras"), "it was registered again"
    again = client.call_utility("add_lora", loras[0])
    assert (again.revision, again.digest) == (1, added.digest)


@pytest.mark.parametrize(
    ("client", "num_adapters"),
    [(["SlowAdapters"], 12), pytest.param(["ManyAdapters"], 200, marks=pytest.mark.slow)],
    indirect=["client"],
)
def test_files_that_change_between_death_and_resumption(
    client: SyncMPClient, tmp_path: Path, num_adapters: int
) -> None:
    """A third of the adapters has other files after each death. Streams that have begun with the old ones end with an
    error; all others have the right tokens, and so has what comes after."""
    loras = [LoRARequest(f"a{i}", i, str(tmp_path / f"a{i}")) for i in range(1, num_adapters + 1)]
    for lora in loras:
        write(lora, f"first of {lora.lora_name}")
    requests = {f"{lora.lora_name}-{i}": make_request(f"{lora.lora_name}-{i}", lora) for lora in loras for i in (1, 2)}
    contents = {lora.lora_name: [fake_digest(lora)] for lora in loras}
    for request in requests.values():
        client.add_request(request)
    tokens: dict[str, list[int]] = {}
    ends: list[EngineCoreOutput] = []
    killed = None
    for death in range(3):
        goal = (death + 1) * len(requests) * NUM_TOKENS // 5
        while (sum(map(len, tokens.values())) < goal or core_pid(client) in (None, killed)) and len(ends) < len(
            requests
        ):
            ends += take_outputs(client, tokens)
        killed = kill_core(client)
        for lora in loras[death::3]:
            write(lora, f"other of {lora.lora_name}")
            contents[lora.lora_name].append(fake_digest(lora))
    while len(ends) < len(requests):
        ends += take_outputs(client, tokens)
    failed = {end.request_id: end.error_message or "" for end in ends if end.finish_reason is FinishReason.ERROR}
    for name, request in requests.items():
        lora = request.lora_request
        assert lora is not None
        got = tokens.get(name, [])
        rights = [right_tokens(request, digest) for digest in contents[lora.lora_name]]
        if name in failed:
            assert "have changed since the request began" in failed[name]
            assert got == rights[0][: len(got)]
            assert got
        else:
            assert got in rights, name
    assert 0 < len(failed) < len(requests)
    after = [make_request(f"{lora.lora_name}-after", lora) for lora in loras]
    for request in after:
        client.add_request(request)
    read_until(client, tokens, len(after))
    assert [tokens[request.request_id] for request in after] == [right_tokens(request) for request in after]


@pytest.mark.parametrize("client", [["Steady"]], indirect=True)
def test_a_request_does_not_go_on_with_other_files(client: SyncMPClient, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    lora = LoRARequest("a", 1, str(tmp_path))
    first = client.call_utility("add_lora", lora).digest
    request = make_request("old", lora)
    client.add_request(request)
    tokens: dict[str, list[int]] = {}
    while not tokens:
        take_outputs(client, tokens)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"second")
    kill_core(client)
    (end,) = read_until(client, tokens, 1)
    assert end.finish_reason is FinishReason.ERROR
    assert "files of adapter 'a'" in (end.error_message or "")
    assert "have changed since the request began" in (end.error_message or "")
    assert tokens["old"] == right_tokens(request, first)[: len(tokens["old"])]
    new = make_request("new", lora)
    client.add_request(new)
    read_until(client, tokens, 1)
    assert tokens["new"] == right_tokens(new)


@pytest.mark.parametrize("client", [["Steady"]], indirect=True)
def test_a_revision_outlives_the_core(client: SyncMPClient, tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"first")
    lora = LoRARequest("a", 1, str(tmp_path))
    client.call_utility("add_lora", lora)
    file.write_bytes(b"second")
    reloaded = client.call_utility("add_lora", LoRARequest("a", 1, str(tmp_path), load_inplace=True))
    assert (reloaded.revision, reloaded.digest) == (2, fake_digest(lora))
    request = make_request("r", lora)
    client.add_request(request)
    kill_core(client)
    tokens: dict[str, list[int]] = {}
    read_until(client, tokens, 1)
    assert tokens["r"] == right_tokens(request)
    assert client.call_utility("add_lora", lora).revision == 2
    assert client.call_utility("remove_lora", 1) is True
    kill_core(client)
    assert client.call_utility("list_loras") == set()
    with pytest.raises(AdapterError, match="adapter_config"):
        client.call_utility("add_lora", LoRARequest("b", 2, "/missing"))


# -- on the demo model -------------------------------------------------------------------------------------------------

PLACES = ("lora.remove", "lora.pack", "lora.read", "lora.install")
"""The first comes to pass in a core that has packed all adapters, the others in cores that begin with none."""


@pytest.mark.slow
@pytest.mark.parametrize(("num_adapters", "num_resident", "num_kills"), [(8, 3, 0), (200, 120, 12)])
def test_deaths_where_adapters_are_read_packed_installed_and_removed(
    num_adapters: int,
    num_resident: int,
    num_kills: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache_root: Path,
) -> None:
    """One death at each place, then `num_kills` at random moments, while all adapters have streams and not all fit.

    What the streams must bring is read before from the first core, which nothing disturbs.
    """
    loras = [
        LoRARequest(f"a{i}", i, str(write_demo_adapter(tmp_path / f"a{i}", i, 1 + i % 9)))
        for i in range(1, num_adapters + 1)
    ]
    args = EngineArgs(
        model="demo", max_model_len=256, num_gpu_blocks_override=1000, enable_lora=True, max_cpu_loras=num_resident,
        max_num_seqs=num_adapters + 8, core_restart_limit=1000, core_restart_window_s=1.0,
    )  # fmt: skip
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=32, ignore_eos=True)

    async def read_all(engine: Engine, history: History, turn: int, on_progress: Callable[[], None]) -> None:
        async def read(lora: LoRARequest | None) -> None:
            request_id = f"{turn}-{lora.lora_name if lora else 'base'}"
            history.begin(request_id)
            prompt = f"Once upon a time in turn {turn},"
            async for output in engine.llm.generate(prompt, params, request_id, lora_request=lora):
                history.record(output)
                on_progress()

        await asyncio.gather(*(read(lora) for lora in (None, *loras)))

    async def run() -> tuple[History, History]:
        undisturbed, seen = History(), History()
        async with running(args) as engine:
            for turn in range(len(PLACES) + 1):
                await read_all(engine, undisturbed, turn, lambda: None)
            assert engine.counts["deaths"] == 0
            assert await engine.llm.reset_prefix_cache()
            monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))  # where later cores find nothing packed
            assassin = Assassin(engine, seen, random.Random(1), num_kills, max_gap=num_adapters * 4)
            (tmp_path / "armed lora.pack").touch()  # the next core may pack all before the next turn
            for turn, place in enumerate(PLACES):
                (tmp_path / f"armed {place}").touch()
                await read_all(engine, seen, turn, lambda: None)
                assert (tmp_path / f"fired {place}").exists(), place
            await read_all(engine, seen, len(PLACES), assassin.on_progress)
            assert engine.counts["deaths"] >= len(PLACES) + num_kills // 2
            assert engine.counts["poisoned_requests"] == 0
        return undisturbed, seen

    faults = (f"{p}=kill,skip=2,times=1,after={tmp_path}/armed {p},tally={tmp_path}/fired {p}" for p in PLACES)
    monkeypatch.setenv("QUIRE_FAILPOINTS", ";".join(faults))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "trials").symlink_to(cache_root / "trials")
    undisturbed, seen = asyncio.run(run())
    assert seen.problems() == []
    assert seen.differences(undisturbed) == []
    assert len({tuple(stream.token_ids) for stream in seen.streams.values()}) > 0.9 * len(seen.streams)
