"""Blocks that are put to a block server: they are the ones, each is counted once, and a server costs a bound.

A worker half and a server in one process, over a socket; faults of servers are those of a client that stands for one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.kv_store import rests
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.index import StoreIndex
from quire.kv_store.peer import client
from quire.kv_store.peer.client import MAX_IDLE, PeerError, Record
from quire.kv_store.peer.server import BlockServer, DirectorySource
from quire.kv_store.record import RecordHeader, RecordMac
from quire.wire.kv_peers import RecordName
from quire.wire.kv_transfer import (
    BlockKey,
    KVConnectorMetadata,
    KVConnectorOutput,
    LoadOrder,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)
from quire.worker.kv_transfer import remote_saves
from quire.worker.kv_transfer.peer_worker import PeerWorker
from quire.worker.kv_transfer.remote_saves import Batch, RemoteSave, RemoteSaver
from quire.worker.kv_transfer.store_and_peers import StoreAndPeersWorker
from quire.worker.kv_transfer.worker import KVConnectorWorker

from ..kv_store.stores import FINGERPRINT, digest_of, header_of, open_store, payload_of
from .test_store_worker import FULL, make_keys, make_memory


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on how quickly a server answers."""
    monkeypatch.setattr(client, "SILENCE_S", 60.0)
    monkeypatch.setattr(client, "CONNECT_S", 60.0)
    monkeypatch.setattr(remote_saves, "LATE_S", 3600.0)


# -- a worker and a server -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(path: Path, max_write_bytes_per_s: int = 1 << 30) -> Iterator[tuple[StoreDirectory, BlockServer]]:
    """A server of a directory that takes records."""
    store = StoreDirectory.open(path, 1 << 30)
    server = BlockServer(DirectorySource(store, max_write_bytes_per_s), store.key, "tcp://127.0.0.1:0")
    yield store, server
    server.close()
    store.close()


class Engine:
    """Stands for an engine: gives orders, and waits for reports."""

    def __init__(self, make: Callable[..., KVConnectorWorker], *args: Any, **flags: Any) -> None:
        self.memory = make_memory([FULL])
        self.worker = make(EngineArgs("demo", **flags).create_engine_config(), *args)
        self.reports: queue.Queue[KVConnectorOutput] = queue.Queue()
        self.worker.report = self.reports.put
        self.worker.register_kv_caches(self.memory)
        self.counts = Counter[str]()

    def wait(self, name: str) -> Any:
        """Returns the next message of this name, of the part `peers` or of all. Counts what is reported meanwhile."""
        while True:
            report = self.reports.get(timeout=60)
            info = report.info or {}
            info = info.get("info", info)
            if "puts" in info:
                self.counts.update(info["puts"]["outcomes"], begun=info["puts"]["begun"])
                self.counts["waiting"] = info["puts"]["waiting"]
            if name == "save" and report.saves:
                return report.saves[0]
            if name in info:
                return info[name]

    def save(self, keys: list[BlockKey], block_ids: list[int], save_id: int = 1) -> SaveResult:
        blocks = SavedBlocks.of(SavedBlock(0, block_id, key) for key, block_id in zip(keys, block_ids, strict=True))
        self.worker.start(KVConnectorMetadata(saves=[SaveOrder(save_id, blocks)]))
        result = self.wait("save")
        assert isinstance(result, SaveResult)
        return result

    def until_counted(self, number: int) -> None:
        while sum(self.counts.values()) - self.counts["begun"] - self.counts["waiting"] < number:
            self.wait("puts")
        assert self.counts["begun"] == number + self.counts["waiting"]


def test_blocks_of_an_engine_without_a_directory_are_stored_and_read_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(5)
    with serving(tmp_path / "served") as (store, server):
        monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
        engine, other = (Engine(PeerWorker, kv_store_remote=server.address) for _ in range(2))
        assert [one.wait("store_state") for one in (engine, other)] == ["open", "open"]
        result = engine.save(keys, [1, 2, 3, 4, 5])
        assert (result.outcome, result.num_saved, result.num_present, result.reason) == ("ok", 5, 0, "")
        assert result.num_bytes > 0
        result = engine.save([*keys, *make_keys(1, first=50)], [1, 2, 3, 4, 5, 6], 2)
        assert (result.num_saved, result.num_present) == (6, 5)
        engine.until_counted(11)
        assert (engine.counts["stored"], engine.counts["present"]) == (6, 5)
        index = StoreIndex(store, engine.worker.namespace.fingerprint)  # type: ignore[attr-defined]
        index.scan()
        assert all(index.contains(key.digest, 0) for key in keys)
        load = {"peers": [(server.address, "")]}
        while True:  # the server finds them within a second
            order = LoadOrder(9, "remote", 0, keys, [[11, 12, 13, 14, 15]], load)
            other.worker.start(KVConnectorMetadata(loads=[order]))
            while not (report := other.reports.get(timeout=60)).loads:
                pass
            if report.loads[0].outcome == "ok":
                break
        for cache in engine.memory.caches:
            mine, theirs = engine.memory.caches[cache].key, other.memory.caches[cache].key
            assert all((mine[1 + i] == theirs[11 + i]).all() for i in range(5))
        for one in (engine, other):
            one.worker.close()


def test_what_an_engine_has_written_to_its_directory_is_put_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that salts stay sealed, and that only saves of the directory are copied."""
    keys = make_keys(4, (("cache_salt", "secret"),))
    with serving(tmp_path / "served") as (store, server):
        monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
        flags = {"kv_store": str(tmp_path / "own"), "kv_store_size": 1 << 30, "kv_store_remote": server.address}
        engine = Engine(StoreAndPeersWorker, **flags)
        assert engine.wait("store_state") == "open"
        assert engine.save(keys, [1, 2, 3, 4]).num_saved == 4
        engine.until_counted(4)
        assert engine.counts["stored"] == 4
        engine.worker.close()
        own = StoreDirectory.open(tmp_path / "own", 1 << 30)
        (mine,), (theirs,) = own.list_extents(), store.list_extents()
        data = [(directory.path / extent.name).read_bytes() for directory, extent in ((own, mine), (store, theirs))]
        assert data[1] == data[0][: len(data[1])], "the record, byte by byte; that of the server is open"
        assert b"secret" not in data[1]
        own.close()


@pytest.mark.parametrize("has_own", [False, True])
def test_records_are_dropped_at_a_server_that_takes_them(
    has_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(3)
    with serving(tmp_path / "served") as (store, server):
        monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
        own: dict[str, Any] = {"kv_store": str(tmp_path / "own"), "kv_store_size": 1 << 30} if has_own else {}
        make: Any = StoreAndPeersWorker if has_own else PeerWorker
        engine = Engine(make, kv_store_remote=server.address, **own)
        assert engine.wait("store_state") == "open"
        assert engine.save(keys, [1, 2, 3]).num_saved == 3
        engine.until_counted(3)
        order: dict[str, Any] = {"peers": {"drop": 5}, "store": {"drop": 5}} if has_own else {"drop": 5}
        engine.worker.start(KVConnectorMetadata(params=order))
        outcomes: dict[str, str] = {}
        for _ in range(1 + has_own):
            number, at = engine.wait("dropped")
            assert number == 5
            outcomes.update(at)
        assert outcomes == dict.fromkeys([server.address, *own.values()][: 1 + has_own], "dropped")
        assert store.list_extents() == []
        assert engine.save(keys, [1, 2, 3], 2).num_saved == 3
        engine.until_counted(6)
        assert engine.counts["stored"] == 6, "they are there anew"
        engine.worker.close()


def test_what_a_server_holds_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(2)
    with serving(tmp_path / "served") as (store, server):
        monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        extra = {"tiers": [server.address], "publish_store": True, "listen": "tcp://127.0.0.1:0"}
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        engine = Engine(PeerWorker, kv_transfer_config=transfer)
        assert engine.wait("store_state") == "open"
        assert engine.save(keys, [1, 2]).num_saved == 2
        seen: list[RecordName] = []
        while len(seen) < 2:  # scans find them in two reports, too
            added, removed, is_new = engine.wait("watched")
            assert (removed, is_new) == ([], False)
            seen += added
        assert sorted(seen) == sorted((0, key.digest) for key in keys)
        first = engine.worker._watcher  # type: ignore[attr-defined]
        engine.worker.watch(bytes(32), 1)  # type: ignore[attr-defined]  # other weights
        assert not first._thread.is_alive()
        engine.worker.close()
        assert store.list_extents()


def test_a_server_that_only_reads_is_given_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "served", 0) as (store, server):
        monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
        engine = Engine(PeerWorker, kv_store_remote=server.address)
        assert engine.wait("store_state") == "closed"
        result = engine.save(make_keys(2), [1, 2])
        assert (result.outcome, result.reason) == ("failed", "error")
        engine.until_counted(2)
        assert engine.counts["refused"] == 2
        assert not store.list_extents()
        engine.worker.close()


def test_a_save_that_nobody_takes_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    extra = {"path": str(tmp_path / "key"), "listen": "tcp://127.0.0.1:0"}
    transfer = {"kv_connector": "PeerConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine = Engine(PeerWorker, kv_transfer_config=transfer)
    result = engine.save(make_keys(1), [1])
    assert (result.outcome, result.reason) == ("failed", "error")
    engine.worker.close()


# -- servers with faults -------------------------------------------------------------------------------------------


class Server:
    """Stands for a server, and for the connections to it."""

    takes_records = True

    def __init__(self) -> None:
        self.connect: Callable[[], None] = lambda: None
        self.is_cancelled: Callable[[], bool] = lambda: False
        self.take: Callable[[int], str] = lambda number: "stored"
        self.present: set[bytes] = set()
        self.taken: list[bytes] = []
        self.num_connected = 0

    def have(self, keys: Sequence[RecordName]) -> list[bool]:
        return [digest in self.present for _, digest in keys]

    def put(self, records: Iterable[tuple[int, Record]]) -> Iterator[tuple[int, str]]:
        for number, (head, _) in records:
            outcome = self.take(number)
            if self.is_cancelled():
                raise PeerError("cancelled", "cancelled")
            if outcome == "stored":
                self.taken.append(bytes(head))
            yield number, outcome


class Client:
    """Stands for a `PeerClient`."""

    def __init__(self, server: Server) -> None:
        self.server = server

    @contextlib.contextmanager
    def connect(self, address: str, fingerprint: bytes, **options: Any) -> Iterator[Server]:
        self.server.num_connected += 1
        self.server.is_cancelled = options["is_cancelled"]
        self.server.connect()
        yield self.server


class Records(Batch):
    """Some records, and their outcomes."""

    def __init__(self, *numbers: int) -> None:
        self.headers = [header_of(number) for number in numbers]
        self.outcomes: queue.Queue[list[str]] = queue.Queue()
        self.came_at = time.monotonic()

    def read(self, index: int) -> Record | None:
        head = self.headers[index].encode()
        return head + bytes(32), memoryview(b"payload")

    def end(self, outcomes: Sequence[str]) -> None:
        self.outcomes.put(list(outcomes))


class Saver:
    """A saver, and what it reports."""

    def __init__(self, directory: StoreDirectory | None = None) -> None:
        self.server, self.states = Server(), queue.Queue[str]()
        peers: Any = Client(self.server)
        self.counts: list[dict[str, Any]] = []
        self.saver = RemoteSaver(peers, "server", directory, self.states.put, self.counts.append)

    def begin(self) -> str:
        self.saver.begin(FINGERPRINT)
        return self.states.get(timeout=60)

    def start(self, *numbers: int) -> Records:
        batch: Any = Records(*numbers)
        self.saver.put(batch)
        records: Records = batch
        return records

    def put(self, *numbers: int) -> list[str]:
        return self.start(*numbers).outcomes.get(timeout=60)

    def total(self, num_begun: int) -> Counter[str]:
        """Returns the outcomes when so many records have begun and ended."""
        while sum(one["begun"] for one in self.counts) < num_begun or self.counts[-1]["waiting"]:
            time.sleep(0.001)
        total = sum((Counter(one["outcomes"]) for one in self.counts), Counter[str]())
        assert total.total() == num_begun
        return total


@pytest.fixture
def saver() -> Iterator[Saver]:
    saver = Saver()
    yield saver
    assert saver.saver.stop(time.monotonic() + 60)


def fail(reason: str) -> Callable[[], None]:
    def connect() -> None:
        raise PeerError(reason, "a fault")

    return connect


def no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests, "REST_S", 0.001)
    monkeypatch.setattr(rests, "MAX_REST_S", 0.001)


@pytest.mark.parametrize(("outcome", "counted"), [("full", "full"), ("rate", "rate"), ("mac", "error"), ("?", "error")])
def test_after_a_record_that_is_not_taken_the_rest_is_dropped(saver: Saver, outcome: str, counted: str) -> None:
    assert saver.begin() == "open"
    saver.server.present = {digest_of(0), digest_of(4)}
    saver.server.take = lambda number: outcome if number == 2 else "stored"
    assert saver.put(0, 1, 2, 3, 4, 5) == ["present", "stored", counted, counted, "present", counted]
    assert saver.total(6) == {"present": 2, "stored": 1, counted: 3}


@pytest.mark.parametrize("reason", ["unreachable", "silent", "refused", "format"])
def test_a_server_with_a_fault_rests_and_is_tried_without_a_record(
    saver: Saver, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(rests, "REST_S", 3600.0)
    monkeypatch.setattr(rests, "MAX_REST_S", 3600.0)
    assert saver.begin() == "open"

    def die(number: int) -> str:
        if number == 1:
            raise PeerError(reason, "a fault")
        return "stored"

    saver.server.take = die
    assert saver.put(0, 1, 2) == ["stored", "away", "away"]
    assert saver.states.get(timeout=60) == "away"
    num_connected = saver.server.num_connected
    assert saver.put(3, 4) == ["away", "away"]
    assert saver.server.num_connected == num_connected
    no_rests(monkeypatch)
    saver.saver._rests.note_good("server")  # that rest is a long one
    saver.server.connect = fail("unreachable")
    saver.saver.begin(FINGERPRINT)  # other weights: it is asked at once
    while saver.server.num_connected < num_connected + 3:
        time.sleep(0.001)
    assert saver.states.get(timeout=60) == "away"
    saver.server.connect = lambda: None
    assert saver.states.get(timeout=60) == "open"
    assert saver.put(5) == ["stored"]


def test_connections_from_before_a_restart_are_dropped(saver: Saver) -> None:
    assert saver.begin() == "open"
    stale = [0]

    def connect() -> None:
        stale[0] += 1
        if stale[0] <= MAX_IDLE:
            raise PeerError("stale", "it was started again")

    saver.server.connect = connect
    assert saver.put(1) == ["stored"]
    stale[0] = 0
    saver.saver.begin(FINGERPRINT)
    assert saver.states.get(timeout=60) == "open"
    stale[0] = -1 << 30
    saver.server.connect = fail("stale")
    assert saver.put(2) == ["away"]
    assert saver.states.get(timeout=60) == "away"


def test_records_at_which_a_server_fails_again_and_again_are_given_up(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_rests(monkeypatch)
    assert saver.begin() == "open"

    def put(num_taken: int) -> list[str]:
        def die(index: int) -> str:
            if index == num_taken:
                raise PeerError("silent", "a fault")
            return "stored"

        saver.server.take = die
        outcomes = saver.put(1, 2)
        assert [saver.states.get(timeout=60) for _ in range(2)] == ["away", "open"]
        return outcomes

    assert put(0) == ["away", "away"]
    assert put(1) == ["stored", "away"], "one that it has taken begins the count anew"
    assert put(0) == ["away", "away"]
    assert put(0) == ["error", "error"]
    assert put(0) == ["away", "away"]
    saver.server.take = lambda number: "stored"
    assert saver.put(1, 2) == ["stored", "stored"]
    assert [put(0)[0] for _ in range(3)] == ["away", "away", "error"]


def test_a_cancelled_save_ends_and_an_error_of_ours_costs_it_alone(saver: Saver) -> None:
    assert saver.begin() == "open"
    batch: list[Records] = []

    def cancel(number: int) -> str:
        if number == 1:
            batch[0].is_cancelled = True
        return "stored"

    has_begun = threading.Event()
    saver.server.connect = lambda: bool(has_begun.wait()) and None
    saver.server.take = cancel
    batch.append(saver.start(0, 1, 2))
    has_begun.set()
    assert batch[0].outcomes.get(timeout=60) == ["stored", "pins", "pins"]
    assert saver.states.empty(), "the server has done nothing wrong"
    saver.server.take = lambda number: str(1 // 0)
    assert saver.put(1) == ["error"]
    saver.server.take = lambda number: "stored"
    assert saver.put(1) == ["stored"]


def test_a_save_that_has_become_old_gives_way(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_saves, "RemoteSave", Records)
    monkeypatch.setattr(remote_saves, "LATE_S", 0.0)
    assert saver.begin() == "open"
    has_begun, waits = threading.Event(), threading.Event()

    def connect() -> None:
        has_begun.set()
        waits.wait()

    saver.server.connect = connect
    first = saver.start(0, 1)
    has_begun.wait()
    second = saver.start(2, 3)
    waits.set()
    assert first.outcomes.get(timeout=60) == ["rate", "rate"]
    assert second.outcomes.get(timeout=60) == ["stored", "stored"], "nothing waits for it"


def test_a_server_that_closes_and_opens(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert saver.begin() == "open"
    saver.server.takes_records = False
    assert saver.put(1, 2) == ["refused", "refused"]
    assert saver.states.get(timeout=60) == "closed"
    assert saver.put(3) == ["refused"]
    monkeypatch.setattr(remote_saves, "MAX_REST_S", 0.0)
    saver.saver.begin(FINGERPRINT)
    assert saver.states.get(timeout=60) == "closed"
    saver.server.takes_records = True
    assert saver.states.get(timeout=60) == "open"


def test_a_save_and_its_result() -> None:
    results: list[SaveResult] = []
    order = SaveOrder(4, SavedBlocks.of(SavedBlock(0, number, key) for number, key in enumerate(make_keys(4))))
    namespace: Any = type("Namespace", (), {"header_of": staticmethod(lambda group, key: header_of(1))})
    save = RemoteSave(order, namespace, RecordMac(bytes(32)), lambda output: results.extend(output.saves))
    cases: list[tuple[list[str], tuple[Any, ...]]] = [
        (["stored", "present", "stored", "stored"], (4, "ok", "", 1)),
        (["stored", "present", "full", "full"], (2, "partial", "full", 1)),
        (["rate", "rate", "rate", "rate"], (0, "failed", "rate", 0)),
        (["stored", "refused", "present", "refused"], (1, "partial", "error", 0)),
        (["stored", "pins", "pins", "pins"], (1, "cancelled", "", 0)),
        (["stored", "away", "present", "away"], (1, "partial", "away", 0)),
        (["away", "away", "away", "away"], (0, "failed", "away", 0)),
    ]
    for outcomes, expected in cases:
        save.end(outcomes)
        result = results.pop()
        assert (result.num_saved, result.outcome, result.reason, result.num_present) == expected
        assert result.num_bytes == outcomes[: result.num_saved].count("stored") * header_of(1).record_bytes
    save.cancel()
    assert save.is_cancelled


# -- records of a directory ----------------------------------------------------------------------------------------


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[tuple[Saver, Callable[[int], tuple[RecordHeader, str, int]]]]:
    """A saver of a directory, and a function that writes a record there."""
    directory = open_store(tmp_path / "store")
    writer = directory.create_extent(FINGERPRINT)

    def write(number: int) -> tuple[RecordHeader, str, int]:
        return header_of(number), writer.name, writer.append(header_of(number), payload_of(number)).offset

    saver = Saver(directory)
    yield saver, write
    assert saver.saver.stop(time.monotonic() + 60)
    writer.abandon()
    directory.close()


Copies = tuple[Saver, Callable[[int], tuple[RecordHeader, str, int]]]


def test_written_records_wait_for_a_server_that_is_away(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, write = copies
    no_rests(monkeypatch)
    saver.server.connect = fail("unreachable")
    assert saver.begin() == "away"
    for number in range(3):
        saver.saver.copy(*write(number))
    gone = write(3)
    saver.saver.copy(gone[0], "gone.kvx", 0)
    assert saver.server.taken == []
    saver.server.connect = lambda: None
    assert saver.states.get(timeout=60) == "open"
    assert saver.total(4) == {"stored": 3, "gone": 1}
    assert [head[:-32] for head in saver.server.taken] == [header_of(number).encode() for number in range(3)]


def test_records_at_which_a_server_dies_go_back_to_their_places(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, write = copies
    monkeypatch.setattr(rests, "REST_S", 3600.0)
    monkeypatch.setattr(remote_saves, "MAX_COPIES", 6)
    is_taking, goes_on = threading.Event(), threading.Event()

    def die(number: int) -> str:
        is_taking.set()
        goes_on.wait()
        if number == 1:
            raise PeerError("silent", "a fault")
        return "stored"

    saver.server.take = die
    assert saver.begin() == "open"
    monkeypatch.setattr(remote_saves, "MAX_BATCH", 3)
    with saver.saver._lock:  # in one batch
        for number in range(3):
            saver.saver.copy(*write(number))
    is_taking.wait()
    for number in range(3, 8):
        saver.saver.copy(*write(number))
    goes_on.set()
    assert saver.states.get(timeout=60) == "away"
    saver.server.take = lambda number: "stored"
    saver.saver.begin(FINGERPRINT)
    assert saver.states.get(timeout=60) == "open"
    assert saver.total(8) == {"stored": 7, "rate": 1}, "the newest had no room"
    assert [head[:-32] for head in saver.server.taken] == [header_of(number).encode() for number in range(7)]


def test_records_that_are_to_be_dropped_at_the_server_do_not_come_after(copies: Copies) -> None:
    saver, write = copies
    assert saver.begin() == "open"
    is_taking, goes_on = threading.Event(), threading.Event()

    def take(number: int) -> str:
        is_taking.set()
        goes_on.wait()
        return "stored"

    saver.server.take = take
    saver.saver.copy(*write(0))
    is_taking.wait()
    saver.saver.copy(*write(1))
    saver.saver.forget_copies(time.monotonic())
    assert saver.saver._batch is not None, "its time is over"
    forgetting = threading.Thread(target=saver.saver.forget_copies, args=(time.monotonic() + 60,))
    forgetting.start()
    goes_on.set()
    forgetting.join()
    assert saver.saver._batch is None
    assert saver.total(2) == {"gone": 2}
    assert saver.server.taken == []
    saver.saver.forget_copies(time.monotonic() + 60)
    assert saver.states.empty()


def test_records_are_not_kept_for_a_server_that_takes_none(copies: Copies) -> None:
    saver, write = copies
    saver.server.takes_records = False
    assert saver.begin() == "closed"
    saver.saver.copy(*write(0))
    assert not saver.saver._copies
    assert saver.saver.stop(time.monotonic() + 60)
    assert saver.counts == []


def test_a_queue_of_written_records_is_bounded(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, write = copies
    monkeypatch.setattr(remote_saves, "MAX_COPIES", 5)
    monkeypatch.setattr(remote_saves, "MAX_BATCH", 2)
    saver.server.connect = fail("unreachable")
    assert saver.begin() == "away"
    for number in range(7):
        saver.saver.copy(*write(number))
    saver.server.connect = lambda: None
    saver.saver.begin(FINGERPRINT)
    assert saver.states.get(timeout=60) == "open"
    assert saver.total(7) == {"stored": 5, "rate": 2}


def test_the_end_of_an_engine_gives_copies_a_moment(copies: Copies) -> None:
    saver, write = copies
    assert saver.begin() == "open"
    for number in range(5):
        saver.saver.copy(*write(number))
    assert saver.saver.stop(time.monotonic() + 60)
    assert saver.total(5) == {"stored": 5}


def test_the_end_of_an_engine_does_not_wait_for_a_server(copies: Copies) -> None:
    saver, write = copies
    assert saver.begin() == "open"
    is_taking, goes_on = threading.Event(), threading.Event()

    def take(number: int) -> str:
        is_taking.set()
        goes_on.wait()
        return "stored"

    saver.server.take = take
    saver.saver.copy(*write(0))
    is_taking.wait()
    saver.saver.copy(*write(1))
    assert not saver.saver.stop(time.monotonic()), "it hangs"
    goes_on.set()
    assert saver.saver.stop(time.monotonic() + 60)
    assert (saver.counts[-1]["outcomes"], saver.counts[-1]["waiting"]) == ({"pins": 1}, 1)
