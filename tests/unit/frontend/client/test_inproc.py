"""`InprocClient` against a core made of recorded calls: which ones, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError
from quire.frontend.client import inproc
from quire.frontend.client.base import make_client
from quire.frontend.client.inproc import InprocClient
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest


class FakeExecutor:
    """Only its name matters here."""


class FakeCore:
    def __init__(self, config: Any, executor_class: type, log_stats: bool) -> None:
        self.calls: list[Any] = [("init", executor_class, log_stats)]
        self.ready_response = "ready"
        self.lifecycle = self.executor = self
        self.outputs: Any = {0: EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1])])}

    def step_fn(self) -> Any:
        self.calls.append("step")
        return self.outputs, True

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[str, int]:
        return f"core {request.request_id}", 3

    def reset_prefix_cache(self, *args: bool) -> bool:
        self.calls.append(("reset", *args))
        return True

    def collective_rpc(self, *args: Any) -> list[Any]:
        return [args]

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def client(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> InprocClient:
    monkeypatch.setattr(inproc, "ENGINE_CORE", f"{__name__}:FakeCore")
    config = EngineArgs(str(model_dir), distributed_executor_backend=f"{__name__}:FakeExecutor").create_engine_config()
    made = make_client(config, log_stats=True)
    assert isinstance(made, InprocClient)
    return made


def test_composition_by_name(client: InprocClient) -> None:
    assert client.engine_core.calls[0][0] == "init"
    assert client.engine_core.calls[0][1].__name__ == "FakeExecutor"
    assert client.engine_core.calls[0][2] is True
    assert client.ready_response == "ready"


def test_a_step_per_output(client: InprocClient) -> None:
    assert client.get_output().outputs == [EngineCoreOutput("a", [1])]
    assert client.engine_core.calls[1:] == ["step", ("post_step", True)]
    for nothing in (None, {}, {1: EngineCoreOutputs()}):
        client.engine_core.outputs = nothing
        assert client.get_output().outputs == []


def test_requests_and_control(client: InprocClient) -> None:
    client.add_request(EngineCoreRequest("a", [1], SamplingParams(), None, 0.0))
    client.abort_requests([])
    client.abort_requests(["a"])
    assert client.reset_prefix_cache(True) is True
    assert client.collective_rpc("m", 1.0, (2,), {"k": 3}) == [("m", 1.0, (2,), {"k": 3})]
    assert client.collective_rpc(len) == [(len, None, (), None)]
    client.profile(True, "/p")
    client.shutdown()
    assert client.engine_core.calls[1:] == [
        ("add_request", "core a", 3),
        ("abort_requests", ["a"]),
        ("reset", True, False),
        ("profile", True, "/p", None, None),
        ("shutdown",),
    ]


def test_an_unknown_executor_is_named(model_dir: Path) -> None:
    config = EngineArgs(str(model_dir), distributed_executor_backend="nowhere:Nothing").create_engine_config()
    with pytest.raises(ConfigError, match="nowhere"):
        make_client(config, log_stats=False)
