"""`quire serve` with LoRA adapters on the real demo model: several API processes, loads while streams run, a core that
dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.testing.metrics_audit import MetricsAudit, read_exposition
from tests.adapters import factors, write_adapter

from .api_clients import Client, client_of, clients_of_each, closing_clients, wait_until
from .serving import ServerProcess, environment, serve_command, serving

PROMPT = "The engine keeps"


def write_demo_adapter(directory: Path, seed: int, rank: int = 4) -> Path:
    """Writes a random adapter of the demo model, large enough to change its text."""
    content: dict[str, np.ndarray] = {}
    for layer in range(6):
        content |= factors(f"model.layers.{layer}.self_attn.v_proj", (256, 128), rank, seed, 0.4)
        content |= factors(f"model.layers.{layer}.mlp.down_proj", (688, 256), rank, seed, 0.2)
    return write_adapter(directory, content, r=rank, target_modules=["v_proj", "down_proj"])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "below/second", "third"), start=1):
        write_demo_adapter(root / name, seed, rank=4 * seed)
    return root


@pytest.fixture(scope="module")
def pair(adapters: Path) -> Iterator[ServerProcess]:
    """Two API processes in front of the demo model. `first` is there from the start, `below/second` in a directory."""
    flags = ("--api-server-count", "2", "--enable-admin", "--admin-port", "0", "--max-model-len", "512")
    modules = ("--lora-modules", f"one={adapters / 'first'}")
    with closing_clients(), serving("demo", *flags, *modules, "--lora-dir", str(adapters / "below")) as running:
        yield running


def ask(client: Client, model: str, max_tokens: int = 24) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    status, answer = client.ask("POST", "/v1/completions", body)
    assert status == 200, answer
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def names(client: Client) -> list[str]:
    return [card["id"] for card in client.ask("GET", "/v1/models")[1]["data"]]


def admin_of(server: ServerProcess, pid: int) -> Client:
    return client_of(server, pid, is_admin=True)


def load(client: Client, name: str, path: Path, **more: Any) -> tuple[int, Any]:
    return client.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def test_adapters_of_a_server_of_two_processes(pair: ServerProcess, adapters: Path) -> None:
    audit = MetricsAudit(one_clock=False)
    clients = clients_of_each(pair)
    (first_pid, first), (_, second) = clients.items()
    texts = {model: ask(first, model) for model in ("demo", "one", "second")}
    assert len(set(texts.values())) == 3
    for model, text in texts.items():
        assert ask(second, model) == text

    # one process loads another adapter while a stream of the other one runs; both serve it
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    stream = second.begin("POST", "/v1/completions", body)
    stream.readline()
    admin = admin_of(pair, first_pid)
    status, text = load(admin, "new", adapters / "third")
    assert (status, text) == (200, "Success: LoRA adapter 'new' added successfully.")
    texts["new"] = ask(first, "new")
    assert len(set(texts.values())) == 4
    lines = stream.read().decode().split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert not [line for line in lines if '"error"' in line]
    for client in clients.values():
        assert ask(client, "new") == texts["new"]
        assert names(client)[:2] == ["demo", "one"]
        assert set(names(client)) == {"demo", "one", "second", "new"}
    assert load(admin, "bad", adapters / "none")[0] == 404
    audit.check(read_exposition(first.ask("GET", "/metrics")[1]))

    # the death of the core, and of a process: everything is served as before
    core = pair.core_pid()
    running = {model: first.begin("POST", "/v1/completions", {**body, "model": model}) for model in ("new",)}
    running["new"].readline()
    os.kill(core, signal.SIGKILL)
    rest = running["new"].read().decode()
    assert rest.endswith("data: [DONE]\n\n")
    assert '"error"' not in rest
    wait_until(lambda: pair.core_pids() not in ([], [core]))
    for model, text in texts.items():
        assert ask(second, model) == text
    os.kill(first_pid, signal.SIGKILL)
    wait_until(lambda: len(set(pair.api_pids()) - {first_pid}) == 2)
    again = clients_of_each(pair)
    for client in again.values():
        assert set(names(client)) == {"demo", "one", "second", "new"}
        assert ask(client, "new") == texts["new"]

    # unloaded by one, gone from both
    pid = next(iter(again))
    status, text = admin_of(pair, pid).ask("POST", "/v1/unload_lora_adapter", {"lora_name": "new"})
    assert (status, text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    for client in again.values():
        assert client.ask("POST", "/v1/completions", {"model": "new", "prompt": "x"})[0] == 404
    MetricsAudit(one_clock=False).check(read_exposition(client.ask("GET", "/metrics")[1]))  # a process began anew


def test_a_module_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other")  # of another model
    for more in ((), ("--api-server-count", "2")):
        command = serve_command("--port", "0", "demo", *more, "--lora-modules", f"other={other}")
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"quire: error: --lora-modules other: {other}/adapter_model.safetensors: tensor ")
        assert "down_proj.lora_A.weight has shape [4, 80]" in last
