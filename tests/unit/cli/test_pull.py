"""`quire pull`, `quire list` and `quire rm`, against a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from quire.cli.main import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": b"w" * (24 << 20),
    "tokenizer.model": b"t" * 100,
    "pytorch_model.bin": b"pickled",
    "modeling_x.py": b"raise SystemExit",
    "consolidated.safetensors": b"again",
}


def oid(name: str) -> str:
    """Returns the hub's name of a file's content."""
    return hashlib.sha1(FILES[name]).hexdigest()


class Hub(ThreadingHTTPServer):
    """Serves the repository o/n, the empty o/bin, and refuses all others."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.fetched: list[str] = []
        self.sizes: dict[str, int] = {}
        """Sizes that the hub claims, where they are not the real ones."""
        self.breaks_off = False
        """True: half of the weights is sent, once."""

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
            names = ["pytorch_model.bin"] if repo == "bin" else list(FILES) if repo == "n" else None
            if names is not None and "/tree/" in path:
                tree = [{"type": "file", "path": n, "size": len(FILES[n]), "oid": oid(n)} for n in names]
                self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
                return
            if names is not None:
                siblings = [{"rfilename": n, "size": self.server.sizes.get(n, len(FILES[n]))} for n in names]
                body = {"id": f"o/{repo}", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
                return
        if path.startswith(f"/o/n/resolve/{COMMIT}/") and (name := path.rsplit("/", 1)[1]) in FILES:
            self._send_file(name)
            return
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, name: str) -> None:
        data = FILES[name]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{oid(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            self.server.fetched.append(f"{name}+{start}" if start else name)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.server.breaks_off and name.endswith(".safetensors") and self.command == "GET":
            self.server.breaks_off = False
            self._send(200, data[: len(data) // 2], headers | {"Content-Length": str(len(data))})
            self.connection.close()
            return
        self._send(206 if start else 200, data[start:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

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
    gone = quire("rm", "o/n")
    assert gone.returncode == 2
    assert "is not in" in gone.stderr


def test_a_download_that_broke_off_is_resumed(hub: Hub, quire: Any) -> None:
    hub.breaks_off = True
    first = quire("pull", "o/n")
    done = first if first.returncode == 0 else quire("pull", "o/n")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert any(name.startswith("model.safetensors+") for name in hub.fetched), hub.fetched


def test_what_cannot_be_pulled(hub: Hub, quire: Any) -> None:
    for name, message in (
        ("o/bin", "holds no safetensors weights"),
        ("o/none", "could not be fetched from the hub"),
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
