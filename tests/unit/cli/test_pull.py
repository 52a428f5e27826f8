"""`quire pull`, `quire list` and `quire rm`, against a hub on this machine."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from quire.cli.info import kv_cache_specs
from quire.cli.main import main
from quire.config.hf_config import HFConfig
from quire.config.hub import SUGGESTED
from quire.config.model import ASSETS_DIR
from quire.worker.models.registry import get_model_class

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": b"w" * (24 << 20),
    "tokenizer.model": b"t" * 100,
    "pytorch_model.bin": b"pickled",
    "modeling_x.py": b"raise SystemExit",
    "consolidated.safetensors": b"again",
}


def oid(data: bytes) -> str:
    """Returns the hub's name of a file's content."""
    return hashlib.sha1(data).hexdigest()


class Hub(ThreadingHTTPServer):
    """Serves the repositories o/n, o/bin and o/demo (the model that ships with Quire), and refuses all others."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.fetched: list[str] = []
        self.repos = {
            "n": FILES,
            "bin": {"pytorch_model.bin": b"pickled"},
            "gated": FILES,
            "demo": {path.name: path.read_bytes() for path in (ASSETS_DIR / "demo").iterdir() if path.is_file()},
        }
        self.sizes: dict[str, int] = {}
        """Sizes that the hub claims, where they are not the real ones."""
        self.breaks_off = False
        """True: half of the weights is sent, once."""
        self.go_on = threading.Event()
        """Set: the rest of the weights is not held back."""
        self.go_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/o/"):
            repo = path.split("/")[4]
            files = self.server.repos.get(repo)
            if files is not None and "/revision/" in path and not path.endswith(("/main", COMMIT)):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            if files is not None and "/tree/" in path:
                tree = [{"type": "file", "path": n, "size": len(data), "oid": oid(data)} for n, data in files.items()]
                self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
                return
            if files is not None:
                siblings = [{"rfilename": n, "size": self.server.sizes.get(n, len(data))} for n, data in files.items()]
                body = {"id": f"o/{repo}", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
                return
        if path == "/api/models":
            self._send(200, b'[{"id": "o/n"}, {"id": "o/demo"}]', {"Content-Type": "application/json"})
            return
        if path.startswith("/o/gated/resolve/"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        parts = path.split("/")
        if parts[1] == "o" and parts[3:5] == ["resolve", COMMIT] and parts[5] in self.server.repos.get(parts[2], ()):
            self._send_file(parts[5], self.server.repos[parts[2]][parts[5]])
            return
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, name: str, data: bytes) -> None:
        start, end = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")
        self._send_part(name, data, int(start), min(int(end or len(data)) + 1, len(data)))

    def _send_part(self, name: str, data: bytes, start: int, end: int) -> None:
        headers = {"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            self.server.fetched.append(f"{name}+{start}" if start else name)
        if end - start < len(data):
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        if self.server.breaks_off and name.endswith(".safetensors") and self.command == "GET":
            self.server.breaks_off = False
            self._send(200, data[: len(data) // 2], headers | {"Content-Length": str(len(data))})
            self.connection.close()
            return
        self._send(206 if end - start < len(data) else 200, data[start:end], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # the reader has ended
                self.wfile.write(body[: len(body) // 2])
                if len(body) > 1 << 20:
                    self.server.go_on.wait()
                self.wfile.write(body[len(body) // 2 :])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@dataclass
class Done:
    """Output of a command, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def quire(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with the test's hub and an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def run(*arguments: str, offline: bool = False) -> Done:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        code = main(arguments)
        return Done(code, *capfd.readouterr())

    return run


def test_pull_list_and_rm(hub: Hub, quire: Any) -> None:
    pulled = quire("pull", "o/n")
    assert pulled.returncode == 0, pulled.stderr
    directory = Path(pulled.stdout.strip())
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors", "tokenizer.model"]
    assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.fetched.clear()
    offline = quire("pull", "o/n", offline=True)
    assert (offline.stdout, offline.returncode, hub.fetched) == (pulled.stdout, 0, [])
    (row,) = json.loads(quire("list", "--json").stdout)
    assert (row["model"], row["bytes"] >= 24 << 20) == ("o/n", True)
    assert "o/n" in quire("list").stdout
    assert quire("rm", "o/n").stdout.startswith("deleted o/n, ")
    assert not directory.exists()
    assert quire("list").stdout == "no models; quire pull OWNER/NAME downloads one\n"
    quire("pull", "o/demo")
    assert "missing" not in quire("list").stdout
    gone = quire("rm", "o/n")
    assert gone.returncode == 2
    assert "is not in" in gone.stderr
    unnamed = quire("rm")
    assert (unnamed.returncode, "quire rm OWNER/NAME; quire list shows them" in unnamed.stderr) == (2, True)


def test_a_download_that_broke_off_is_resumed(hub: Hub, quire: Any) -> None:
    hub.breaks_off = True
    first = quire("pull", "o/n")
    done = first if first.returncode == 0 else quire("pull", "o/n")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert any(name.startswith("model.safetensors+") for name in hub.fetched), hub.fetched


def test_an_interrupt_ends_a_download_at_once_and_the_same_command_fetches_the_rest(
    hub: Hub, quire: Any, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "quire", "pull", "o/n"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_OFFLINE"] = "0"
    hub.go_on.clear()
    begun = f"hub/*/blobs/{oid(FILES['model.safetensors'])}*.incomplete"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as pulling:
        try:
            while not any(path.stat().st_size > 1 << 20 for path in tmp_path.glob(begun)):
                assert pulling.poll() is None
                time.sleep(0.02)
            pulling.send_signal(signal.SIGINT)
            assert pulling.wait(120) == 130, "it waits for a file that the hub does not send"
        finally:
            hub.go_on.set()
    assert not list(tmp_path.glob("hub/*/blobs/*.incomplete")), "parts that nothing would delete"
    assert "weights are missing: quire pull o/n" in quire("list", "--download-dir", str(tmp_path / "hub")).stdout
    hub.fetched.clear()
    again = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert (Path(again.stdout.strip()) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.fetched == ["model.safetensors"], "whole files are fetched once"


def test_what_cannot_be_pulled(hub: Hub, quire: Any) -> None:
    for name, message in (
        ("o/bin", "holds no safetensors weights"),
        (
            "o/nn",
            "the hub has no model o/nn, or shows it only to those with a token (HF_TOKEN=hf_...); did you mean o/n?",
        ),
        ("Qwen/qwen3-0.6", "did you mean Qwen/Qwen3-0.6B?"),
        ("o/unlike-any-other", f"(HF_TOKEN=hf_...); {hub.url}/models has a search; or give the path of a downloaded"),
        ("o/gated", f"o/gated is gated: accept its terms at {hub.url}/o/gated"),
        ("../x", "takes a hub id"),
    ):
        refused = quire("pull", name)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert message in refused.stderr
    offline = quire("pull", "o/n", offline=True)
    assert "HF_HUB_OFFLINE is set, and the hub's cache does not hold it" in offline.stderr
    hub.sizes["model.safetensors"] = 1 << 60
    full = quire("pull", "o/n")
    assert full.returncode == 2
    assert "o/n needs" in full.stderr
    assert "make room (quire list, quire rm)" in full.stderr
    assert hub.fetched == []


def test_info_of_a_model_that_was_not_downloaded(hub: Hub, quire: Any, tmp_path: Path) -> None:
    shown = quire("info", "o/demo", "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    local = json.loads(quire("info", str(ASSETS_DIR / "demo"), "--json").stdout)
    for section in ("weights", "shape", "kv_cache", "sampling_defaults", "tokenizer"):
        assert report[section] == local[section]
    assert (report["model"]["name"], report["model"]["directory"]) == ("o/demo", None)
    size = sum(len(data) for data in hub.repos["demo"].values())
    assert (report["download"]["files"], report["download"]["bytes"]) == (5, size)
    assert report["problems"] == []
    assert not (tmp_path / "hub" / "models--o--demo").exists(), "a part of a model would pass for the model"
    hub.sizes["model.safetensors"] = 1 << 60
    full = quire("info", "o/demo")
    assert full.returncode == 2
    assert "problem: o/demo needs 1073741824.0 GiB more" in full.stdout
    hub.sizes.clear()
    assert quire("pull", "o/demo").returncode == 0
    held = json.loads(quire("info", "o/demo", "--json").stdout)
    assert held["model"]["directory"].endswith(COMMIT)
    assert "download" not in held


def test_what_is_fetched_is_said_before(hub: Hub, quire: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quire("pull", "o/n")
    line = f"fetching o/n: 24.0 MiB in 3 of 3 files, to {tmp_path / 'hub'} ("
    assert [message.startswith(line) for message in caplog.messages] == [True]
    assert "Ctrl-C stops it, and files that are whole are kept" in caplog.text
    caplog.clear()
    quire("pull", "o/n")
    assert caplog.messages == []
    hub.repos["n"] = FILES | {"tokenizer.json": b"{}"}
    assert quire("complete", "--model", "o/n", "x").returncode == 2
    assert "fetching o/n: 0.0 MiB in 1 of 4 files" in caplog.text


def test_a_full_disk_and_a_missing_revision(hub: Hub, quire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = quire("pull", "o/n", "--revision", "v9")
    assert f"o/n has no revision 'v9'; {hub.url}/o/n lists them" in refused.stderr

    def fill(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fill)
    full = quire("pull", "o/n")
    assert full.returncode == 2
    assert "is full; make room (quire list, quire rm), or choose another with --download-dir" in full.stderr


def test_suggested_models_are_what_their_shapes_say(quire: Any, tmp_path: Path) -> None:
    listed = quire("pull").stdout
    for model in SUGGESTED:
        hf = HFConfig(SHAPES[model.name], tmp_path / "config.json")
        with torch.device("meta"):
            weights = get_model_class(hf)(hf)
        assert sum(p.numel() for p in weights.parameters()) == model.parameters, model.name
        specs = kv_cache_specs(hf, 1, "bfloat16").values()
        assert sum(spec.page_size_bytes for spec in specs) == model.cache_bytes_per_token, model.name
        assert f"{model.name} " in listed
    assert set(SHAPES) == {model.name for model in SUGGESTED}


def _shape(architecture: str, model_type: str, *sizes: int, **others: Any) -> dict[str, Any]:
    """Returns a config: hidden size, layers, heads, heads of the cache, head size, inner size, vocabulary."""
    keys = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size",
    )  # fmt: skip
    named = {"architectures": [architecture], "model_type": model_type, "max_position_embeddings": 8192}
    return named | dict(zip(keys, sizes, strict=True)) | {"tie_word_embeddings": True} | others


SHAPES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _shape("LlamaForCausalLM", "llama", 576, 30, 9, 3, 64, 1536, 49152),
    "Qwen/Qwen3-0.6B": _shape("Qwen3ForCausalLM", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936),
    "google/gemma-3-1b-it": _shape(
        "Gemma3ForCausalLM", "gemma3_text", 1152, 26, 4, 1, 256, 6912, 262144, query_pre_attn_scalar=256
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _shape("LlamaForCausalLM", "llama", 2048, 16, 32, 8, 64, 8192, 128256),
    "HuggingFaceTB/SmolLM3-3B": _shape("SmolLM3ForCausalLM", "smollm3", 2048, 36, 16, 4, 128, 11008, 128256),
    "Qwen/Qwen3-4B-Instruct-2507": _shape("Qwen3ForCausalLM", "qwen3", 2560, 36, 32, 8, 128, 9728, 151936),
}
