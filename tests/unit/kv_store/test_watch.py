"""Blocks that come to a directory and go from it are reported once, however many records there are of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.kv_store import watch
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import ExtentWriter
from quire.kv_store.record import make_header
from quire.kv_store.watch import StoreWatcher
from quire.wire.kv_peers import RecordName

OURS, OTHERS = b"o" * 32, b"x" * 32
SAME_BEGINNING = OURS[:8] + b"y" * 24


class Store:
    """A directory, and what was reported of it."""

    def __init__(self, path: Path) -> None:
        self.directory = StoreDirectory.open(path, 1 << 30)
        self.reports: list[tuple[list[RecordName], list[RecordName]]] = []
        self.watcher = StoreWatcher(self.directory, OURS, lambda added, removed: self.reports.append((added, removed)))

    def write(self, writer: ExtentWriter, *numbers: int, group: int = 0) -> None:
        for number in numbers:
            header = make_header(writer.fingerprint, bytes([number]) * 32, None, group, [number], 100)
            writer.append(header, [memoryview(bytes(100))])

    def scan(self) -> tuple[list[int], list[int]]:
        """Returns the numbers of blocks that are new, and of those that are gone."""
        self.reports.clear()
        self.watcher.scan()
        return (
            sorted(digest[0] for added, _ in self.reports for _, digest in added),
            sorted(digest[0] for _, removed in self.reports for _, digest in removed),
        )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store")
    yield store
    store.directory.close()


def test_open_and_sealed_extents_are_followed(store: Store) -> None:
    writer = store.directory.create_extent(OURS)
    store.write(writer, 1, 2)
    assert store.scan() == ([1, 2], [])
    assert store.scan() == ([], [])
    store.write(writer, 3)
    assert store.scan() == ([3], [])
    store.write(writer, 4)
    writer.seal()
    assert store.scan() == ([4], []), "what came between a scan and the table"
    assert store.scan() == ([], [])
    store.directory.remove(writer.name)
    assert store.scan() == ([], [1, 2, 3, 4])
    assert store.scan() == ([], [])


def test_a_block_is_there_as_long_as_one_of_its_records(store: Store) -> None:
    first, second = store.directory.create_extent(OURS), store.directory.create_extent(OURS)
    store.write(first, 1, 2)
    store.write(second, 2)
    store.write(second, 2, group=1)
    assert store.scan() == ([1, 2, 2], [])
    assert {name for added, _ in store.reports for name in added} == {(0, b"\1" * 32), (0, b"\2" * 32), (1, b"\2" * 32)}
    store.directory.remove(first.name)
    assert store.scan() == ([], [1])
    third = store.directory.create_extent(OURS)
    store.write(third, 2)
    store.directory.remove(second.name)
    assert store.scan() == ([], [2])
    assert store.reports == [([], [(1, b"\2" * 32)])], "the other was written again"
    for writer in (first, second, third):
        writer.abandon()


def test_other_namespaces_are_not(store: Store) -> None:
    for fingerprint in (OTHERS, SAME_BEGINNING):
        writer = store.directory.create_extent(fingerprint)
        store.write(writer, 1)
        writer.seal()
    assert store.scan() == ([], [])


def test_reports_are_short(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "NAMES_PER_REPORT", 2)
    writer = store.directory.create_extent(OURS)
    store.write(writer, 1, 2, 3, 4, 5)
    assert store.scan() == ([1, 2, 3, 4, 5], [])
    assert [len(added) for added, _ in store.reports] == [2, 2, 1]
    writer.abandon()
