"""`quire cache`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.worker.packed_cache import PackedCache, PackedFileWriter


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedCache:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    return PackedCache.default()


def put(cache: PackedCache, name: str, source: str = "/models/a") -> Path:
    writer = PackedFileWriter(cache.directory / f"{name}.packed", {"name": name}, source)
    writer.add("layer/0", memoryview(b"x" * (1 << 20)))
    writer.commit()
    return cache.directory / f"{name}.packed"


def test_an_empty_cache(cache: PackedCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    expected = f"{cache.directory.parent}: 0 files, 0.0 MiB of 64.00 GiB (QUIRE_WEIGHT_CACHE_GIB)\n"
    assert capsys.readouterr().out == expected


def test_files_are_listed_with_what_they_were_packed_from(
    cache: PackedCache, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(put(cache, "old", "/models/old"), (5, 5))
    put(cache, "new")
    (cache.directory / "broken.packed").write_bytes(b"nothing")
    os.utime(cache.directory / "broken.packed", (1, 1))
    assert main(["cache", "list"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()[1:]
    assert first.split()[:3] == ["packed/new.packed", "1.0", "MiB"]
    assert first.endswith("/models/a")
    assert second.endswith("/models/old")
    assert third.endswith("not usable: it is too short")


def test_verify_reads_every_byte(cache: PackedCache, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(cache, "a")
    assert main(["cache", "verify", "--json"]) == 0
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert (file["path"], file["state"]) == (str(path), "ok")
    with path.open("r+b") as opened:
        opened.seek(5000)
        opened.write(b"y")
    assert main(["cache"]) == 0
    assert main(["cache", "verify"]) == 1
    assert "damaged in layer/0" in capsys.readouterr().out


def test_clear_removes_every_file_and_says_how_much(cache: PackedCache, capsys: pytest.CaptureFixture[str]) -> None:
    size = put(cache, "a").stat().st_size
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"freed_bytes": size}
    assert cache.files() == []
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"freed 0.0 MiB in {cache.directory.parent}\n"


def test_packed_adapters_are_files_too(cache: PackedCache, capsys: pytest.CaptureFixture[str]) -> None:
    put(cache, "a")
    adapters = PackedCache.of_adapters()
    size = put(adapters, "b", "/adapters/b").stat().st_size
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[0] == "lora/b.packed"
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] > size
    assert adapters.files() == []


def test_an_unknown_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "empty"]) == 2
    assert "takes one of list, verify, clear" in capsys.readouterr().err
