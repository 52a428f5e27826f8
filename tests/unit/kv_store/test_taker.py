"""Records that clients put: what is stored is what a reader may use, within all bounds."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from quire.kv_store.access import StoreWriter
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import find_damage
from quire.kv_store.index import StoreIndex
from quire.kv_store.peer import taker as taker_module
from quire.kv_store.peer.taker import RecordTaker
from quire.kv_store.record import TAG_BYTES, RecordMac
from quire.kv_store.write_limits import SAVED_S
from quire.testing.failpoints import injected
from quire.wire.kv_peers import RecordName

from .stores import FINGERPRINT, digest_of, header_of, open_store, payload_of

OTHER = bytes(32)


class Taker:
    """A taker and its directory; `put` returns the outcome."""

    def __init__(self, directory: StoreDirectory, max_bytes_per_s: int = 1 << 30) -> None:
        self.directory = directory
        self.taker = RecordTaker(directory, max_bytes_per_s)
        self.outcomes: queue.Queue[str] = queue.Queue()
        self.present: set[RecordName] = set()

    def frames(self, number: int, key: bytes | None = None, fingerprint: bytes = FINGERPRINT) -> list[bytes]:
        head = header_of(number, fingerprint=fingerprint).encode()
        payload = payload_of(number)
        mac = RecordMac(self.directory.key if key is None else key)
        return [head + mac.tag(head, payload), *map(bytes, payload)]

    def begin(self, frames: Sequence[bytes], fingerprint: bytes = FINGERPRINT) -> None:
        self.taker.put(fingerprint, frames, self.present.__contains__, self.outcomes.put)

    def put(self, frames: Sequence[bytes], fingerprint: bytes = FINGERPRINT) -> str:
        self.begin(frames, fingerprint)
        return self.outcomes.get(timeout=60)

    def find(self, number: int, fingerprint: bytes = FINGERPRINT) -> bool:
        index = StoreIndex(self.directory, fingerprint)
        index.scan()
        return index.contains(digest_of(number), 0)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    store = open_store(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def taker(directory: StoreDirectory) -> Iterator[Taker]:
    taker = Taker(directory)
    yield taker
    taker.taker.close()


def test_what_is_stored_can_be_found_and_is_stored_once(taker: Taker) -> None:
    assert [taker.put(taker.frames(number)) for number in (0, 1, 1)] == ["stored", "stored", "present"]
    assert [taker.find(number) for number in range(3)] == [True, True, False]
    taker.present.add((0, digest_of(2)))
    assert taker.put(taker.frames(2)) == "present", "the index has it"
    taker.taker.close()
    (extent,) = taker.directory.list_extents()
    table = taker.directory.load_table(extent)
    assert table is not None, "it is sealed at the end"
    with (taker.directory.path / extent.name).open("rb") as file:
        mac = RecordMac(taker.directory.key)
        assert [find_damage(file.fileno(), entry, mac) for entry in table.entries] == [None, None]


def test_only_a_record_is_stored_and_no_length_is_trusted(taker: Taker) -> None:
    good, cases = taker.frames(1), list[tuple[list[bytes], str]]()
    flipped = [good[0], good[1], bytes([good[2][0] ^ 1]) + good[2][1:]]
    head, tag = good[0][:-TAG_BYTES], good[0][-TAG_BYTES:]
    cases += [(flipped, "mac"), (taker.frames(1, key=b"x" * 32), "mac"), (good[:2], "format"), (good[:1], "format")]
    cases += [([*good, b"more"], "format"), ([good[0] + b"x", *good[1:]], "format"), ([b"", *good[1:]], "truncated")]
    cases += [([head, tag, *good[1:]], "format"), ([b"\0" + good[0][1:], *good[1:]], "format")]
    huge = head[:28] + (1 << 60).to_bytes(8, "little") + head[36:] + tag
    cases += [([huge, *good[1:]], "format"), (taker.frames(1, fingerprint=OTHER), "key")]
    assert [taker.put(frames) for frames, _ in cases] == [reason for _, reason in cases]
    assert not taker.directory.list_extents()
    assert taker.put(good) == "stored"


def test_a_rate_a_full_disk_and_memory_are_bounds(
    directory: StoreDirectory, taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Taker(directory, max_bytes_per_s=1)
    assert [slow.put(slow.frames(number)) for number in range(2)] == ["stored", "rate"]
    slow.taker.close()

    def fail(name: str, key: str) -> None:
        raise OSError(errno.ENOSPC, "injected")

    with injected("kv.write", fail):
        assert taker.put(taker.frames(2)) == "full"
    assert taker.put(taker.frames(2)) == "full", "it rests"
    monkeypatch.setattr(taker_module, "MAX_WAITING_BYTES", 100)
    assert taker.put(taker.frames(3)) == "rate"
    assert taker.taker._num_waiting_bytes == 0


def test_each_namespace_has_an_extent_up_to_a_number(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taker_module, "MAX_WRITERS", 2)
    for number in range(6):
        name = bytes([number % 3]) * 32
        assert taker.put(taker.frames(number, fingerprint=name), name) == "stored"
    assert taker.find(5, bytes([2]) * 32)
    extents = taker.directory.list_extents()
    assert len(extents) == 6
    assert sum(taker.directory.is_sealed(extent) for extent in extents) == 4


def test_a_namespace_is_dropped_and_no_other(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents that others write are deleted, too; what is put after it is stored."""
    other = StoreWriter(taker.directory)
    assert other.append(header_of(7), payload_of(7)) == ""
    assert taker.put(taker.frames(1)) == "stored"
    assert taker.put(taker.frames(2, fingerprint=OTHER), OTHER) == "stored"
    scans: list[int] = []

    def drop() -> str:
        taker.taker.drop(FINGERPRINT, lambda: scans.append(1), taker.outcomes.put)
        return taker.outcomes.get(timeout=60)

    with monkeypatch.context() as patch:
        patch.setattr(taker.directory, "list_extents", lambda: 1 / 0)
        assert drop() == "error"
    assert taker.find(1), "it is sealed and there"
    assert drop() == "dropped"
    assert scans == [1]
    assert [taker.find(1), taker.find(7), taker.find(2, OTHER)] == [False, False, True]
    assert other.append(header_of(8), payload_of(8)) == ""
    assert taker.put(taker.frames(1)) == "stored"
    assert [taker.find(number) for number in (1, 7, 8)] == [True, False, True], "their writer has begun another"
    other.seal()


def test_records_of_others_are_stored_while_a_namespace_is_dropped(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that are put into that namespace wait for the end: until then the index finds what will be gone."""
    monkeypatch.setattr(taker_module, "SLICE_EXTENTS", 1)
    index = StoreIndex(taker.directory, FINGERPRINT)
    for number in range(3):
        writer = StoreWriter(taker.directory)
        assert writer.append(header_of(number), payload_of(number)) == ""
        writer.seal()
    index.scan()
    ends: queue.Queue[str] = queue.Queue()

    def put(number: int, fingerprint: bytes, name: str) -> None:
        def is_there(key: RecordName) -> bool:
            return fingerprint == FINGERPRINT and index.contains(key[1], key[0])

        frames = taker.frames(number, fingerprint=fingerprint)
        taker.taker.put(fingerprint, frames, is_there, lambda end: ends.put(f"{name} {end}"))

    def on_evict(name: str, key: str) -> None:
        if begun:
            return
        begun.append(name)
        put(1, OTHER, "other")
        put(2, FINGERPRINT, "own")
        taker.taker.drop(FINGERPRINT, index.scan, lambda end: ends.put(f"again {end}"))

    begun: list[str] = []
    with injected("kv.evict", on_evict):
        taker.taker.drop(FINGERPRINT, index.scan, lambda end: ends.put(f"first {end}"))
        outcomes = [ends.get(timeout=120) for _ in range(4)]
    assert outcomes == ["other stored", "first dropped", "own stored", "again dropped"]
    assert [taker.find(number) for number in range(3)] == [False] * 3
    assert taker.find(1, OTHER)
    assert taker.taker._num_waiting_bytes == 0


def test_what_was_written_long_ago_is_left_to_the_index(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("quire.kv_store.peer.taker.time.monotonic", lambda: now[0])
    assert taker.put(taker.frames(1)) == "stored"
    now[0] += SAVED_S + 1
    assert taker.put(taker.frames(2)) == "stored"
    assert list(taker.taker._written) == [(FINGERPRINT, (0, digest_of(2)))]
    taker.taker._writers[FINGERPRINT].seconds_to_seal = lambda: 0.0  # type: ignore[method-assign]  # it has become old
    assert taker.put(taker.frames(3)) == "stored"
    while not all(map(taker.directory.is_sealed, taker.directory.list_extents())):
        pass


def test_an_error_costs_a_record_and_a_hung_disk_the_end(
    directory: StoreDirectory, taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("quire.kv_store.peer.taker.decode_header", lambda data: 1 / 0)
        assert taker.put(taker.frames(1)) == "error"
    hung, is_hung, goes_on = Taker(directory), threading.Event(), threading.Event()

    def hang(name: str, key: str) -> None:
        is_hung.set()
        goes_on.wait()

    monkeypatch.setattr(taker_module, "END_S", 0.01)
    with injected("kv.write", hang):
        hung.begin(hung.frames(1))
        is_hung.wait()
        hung.begin(hung.frames(2))
        hung.taker.close()
    goes_on.set()
    assert hung.outcomes.get(timeout=60) == "stored"
    hung.taker._thread.join()
    assert hung.outcomes.empty(), "what waits at the end is not written"
