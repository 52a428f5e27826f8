"""The directory: its bound, what goes first, and what is refused."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.kv_store import directory
from quire.kv_store.directory import ExtentFile, StoreDirectory, StoreFullError, eviction_order
from quire.kv_store.extent import ExtentWriter

from .stores import FINGERPRINT, header_of, open_store, payload_of

EXTENT_BYTES = 4096


def fill(store: StoreDirectory) -> ExtentWriter:
    writer, number = store.create_extent(FINGERPRINT), 0
    while writer.has_room(header_of(number)):
        writer.append(header_of(number), payload_of(number))
        number += 1
    return writer


def extent(name: str, used: int = 0, written: int = 0, num_bytes: int = 10) -> ExtentFile:
    return ExtentFile(name, "", 0, num_bytes, written, used)


def test_the_bound_holds_at_every_moment(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", 10 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    for _ in range(25):
        writer = fill(store)
        assert store.count_bytes() <= store.max_bytes
        writer.seal()
        assert store.count_bytes() <= store.max_bytes
    assert store.count_bytes() > 8 * EXTENT_BYTES * 0.9


def test_open_extents_count_in_full_and_are_never_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", 3 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    other = StoreDirectory.open(tmp_path / "store", store.max_bytes)  # another process
    other.extent_bytes = EXTENT_BYTES
    first, second = fill(store), store.create_extent(FINGERPRINT)
    fill(other).seal()
    fill(other).seal()  # takes the place of the former
    third = other.create_extent(FINGERPRINT)
    with pytest.raises(StoreFullError, match="in use by open extents"):
        other.create_extent(FINGERPRINT)
    names = {file.name for file in store.list_extents()}
    assert names == {first.name, second.name, third.name}
    for writer in (second, third):
        writer.seal()


def test_extents_of_a_dead_writer_are_sealed_and_empty_ones_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", 10 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    alive, dead, empty = fill(store), fill(store), store.create_extent(FINGERPRINT)
    dead.abandon()
    empty.abandon()
    for file in store.list_extents():
        store.seal_if_orphan(file)
    left = {file.name: store.is_sealed(file) for file in store.list_extents()}
    assert left == {alive.name: False, dead.name: True}


def test_one_process_at_a_time_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for it, but not for ever."""
    store = open_store(tmp_path / "store")
    other = open_store(tmp_path / "store")
    holds = store.locked()
    holds.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(directory, "LOCK_WAIT_S", 0.0)
        with pytest.raises(StoreFullError, match="another process"):
            other.create_extent(FINGERPRINT)
        patch.setattr(directory, "LOCK_WAIT_S", 60.0)
        patch.setattr(time, "sleep", lambda _: holds.__exit__(None, None, None))
        other.create_extent(FINGERPRINT).seal()


def test_a_listing_misses_nothing_that_another_has_got(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.create_extent(FINGERPRINT)
    with os.scandir(store.descriptor) as another:
        next(another)
        assert len(store.list_extents()) == 1


def test_what_was_used_outlives_what_was_not() -> None:
    files = [extent("old"), extent("used", used=5, written=1), extent("new", written=7, used=7)]
    assert [file.name for file in eviction_order(files, 100)] == ["old", "new", "used"]


def test_protection_has_a_bound() -> None:
    files = [extent(f"u{i}", used=10 + i, written=1) for i in range(4)] + [extent("n", used=50, written=50)]
    assert [file.name for file in eviction_order(files, 20)] == ["u0", "u1", "n", "u2", "u3"]
    assert [file.name for file in eviction_order(files, 0)] == ["u0", "u1", "u2", "u3", "n"]


def test_a_use_is_noted_and_a_clock_set_back_does_no_harm(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", 10 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    fill(store).seal()
    (file,) = store.list_extents()
    assert not file.is_used
    store.note_use(file, 5)  # 1970
    (used,) = store.list_extents()
    assert used.is_used
    assert used.written_ns == file.written_ns


def test_what_is_written_after_the_clock_was_set_back_stays(tmp_path: Path) -> None:
    """Extents from before it seem to be newer than those that follow, for as long as it was set back."""
    store = open_store(tmp_path / "store", 10 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    later = time.time() + 86_400.0
    for _ in range(9):
        writer = fill(store)
        writer.seal()
        os.utime(store.path / writer.name, (later, later))
    written = []
    for _ in range(8):
        writer = fill(store)
        writer.seal()
        written.append(writer.name)
    assert {file.name for file in store.list_extents()} >= set(written)


def test_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store", 10 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    fill(store).seal()
    monkeypatch.setattr(store, "_free_bytes", lambda: 1 << 30)
    with pytest.raises(StoreFullError, match="the disk is full"):
        store.create_extent(FINGERPRINT)
    assert not store.list_extents(), "everything that could make room was deleted"


def test_strangers_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", 2 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    name = "0123456789abcdef-1-{}.kvx"
    os.mkfifo(store.path / name.format(1), 0o600)
    (store.path / name.format(2)).mkdir()
    (store.path / name.format(3)).symlink_to("/etc/passwd")
    (store.path / name.format(4)).write_bytes(b"x" * 100)
    (store.path / name.format(4)).chmod(0o644)
    (store.path / "notes.txt").write_text("mine")
    assert store.list_extents() == []
    for _ in range(4):
        fill(store).seal()
    assert len(list(store.path.iterdir())) == 5 + 2 + 2  # the strangers, key and lock, two extents


@pytest.mark.parametrize(
    ("mode", "message"), [(0o755, "is open to others"), (0o770, "is open to others"), (0o500, "is not writable")]
)
def test_a_directory_that_is_not_private_is_refused(tmp_path: Path, mode: int, message: str) -> None:
    if mode == 0o500 and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(ConfigError, match=message):
        StoreDirectory.open(tmp_path / "store", 1 << 30)


def test_what_cannot_be_a_store_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made or opened: it is no directory; name another directory"):
        StoreDirectory.open(tmp_path / "file", 1 << 30)
    with pytest.raises(ConfigError, match="embedded null"):
        StoreDirectory.open(tmp_path / "a\0b", 1 << 30)
    with pytest.raises(ConfigError, match="No such file"):
        StoreDirectory.open(tmp_path / "absent", 1 << 30, is_made=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        (tmp_path / "theirs").mkdir(0o700)
        with pytest.raises(ConfigError, match=r"belongs to user .* name a directory of your own"):
            StoreDirectory.open(tmp_path / "theirs", 1 << 30)
    monkeypatch.setattr(StoreDirectory, "_free_bytes", lambda self: 1 << 30)
    with pytest.raises(ConfigError, match=r"has 1\.00 GiB for it, and 1 GiB of it stays free"):
        StoreDirectory.open(tmp_path / "new", 1 << 30)


def test_without_its_key_file_a_store_begins_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", extent_bytes=EXTENT_BYTES)
    fill(store).seal()
    (store.path / "key").unlink()
    other = open_store(tmp_path / "store")
    assert other.key != store.key
    (file,) = other.list_extents()
    assert other.load_table(file) is None
    assert other.seal_if_orphan(file), "nothing in it can be used under the new key"
    assert other.list_extents() == []
