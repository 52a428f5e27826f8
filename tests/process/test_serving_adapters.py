"""`quire serve` with LoRA adapters on the real demo model: several API processes, loads while streams run, a core that
dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.testing.metrics_audit import MetricsAudit, read_exposition
from tests.adapters import write_adapter, write_demo_adapter

from .api_clients import Client, Stream, client_of, clients_of_each, closing_clients, wait_until
from .serving import ServerProcess, environment, serve_command, serving
from .soak import usage

PROMPT = "The engine keeps"
NUM_LOADERS = 4


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
    flags += ("--num-gpu-blocks-override", "500", "--lora-memory-bytes", str(8 << 20))
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


class Churn:
    """Clients that load, use, reload and unload adapters, whose files are copies of a few in `pool`."""

    def __init__(self, server: ServerProcess, pool: Sequence[Path], scratch: Path) -> None:
        self._pool, self._scratch = pool, scratch
        self._pids = server.api_pids()
        self._public = [[client_of(server, pid) for pid in self._pids] for _ in range(NUM_LOADERS)]
        self._admin = [[admin_of(server, pid) for pid in self._pids] for _ in range(NUM_LOADERS)]
        self.texts = [self._text_of(i) for i in range(len(pool))]
        """Texts of the adapters of the pool, each alone."""

    def _text_of(self, i: int) -> str:
        admin, public = self._admin[0][0], self._public[0][0]
        assert load(admin, f"alone{i}", self._pool[i])[0] == 200
        text = ask(public, f"alone{i}", 4)
        assert unload(admin, f"alone{i}") == 200
        return text

    def run(self, loader: int, numbers: Sequence[int]) -> None:
        """Does the work of one client. The processes of the server take turns."""
        for number in numbers:
            name, directory = f"adapter{number}", self._scratch / f"adapter{number}"
            here, there = number % 2, (number + 1) % 2
            admin, public = self._admin[loader], self._public[loader]
            first, second = number % len(self._pool), (number + 1) % len(self._pool)
            shutil.copytree(self._pool[first], directory)
            assert load(admin[here], name, directory)[0] == 200
            assert ask(public[there], name, 4) == self.texts[first]
            shutil.copytree(self._pool[second], directory, dirs_exist_ok=True)
            assert load(admin[there], name, directory)[0] == 400, "it is there already"
            assert load(admin[there], name, directory, load_inplace=True)[0] == 200
            assert ask(public[here], name, 4) == self.texts[second]
            assert unload(admin[here], name) == 200
            assert public[here].ask("POST", "/v1/completions", {"model": name, "prompt": "x"})[0] == 404
            shutil.rmtree(directory)


def unload(client: Client, name: str) -> int:
    return client.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})[0]


def metrics_of(client: Client) -> MetricsSnapshot:
    return read_exposition(client.ask("GET", "/metrics")[1])


@pytest.mark.parametrize(("num_streams", "num_adapters"), [(4, 12), pytest.param(64, 500, marks=pytest.mark.slow)])
def test_streams_beside_loads_change_no_token(
    pair: ServerProcess, tmp_path: Path, num_streams: int, num_adapters: int
) -> None:
    """Promises P1 and P7 while four clients load, use, reload and unload adapters over HTTP."""
    pool = [write_demo_adapter(tmp_path / f"pool{i}", 10 + i, rank) for i, rank in enumerate((4, 64, 12, 33))]
    churn = Churn(pair, pool, tmp_path)
    assert len(set(churn.texts)) == len(pool)
    readers = [client_of(pair, pid) for pid in pair.api_pids() for _ in range(num_streams // 2)]
    observer, audit, is_over = client_of(pair, pair.api_pids()[0]), MetricsAudit(one_clock=False), threading.Event()

    def read(i: int) -> list[int]:
        return Stream(readers[i], [5, 6, 7 + i], 48, model="demo", seed=i, temperature=0.8).read()

    def read_again_and_again(i: int, right: list[int]) -> int:
        num_read = 0
        while not is_over.is_set():
            assert read(i) == right
            num_read += 1
        return num_read

    core = pair.core_pid()
    with ThreadPoolExecutor(num_streams + NUM_LOADERS) as threads:
        undisturbed = list(threads.map(read, range(num_streams)))
        before = metrics_of(observer)
        audit.check(before)
        streams = [threads.submit(read_again_and_again, *each) for each in enumerate(undisturbed)]
        memory = []
        try:
            for half in (range(num_adapters // 2), range(num_adapters // 2, num_adapters)):
                loaders = [threads.submit(churn.run, i, half[i::NUM_LOADERS]) for i in range(NUM_LOADERS)]
                while not all(loader.done() for loader in loaders):
                    audit.check(metrics_of(observer))
                    threading.Event().wait(0.2)
                for loader in loaders:
                    loader.result()
                memory.append(usage(core))
        finally:
            is_over.set()  # or the readers would go on for ever
        assert all(stream.result() for stream in streams)

    def is_as_before() -> bool:
        assert ask(observer, "demo", 1)  # statistics come with steps
        now = metrics_of(observer)
        gauges = ("quire_lora_resident_bytes", "quire_lora_adapters", "vllm:num_requests_running")
        return all(now.value(name) == before.value(name) for name in gauges)

    wait_until(is_as_before)  # an adapter is forgotten when nothing refers to it
    after = metrics_of(observer)
    audit.check_at_rest(after)
    assert after.value("quire_lora_loads", "loaded") - before.value("quire_lora_loads", "loaded") == 2 * num_adapters
    assert after.value("quire_lora_loads", "failed") == before.value("quire_lora_loads", "failed")
    assert names(observer) == ["demo", "one", "second"]
    assert pair.core_pid() == core
    assert memory[1].num_fds <= memory[0].num_fds
    # 16 MiB: memory that is kept for the next loads, whatever the number of adapters
    assert memory[1].rss_mib <= memory[0].rss_mib + 16 + 0.2 * num_adapters, "adapters of 0.3 MiB and more stay"


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


@pytest.mark.parametrize("count", ["1", pytest.param("2", marks=pytest.mark.slow)])  # of two: test_api_processes.py
def test_a_module_that_cannot_be_loaded_ends_the_start(count: str, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other")  # of another model
    command = serve_command("--port", "0", "demo", "--api-server-count", count, "--lora-modules", f"other={other}")
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"quire: error: --lora-modules other: {other}/adapter_model.safetensors: tensor ")
    assert "down_proj.lora_A.weight has shape [4, 80]" in last
