"""The index follows the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kv_store.directory import ExtentFile, StoreDirectory
from quire.kv_store.index import PartsIndex, Place, StoreIndex

from .stores import FINGERPRINT, digest_of, header_of, open_store, payload_of


@pytest.fixture
def store(tmp_path: Path) -> StoreDirectory:
    return open_store(tmp_path / "store", extent_bytes=1 << 16)


def found(index: StoreIndex, stop: int = 10) -> list[int]:
    return [number for number in range(stop) if index.contains(digest_of(number), 0)]


def test_records_appear_as_they_are_written_and_go_with_their_extent(store: StoreDirectory) -> None:
    index = StoreIndex(store, FINGERPRINT)
    first, second = store.create_extent(FINGERPRINT), store.create_extent(FINGERPRINT)
    entries = {}
    for number in range(4):
        writer = (first, second)[number % 2]
        entries[number] = writer.append(header_of(number), payload_of(number))
        index.scan()
        assert found(index) == list(range(number + 1))
    first.append(header_of(4), payload_of(4))
    first.seal()
    index.scan()
    assert found(index) == [0, 1, 2, 3, 4]
    assert index.find(digest_of(2), 0) == Place(first.name, entries[2].offset)
    assert index.find(digest_of(2), 1) is None
    assert index.num_blocks == 5
    assert index.num_bytes == store.count_bytes()
    store.remove(first.name)
    index.scan()
    assert found(index) == [1, 3]
    second.abandon()
    index.scan()
    index.scan()
    assert found(index) == [1, 3]
    assert all(store.is_sealed(file) for file in store.list_extents())


def test_namespaces_share_a_directory_and_nothing_else(store: StoreDirectory) -> None:
    other = bytes(32)
    writer = store.create_extent(other)
    writer.append(header_of(1, fingerprint=other), payload_of(1))
    mine, theirs = StoreIndex(store, FINGERPRINT), StoreIndex(store, other)
    mine.scan()
    theirs.scan()
    assert (found(mine), found(theirs)) == ([], [1])
    writer.abandon()
    mine.scan()  # seals what others have left
    assert store.is_sealed(store.list_extents()[0])


def test_the_newest_copy_is_found_and_the_older_ones_end_takes_nothing_away(store: StoreDirectory) -> None:
    index = StoreIndex(store, FINGERPRINT)
    first = store.create_extent(FINGERPRINT)
    first.append(header_of(1), payload_of(1))
    index.scan()
    second = store.create_extent(FINGERPRINT)
    second.append(header_of(1), payload_of(1))
    index.scan()
    place = index.find(digest_of(1), 0)
    assert place is not None
    assert place.extent == second.name
    first.seal()
    store.remove(first.name)
    index.scan()
    assert index.find(digest_of(1), 0) == place
    index.forget(digest_of(1), 0)
    index.scan()
    assert found(index) == []


def test_a_use_is_written_by_the_scan_and_at_most_once_a_minute(
    store: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = StoreIndex(store, FINGERPRINT)
    writer = store.create_extent(FINGERPRINT)
    writer.append(header_of(1), payload_of(1))
    writer.seal()
    index.scan()
    noted: list[str] = []
    monkeypatch.setattr(store, "note_use", lambda file, now_ns: noted.append(file.name))
    for _ in range(3):
        index.note_use(digest_of(1), 0)
        index.note_use(digest_of(2), 0)
        index.scan()
    assert noted == [writer.name]


def test_an_extent_replaced_by_something_else_is_forgotten(store: StoreDirectory) -> None:
    index = StoreIndex(store, FINGERPRINT)
    writer = store.create_extent(FINGERPRINT)
    writer.append(header_of(1), payload_of(1))
    index.scan()
    (store.path / writer.name).unlink()
    (store.path / writer.name).mkdir()
    index.scan()
    assert found(index) == []


def test_one_listing_is_enough_for_all_parts(store: StoreDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    other = bytes(32)
    index = PartsIndex(store, [FINGERPRINT, other])
    list_extents, num_listings = store.list_extents, 0

    def count_listing() -> list[ExtentFile]:
        nonlocal num_listings
        num_listings += 1
        return list_extents()

    for fingerprint, numbers in ((FINGERPRINT, (1, 2)), (other, (2,))):
        writer = store.create_extent(fingerprint)
        for number in numbers:
            writer.append(header_of(number, fingerprint=fingerprint), payload_of(number))
    monkeypatch.setattr(store, "list_extents", count_listing)
    index.scan()
    assert num_listings == 1
    assert [number for number in range(4) if index.contains(digest_of(number), 0)] == [2], "each has a part of it"
    assert index.counts == (1, store.count_bytes())
