"""Blocks that come to a directory and go from it are reported once, however many records there are of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.kv_store import watch
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import ExtentWriter
from quire.kv_store.record import make_header
from quire.kv_store.watch import ChangeLog, StoreWatcher
from quire.wire.kv_peers import NO_CURSOR, Cursor, RecordName

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


# -- what clients read ---------------------------------------------------------------------------------------------


class Reader:
    """A client of a log."""

    def __init__(self, log: ChangeLog) -> None:
        self.log, self.cursor, self.known, self.num_starts = log, NO_CURSOR, set[RecordName](), 0

    cursor: Cursor

    def read(self) -> bool:
        changes = self.log.read(self.cursor)
        if changes.is_new:
            self.known.clear()
            self.num_starts += 1
        assert not set(changes.added) & set(changes.removed)
        self.known |= set(changes.added)
        self.known -= set(changes.removed)
        self.cursor = changes.cursor
        return changes.has_more

    def read_all(self) -> set[RecordName]:
        while self.read():
            pass
        return self.known


def names(*numbers: int) -> list[RecordName]:
    return [(0, bytes([number]) * 32) for number in numbers]


def test_a_client_reads_on_and_begins_anew_if_it_was_away_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_CHANGES", 2)
    monkeypatch.setattr(watch, "MAX_REMOVED", 3)
    log = ChangeLog()
    reader, late = Reader(log), Reader(log)
    assert reader.read_all() == set()
    log.add(names(1, 2, 3, 4, 5), [])
    assert late.read(), "there is more"
    assert late.known == set(names(1, 2))
    log.add(names(6), names(1, 4))
    log.add(names(1), names(2))
    assert late.read_all() == set(names(1, 3, 5, 6))
    assert reader.read_all() == set(names(1, 3, 5, 6))
    assert (late.num_starts, reader.num_starts) == (1, 1)
    log.add([], names(1, 3))
    assert reader.read_all() == set(names(5, 6))
    log.add([], names(5, 6))
    assert late.read_all() == set()
    assert (late.num_starts, reader.num_starts) == (2, 1), "one removal that it has not seen is forgotten"
    assert len(log._added) <= watch.MAX_CHANGES + 1
    stranger = ChangeLog()
    reader.log = stranger
    assert reader.read_all() == set()
    assert reader.num_starts == 2, "another start of the server"


def test_a_client_that_reads_at_any_time_knows_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_CHANGES", 3)
    monkeypatch.setattr(watch, "MAX_REMOVED", 20)
    rng = random.Random(5)
    log, there = ChangeLog(), set[RecordName]()
    readers = [Reader(log) for _ in range(3)]
    for _ in range(400):
        added = [name for name in names(*rng.sample(range(12), 2)) if name not in there]
        removed = [name for name in names(*rng.sample(range(12), 2)) if name in there]
        log.add(added, removed)
        there = (there - set(removed)) | set(added)
        rng.choice(readers).read()
        if rng.random() < 0.3:
            assert rng.choice(readers).read_all() == there
    assert sum(reader.num_starts for reader in readers) >= 3
