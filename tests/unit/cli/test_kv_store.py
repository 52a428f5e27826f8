"""`quire kv-store`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from quire.cli import kv_store as kv_store_module
from quire.cli.main import main
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.peer import client as client_module
from quire.kv_store.peer.client import PeerClient
from quire.kv_store.record import make_header
from quire.testing.failpoints import injected


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with a sealed extent of two records and an open one of one."""
    store = StoreDirectory.open(tmp_path / "store", 1 << 30)
    for num_records in (2, 1):
        writer = store.create_extent(b"\xab" * 32)
        for number in range(num_records):
            header = make_header(b"\xab" * 32, bytes([number] * 32), None, 0, [1, 2], 1000)
            writer.append(header, [memoryview(bytes(1000))])
        if num_records == 2:
            writer.seal()
    return tmp_path / "store"


def test_list(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "list", str(directory)]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == f"{directory}: 2 extents, 3 blocks, 0.0 MiB"
    assert sorted(row.split()[-1] for row in rows) == ["open", "sealed"]
    assert all(row.split()[0].startswith("abababababababab-") for row in rows)


def test_verify_finds_damage(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "verify", str(directory), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    sealed = next(row for row in figures["extents"] if row["state"] == "sealed")
    with (directory / sealed["name"]).open("r+b") as file:
        file.seek(1000)
        file.write(b"x")
    assert main(["kv-store", "list", str(directory)]) == 0
    assert main(["kv-store", "verify", str(directory)]) == 1
    assert "1 damaged" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "num_left"), [(500, 0), (1500, 1)])
def test_verify_counts_what_a_copy_has_lost(
    size: int, num_left: int, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sealed extent of two records ends within one of them."""
    sealed = max(directory.glob("*.kvx"), key=lambda path: path.stat().st_size)
    os.truncate(sealed, size)
    assert main(["kv-store", "list", str(directory)]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if sealed.name in line)
    assert row.endswith(" unsealed")
    assert f" {num_left} blocks" in row
    assert main(["kv-store", "verify", str(directory)]) == 1
    assert "unsealed  1 damaged" in capsys.readouterr().out


def test_clear_deletes_the_records_and_keeps_the_key(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = (directory / "key").read_bytes()
    (directory / "mine.txt").write_text("mine")
    assert main(["kv-store", "clear", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] > 3000
    assert {path.name for path in directory.iterdir()} == {"key", "lock", "mine.txt"}
    assert (directory / "key").read_bytes() == key


def test_a_disk_that_fails_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(name: str, key: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with injected("kv.evict", fail):
        assert main(["kv-store", "clear", str(directory)]) == 2
    assert f"quire kv-store clear: {directory}: Read-only file system" in capsys.readouterr().err


def test_serve_answers_until_it_is_told_to_end(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 60.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sockets, answers = tempfile.mkdtemp(), list[list[bool]]()
    address = f"ipc://{sockets}/s"  # the path of `directory` may be too long for one

    def ask() -> None:
        client = PeerClient((directory / "key").read_bytes(), "D")
        with client.connect(address, b"\xab" * 32) as peer:
            answers.append(peer.have([(0, bytes([number] * 32)) for number in range(3)]))
        client.close()
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert main(["kv-store", "serve", str(directory), "--listen", address]) == 0
    finally:
        thread.join()
        shutil.rmtree(sockets)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert capsys.readouterr().out == f"serving {directory} at {address}\n"
    assert answers == [[True, True, False]]


def test_a_server_that_takes_blocks_makes_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[int, int, int]]()

    def serve(store: StoreDirectory, address: str, max_write_bytes_per_s: int) -> None:
        made.append((store.max_bytes, store.path.stat().st_mode & 0o777, max_write_bytes_per_s))

    monkeypatch.setattr(kv_store_module, "_serve", serve)
    words = ["kv-store", "serve", str(tmp_path / "new"), "--allow-writes", "--size", "1G"]
    assert main([*words, "--max-write-bytes-per-s", "5m"]) == 0
    assert made == [(1 << 30, 0o700, 5_000_000)]
    assert (tmp_path / "new" / "key").stat().st_size == 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "takes one of list, verify, clear, serve and a directory"),
        (["list"], "takes one of"),
        (["drop", "DIR"], "takes one of"),
        (["list", "DIR"], "cannot be made or opened: No such file"),
        (["serve", "DIR"], "cannot be made or opened: No such file"),
        (["list", "DIR", "--allow-writes"], "--allow-writes is an option of serve, not of list; leave it out"),
        (["serve", "DIR", "--allow-writes", "--size", "1M"], "--size 1048576 is less than 268435456 (256 MiB)"),
        (["serve", "DIR", "--max-write-bytes-per-s", "0"], "is less than 1; leave out --allow-writes to take none"),
    ],
)
def test_what_is_no_store_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["kv-store", *(str(tmp_path / word) if word == "DIR" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
