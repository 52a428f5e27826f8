"""Adapters outlive the engine core: it is killed while one loads and while many are live, and no token differs."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config.engine import EngineConfig, LifecycleConfig
from quire.config.lora import LoRAConfig
from quire.errors import AdapterError
from quire.frontend.client.mp import SyncMPClient
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_hardware import fake_digest
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason

from .peer import DEADLINE_S, make_config

NUM_ADAPTERS = 20
NUM_TOKENS = 60


def make_adapter_config(executor: str, **lora: object) -> EngineConfig:
    return dataclasses.replace(
        make_config(executor),
        lora_config=LoRAConfig(**{"enable_lora": True, "lora_memory_bytes": 1 << 20, **lora}),  # type: ignore[arg-type]
        lifecycle_config=LifecycleConfig(core_restart_limit=100),
    )


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


def kill_core(client: SyncMPClient) -> None:
    supervisor = client.resources.supervisor
    assert supervisor is not None
    pid = supervisor.core_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def read_until(client: SyncMPClient, tokens: dict[str, list[int]], num_ends: int) -> list[EngineCoreOutput]:
    """Adds the tokens of all requests until so many have ended. Returns their ends."""
    ends: list[EngineCoreOutput] = []
    end = time.monotonic() + DEADLINE_S
    while len(ends) < num_ends:
        assert time.monotonic() < end
        for output in client.get_output().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            ends += [output] if output.finished else []
    return ends


def test_kills_while_adapters_load_and_run_change_no_token(client: SyncMPClient, tmp_path: Path) -> None:
    loras = [LoRARequest(f"a{i}", i, str(tmp_path / f"a{i}")) for i in range(1, NUM_ADAPTERS + 1)]
    for lora in loras:
        directory = Path(lora.lora_path)
        directory.mkdir()
        (directory / "adapter_model.safetensors").write_bytes(b"weights of " + lora.lora_name.encode())
    added = client.call_utility("add_lora", loras[0])
    assert (added.lora_int_id, added.revision, added.digest) == (1, 1, fake_digest(loras[0]))
    assert client.call_utility("pin_lora", 1) is True
    requests = [make_request(f"r{i}", lora) for i, lora in enumerate([*loras, None, *loras])]
    for request in requests:
        client.add_request(request)
    kill_core(client)  # the first loads have just begun
    tokens: dict[str, list[int]] = {}
    while not tokens:
        for output in client.get_output().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    kill_core(client)  # the base request runs, the others wait for their adapters
    while sum(map(len, tokens.values())) < len(requests) * NUM_TOKENS // 3:
        for output in client.get_output().outputs:
            assert not output.error_message, output.error_message
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
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


@pytest.mark.parametrize("client", [["Steady"]], indirect=True)
def test_a_request_does_not_go_on_with_other_files(client: SyncMPClient, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    lora = LoRARequest("a", 1, str(tmp_path))
    first = client.call_utility("add_lora", lora).digest
    request = make_request("old", lora)
    client.add_request(request)
    tokens: dict[str, list[int]] = {}
    while not tokens:
        for output in client.get_output().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
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
