"""Files of packed weights: whole or not used at all."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.worker import packed_cache
from quire.worker.packed_cache import (
    HEADER,
    InvalidPackedFileError,
    PackedCache,
    PackedFileWriter,
    max_cache_bytes,
    open_packed_file,
)

KEY = {"checkpoint": [["a.safetensors", 5, 7]], "dtype": "bfloat16"}
BLOBS = {"layer/0": b"first" * 1000, "layer/1": b"", "other/0": os.urandom(9000)}


def write(path: Path, blobs: dict[str, bytes] = BLOBS) -> Path:
    writer = PackedFileWriter(path, KEY, "/models/a")
    for name, data in blobs.items():
        writer.add(name, memoryview(data))
    writer.commit()
    writer.discard()  # may follow anything
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "packed" / "x.packed")


@given(st.dictionaries(st.text(max_size=8), st.binary(max_size=5000), max_size=6))
def test_what_was_written_is_found(tmp_path_factory: pytest.TempPathFactory, blobs: dict[str, bytes]) -> None:
    file = open_packed_file(write(tmp_path_factory.mktemp("p") / "x.packed", blobs), KEY)
    found = {name: file.memory[b.offset : b.offset + b.num_bytes] for name, b in file.blobs.items()}
    assert found == blobs
    assert all(b.offset % packed_cache.ALIGNMENT == 0 for b in file.blobs.values())
    assert (file.source, file.find_damage()) == ("/models/a", None)


def test_files_are_the_users_alone_and_nothing_else_is_left(path: Path) -> None:
    assert [file.name for file in path.parent.iterdir()] == ["x.packed"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_another_key_is_refused(path: Path) -> None:
    with pytest.raises(InvalidPackedFileError, match="made for something else"):
        open_packed_file(path, {**KEY, "dtype": "float32"})


@pytest.mark.parametrize("length", [0, 10, HEADER.size, 4096, -1])
def test_a_truncated_file_is_refused(path: Path, length: int) -> None:
    os.truncate(path, length if length >= 0 else path.stat().st_size + length)
    with pytest.raises((InvalidPackedFileError, ValueError)):
        open_packed_file(path, KEY)
    assert PackedCache(path.parent).files() == [path]


@given(st.data())
def test_no_damage_of_header_or_table_passes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write(tmp_path_factory.mktemp("p") / "x.packed")
    content = bytearray(path.read_bytes())
    table_offset = HEADER.unpack(content[: HEADER.size])[3]
    places = [*range(12), *range(16, HEADER.size), *range(table_offset, len(content))]  # 12 to 16 are not used
    content[data.draw(st.sampled_from(places))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(InvalidPackedFileError):
        open_packed_file(path, KEY)


def test_damage_of_a_layer_is_found_when_it_is_looked_for(path: Path) -> None:
    blob = open_packed_file(path).blobs["other/0"]
    with path.open("r+b") as file:
        file.seek(blob.offset + 100)
        file.write(bytes([BLOBS["other/0"][100] ^ 1]))
    assert open_packed_file(path, KEY).find_damage() == "other/0"


@pytest.mark.parametrize("blobs", [[1], {"a": [1, 2]}, {"a": [0, 5, 0]}, {"a": [4096, 10**9, 0]}, {"a": [4096, -5, 0]}])
def test_tables_that_make_no_sense(tmp_path: Path, blobs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    real = json.dumps
    monkeypatch.setattr(packed_cache.json, "dumps", lambda table, **k: real({**table, "blobs": blobs}, **k))
    path = write(tmp_path / "x.packed")
    monkeypatch.undo()
    with pytest.raises(InvalidPackedFileError, match=r"not one|outside"):
        open_packed_file(path)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((0o600, 0, 0, 1, 4321, 0, 10, 0, 0, 0)))
    with pytest.raises(InvalidPackedFileError, match="another user"):
        open_packed_file(path)


# -- the directory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed")


def put(cache: PackedCache, name: str, used_at: float, size: int = 1000) -> Path:
    path = write(cache.directory / f"{name}.packed", {"a": b"x" * size})
    os.utime(path, (used_at, used_at))
    return path


def test_a_key_has_one_place_and_finds_its_file(cache: PackedCache) -> None:
    assert cache.open(KEY) is None
    path = write(cache.path_of(dict(reversed(KEY.items()))))
    os.utime(path, (5, 5))
    file = cache.open(KEY)
    assert file is not None
    assert file.path == path
    assert path.stat().st_mtime > 5, "it was used just now"
    path.unlink()
    assert file.memory[:8] == packed_cache.MAGIC, "deleting a file takes nothing from those who use it"


def test_what_another_version_packed_is_replaced(cache: PackedCache) -> None:
    write(cache.path_of({**KEY, "code": [1]}))
    assert cache.path_of({**KEY, "code": [2]}) == cache.path_of(KEY) != cache.path_of({**KEY, "dtype": "float32"})
    assert cache.open({**KEY, "code": [2]}) is None


def test_what_cannot_be_used_is_no_error(cache: PackedCache) -> None:
    path = cache.path_of(KEY)
    path.parent.mkdir()
    path.write_bytes(b"")
    assert cache.open(KEY) is None
    path.unlink()
    path.mkdir()
    assert cache.open(KEY) is None


def test_trimming_deletes_what_was_not_used_for_longest(cache: PackedCache) -> None:
    old, new, middle = (put(cache, name, at) for name, at in (("old", 10), ("new", 30), ("middle", 20)))
    assert cache.files() == [new, middle, old]
    cache.trim(2 * new.stat().st_size)
    assert cache.files() == [new, middle]
    cache.trim(0)
    assert cache.files() == []


def test_what_dead_writers_left_goes_after_a_day(cache: PackedCache) -> None:
    put(cache, "a", 10)
    left, current = cache.directory / "b.packed.1-2.part", cache.directory / "c.packed.3-4.part"
    for path in (left, current):
        path.write_bytes(b"")
    os.utime(left, (5, 5))
    cache.trim(1 << 30)
    assert not left.exists()
    assert current.exists()
    assert cache.clear() > 0
    assert list(cache.directory.iterdir()) == []
    assert PackedCache(cache.directory / "missing").clear() == 0


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"QUIRE_CACHE_ROOT": "/r", "XDG_CACHE_HOME": "/x"}, "/r/packed"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/quire/packed"),
        ({}, "/home/me/.cache/quire/packed"),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("QUIRE_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "HOME": "/home/me"}.items():
        monkeypatch.setenv(name, value)
    assert str(PackedCache.default().directory) == expected


def test_how_much_it_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_WEIGHT_CACHE_GIB", "0.5")
    assert max_cache_bytes() == 1 << 29


def test_a_writer_that_fails_leaves_nothing(cache: PackedCache, make_full: Callable[[], None]) -> None:
    writer = PackedFileWriter(cache.path_of(KEY), KEY, "")
    make_full()
    with pytest.raises(OSError, match="No space left"):
        writer.commit()
    writer.discard()
    assert list(cache.directory.iterdir()) == []


@pytest.fixture
def make_full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", fsync)
