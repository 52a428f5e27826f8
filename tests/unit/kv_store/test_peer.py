"""Block servers and their clients: what is sent, what is refused, and what no message can do."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from quire.errors import ConfigError
from quire.kv_store import index as index_module
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.peer import client as client_module
from quire.kv_store.peer import server as server_module
from quire.kv_store.peer.client import PeerClient, PeerError, PeerList
from quire.kv_store.peer.server import BlockServer, BlockSource, DirectorySource, Record
from quire.kv_store.record import TAG_BYTES, RecordMac, make_header
from quire.wire import sockets
from quire.wire.kv_peers import (
    MAX_KEYS,
    NO_CURSOR,
    PEER_VERSION,
    PUT_CREDIT,
    Credit,
    Drop,
    Get,
    Have,
    Hello,
    Proof,
    Put,
    RecordName,
    Release,
    Renew,
    Taken,
)

from ...seeds import seed_of, volume

KEY = bytes(range(32))
FINGERPRINT = b"\x07" * 32


class Memory(BlockSource):
    """Blocks in a dict, and what was asked of leases."""

    def __init__(self) -> None:
        self.records: dict[RecordName, Record] = {}
        self.leases = {"lease"}
        self.expected = ""
        self.calls: list[tuple[str, list[str]]] = []
        self.puts: list[tuple[list[bytes], Callable[[str], None]]] = []
        self.takes_records = True

    def put(self, fingerprint: bytes, frames: Sequence[bytes], report: Callable[[str], None]) -> None:
        self.puts.append((list(frames), report))
        if self.answers_puts:
            report(f"outcome {len(self.puts)}")

    answers_puts = True

    def drop(self, fingerprint: bytes, report: Callable[[str], None]) -> None:
        assert fingerprint == FINGERPRINT
        self.puts.clear()
        report("dropped")

    def add(self, number: int, group: int = 0) -> RecordName:
        name = group, bytes([number]) * 32
        head = make_header(FINGERPRINT, name[1], None, group, [number], 100).encode()
        payload = bytes([number]) * 100
        self.records[name] = head + RecordMac(KEY).tag(head, [payload]), payload
        return name

    def accepts(self, fingerprint: bytes) -> bool:
        return fingerprint == FINGERPRINT

    def has(self, fingerprint: bytes, keys: Sequence[RecordName]) -> list[bool]:
        return [key in self.records for key in keys]

    def read(self, fingerprint: bytes, lease: str, key: RecordName) -> Record | None:
        return self.records.get(key) if lease in self.leases else None

    def is_expected(self, lease: str) -> bool:
        return lease == self.expected and lease not in self.leases

    def renew(self, leases: Sequence[str], now: float) -> None:
        self.calls.append(("renew", list(leases)))

    def release(self, leases: Sequence[str]) -> None:
        self.calls.append(("release", list(leases)))


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on how quickly a server answers."""
    monkeypatch.setattr(client_module, "SILENCE_S", 60.0)
    monkeypatch.setattr(client_module, "CONNECT_S", 60.0)


@pytest.fixture
def source() -> Memory:
    return Memory()


@pytest.fixture
def server(source: Memory) -> Iterator[BlockServer]:
    server = BlockServer(source, KEY, "tcp://127.0.0.1:0", "P")
    yield server
    server.close()


@pytest.fixture
def client() -> Iterator[PeerClient]:
    client = PeerClient(KEY, "D")
    yield client
    client.close()


def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        time.sleep(0.001)


def numbers(records: Iterator[tuple[memoryview, memoryview]]) -> list[int]:
    """Returns the numbers of blocks, as `Memory` has made them."""
    return [payload[0] for head, payload in records if len(payload) == 100 and len(head) > TAG_BYTES]


def test_a_server_says_what_it_has_and_sends_it_in_order(
    server: BlockServer, source: Memory, client: PeerClient
) -> None:
    names = [source.add(number) for number in range(40)]
    with client.connect(server.address, FINGERPRINT) as peer:
        assert peer.have([names[3], (0, b"?" * 32), names[39], (1, names[0][1])]) == [True, False, True, False]
        assert numbers(peer.fetch("lease", names)) == list(range(40))
        assert numbers(peer.fetch("lease", names[5:7])) == [5, 6]
    with client.connect(server.address, FINGERPRINT, server.incarnation) as again:
        assert again is peer  # it was kept
        again.send(Renew(["a"]))
        again.send(Release(["a", "b"]))
        until(lambda: len(source.calls) == 2)
    assert source.calls == [("renew", ["a"]), ("release", ["a", "b"])]


def test_a_block_that_is_gone_ends_the_rest(server: BlockServer, source: Memory, client: PeerClient) -> None:
    names = [source.add(number) for number in range(3)]
    del source.records[names[1]]
    with client.connect(server.address, FINGERPRINT) as peer:
        records = peer.fetch("lease", names)
        assert next(records)[1][0] == 0
        with pytest.raises(PeerError) as error:
            next(records)
    assert error.value.reason == "gone"


def test_a_pull_waits_for_the_order_that_begins_its_lease(
    server: BlockServer, source: Memory, client: PeerClient
) -> None:
    name, source.expected = source.add(1), "soon"
    with client.connect(server.address, FINGERPRINT) as peer:
        records = peer.fetch("soon", [name])
        peer.have([name])  # the pull has arrived before this was answered
        source.leases.add("soon")
        server.wake()
        assert numbers(records) == [1]
    with pytest.raises(PeerError, match="has lost"), client.connect(server.address, FINGERPRINT) as peer:
        list(peer.fetch("unknown", [name]))


@pytest.mark.parametrize(
    ("key", "fingerprint", "reason"),
    [(b"x" * 32, FINGERPRINT, "another key"), (KEY, b"x" * 32, "fingerprint does not fit")],
)
def test_another_key_or_fingerprint_is_refused(
    server: BlockServer, source: Memory, key: bytes, fingerprint: bytes, reason: str
) -> None:
    client = PeerClient(key, "D")
    with pytest.raises(PeerError, match=reason) as error, client.connect(server.address, fingerprint) as peer:
        peer.have([source.add(1)])
    assert error.value.reason == "refused"
    client.close()


def test_a_server_that_was_started_again_is_not_the_one_that_promised(server: BlockServer, client: PeerClient) -> None:
    with pytest.raises(PeerError) as error, client.connect(server.address, FINGERPRINT, "another"):
        pass
    assert error.value.reason == "stale"


def test_connections_from_before_a_restart_are_dropped(source: Memory, client: PeerClient) -> None:
    name = source.add(1)
    server = BlockServer(source, KEY, "tcp://127.0.0.1:0")
    with client.connect(server.address, FINGERPRINT) as first:
        first.have([name])
    server.close()
    again = BlockServer(source, KEY, server.address)
    with client.connect(again.address, FINGERPRINT, again.incarnation) as peer:
        assert peer is not first
        assert numbers(peer.fetch("lease", [name])) == [1]
    again.close()
    third = BlockServer(source, KEY, server.address)
    with pytest.raises(PeerError) as error, client.connect(third.address, FINGERPRINT) as peer:
        peer.have([name])
    assert error.value.reason == "stale"
    third.close()


def test_nothing_listens(client: PeerClient, server: BlockServer) -> None:
    server.close()
    with pytest.raises(PeerError) as error, client.connect(server.address, FINGERPRINT):
        pass
    assert error.value.reason == "unreachable"
    with pytest.raises(ConfigError, match="cannot be served at tcp://nothing: "):
        BlockServer(Memory(), KEY, "tcp://nothing")


def test_a_connection_that_was_given_back_holds_nothing_of_its_last_use(
    server: BlockServer, client: PeerClient
) -> None:
    """A transfer holds the memory of the KV cache, which may be released."""
    is_over = Mock(return_value=False)
    gone = weakref.ref(is_over)
    with client.connect(server.address, FINGERPRINT, is_cancelled=is_over):
        pass
    del is_over
    gc.collect()
    assert gone() is None


def test_a_silent_server_and_a_cancel(monkeypatch: pytest.MonkeyPatch, client: PeerClient) -> None:
    """A socket that answers nothing, and a server whose pull waits."""
    monkeypatch.setattr(client_module, "SILENCE_S", 0.05)
    context: zmq.Context[Any] = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(PeerError) as error, client.connect(f"tcp://127.0.0.1:{port}", FINGERPRINT):
        pass
    assert error.value.reason == "silent"
    silent.close(linger=0)
    context.term()
    source = Memory()
    source.expected = "soon"
    server = BlockServer(source, KEY, "tcp://127.0.0.1:0")
    monkeypatch.setattr(client_module, "SILENCE_S", 60.0)
    is_over = threading.Event()
    with client.connect(server.address, FINGERPRINT, is_cancelled=is_over.is_set) as peer:
        is_over.set()
        with pytest.raises(PeerError) as error:
            list(peer.fetch("soon", [source.add(1)]))
    assert error.value.reason == "cancelled"
    server.close()


def test_encrypted_connections(monkeypatch: pytest.MonkeyPatch, source: Memory) -> None:
    """Addresses beyond this machine are encrypted; here loopback is taken for one."""
    for module in (sockets, server_module, client_module):
        monkeypatch.setattr(module, "is_private", lambda address: False)
    server = BlockServer(source, KEY, "tcp://127.0.0.1:0")
    client, stranger = PeerClient(KEY, "D"), PeerClient(b"x" * 32, "D")
    with client.connect(server.address, FINGERPRINT) as peer:
        assert numbers(peer.fetch("lease", [source.add(9)])) == [9]
    monkeypatch.setattr(client_module, "SILENCE_S", 0.1)
    with pytest.raises(PeerError) as error, stranger.connect(server.address, FINGERPRINT):
        pass
    assert error.value.reason == "silent"
    for closes in (client, stranger, server):
        closes.close()


def test_a_directory_is_served_to_any_fingerprint_and_only_with_its_key(tmp_path: Path) -> None:
    store = StoreDirectory.open(tmp_path / "store", 1 << 30)
    writer = store.create_extent(FINGERPRINT)
    payload = bytes(range(200))
    for number in range(3):
        header = make_header(FINGERPRINT, bytes([number]) * 32, None, 0, [number], len(payload))
        writer.append(header, [memoryview(payload)])
    server, client = BlockServer(DirectorySource(store), store.key, "tcp://127.0.0.1:0"), PeerClient(store.key, "D")
    names = [(0, bytes([number]) * 32) for number in range(4)]
    with client.connect(server.address, FINGERPRINT) as peer:
        assert peer.have(names) == [True, True, True, False]
        for (head, data), name in zip(peer.fetch("", names[:3]), names, strict=False):
            wanted = make_header(FINGERPRINT, name[1], None, 0, [name[1][0]], len(payload))
            RecordMac(store.key).check(wanted, head, [data])
            assert bytes(data) == payload
    with client.connect(server.address, b"another fingerprint, of 32 bytes") as peer:
        assert peer.have(names) == [False] * 4
    client.close()
    server.close()
    writer.abandon()
    store.close()


def test_a_damaged_record_is_not_sent_and_a_deleted_extent_is_closed(tmp_path: Path) -> None:
    """An honest server sends no record that a client has to reject, and keeps no room of what is deleted."""
    store = StoreDirectory.open(tmp_path / "store", 1 << 30)
    writer, names = store.create_extent(FINGERPRINT), [(0, bytes([number]) * 32) for number in range(3)]
    entries = [
        writer.append(make_header(FINGERPRINT, name[1], None, 0, [1], 200), [memoryview(bytes(200))]) for name in names
    ]
    source = DirectorySource(store)
    assert source.accepts(FINGERPRINT)
    assert source.read(FINGERPRINT, "", names[0]) is not None
    with (tmp_path / "store" / writer.name).open("r+b") as file:
        file.seek(entries[1].end - 1)
        file.write(b"\x01")
        file.truncate(entries[2].end - 1)
    assert [source.read(FINGERPRINT, "", name) is not None for name in names] == [True, False, False]
    assert source.has(FINGERPRINT, names) == [True, False, False], "it is stored again"
    (index, _) = source._indexes[FINGERPRINT]
    index._places[index_module._key_of(b"z" * 32, 0)] = index._places[index_module._key_of(names[0][1], 0)]
    index._known[0].recent[index_module._key_of(b"z" * 32, 0)] = entries[0].offset
    assert source.read(FINGERPRINT, "", (0, b"z" * 32)) is None, "it is another block's"
    assert source.end_expired(0.0) == float("inf")
    assert list(source._descriptors) == [writer.name]
    store.remove(writer.name)
    source.end_expired(1.0)
    assert source._descriptors == {}
    source.close()
    writer.abandon()
    store.close()


# -- records that are put -------------------------------------------------------------------------------------------


def test_records_are_put_in_pieces_and_answered_in_order(
    server: BlockServer, source: Memory, client: PeerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_REQUEST_BYTES", 40)
    num_read: list[int] = []

    def records() -> Iterator[tuple[int, tuple[bytes, memoryview]]]:
        for number in range(9):
            num_read.append(len(source.puts))
            yield 10 + number, (b"head %d" % number, memoryview(bytes([number]) * 100 if number else b""))

    with client.connect(server.address, FINGERPRINT) as peer:
        assert peer.takes_records
        assert list(peer.put(records())) == [(10 + number, f"outcome {number + 1}") for number in range(9)]
        assert peer.have([]) == []  # the session goes on
    assert [b"".join(frames) for frames, _ in source.puts[1:]] == [
        b"head %d" % number + bytes([number]) * 100 for number in range(1, 9)
    ]
    assert {len(frames) for frames, _ in source.puts[1:]} == {4}
    assert source.puts[0][0] == [b"head 0"]
    assert all(number - PUT_CREDIT <= there for number, there in enumerate(num_read)), "few are on their way"


def test_a_server_that_takes_none_and_one_that_is_given_too_many(
    server: BlockServer, source: Memory, client: PeerClient
) -> None:
    def put(count: int, *frames: bytes) -> None:
        with client.connect(server.address, FINGERPRINT) as peer:
            for number in range(count):
                peer.send(Put(number), *frames)
            peer.have([])

    source.answers_puts = False
    with pytest.raises(PeerError, match="puts does not fit"):
        put(PUT_CREDIT + 1, b"head")
    for _, report in source.puts:
        report("late")  # its session has ended
    put(PUT_CREDIT, b"head")
    with pytest.raises(PeerError, match="puts does not fit"):
        put(1)  # without a record
    source.takes_records = False
    with pytest.raises(PeerError, match="puts does not fit"):
        put(1, b"head")
    with pytest.raises(NotImplementedError):
        BlockSource.put(source, FINGERPRINT, [], lambda outcome: None)
    with pytest.raises(PeerError, match="watch does not fit"), client.connect(server.address, FINGERPRINT) as peer:
        peer.watch(NO_CURSOR)
    with pytest.raises(NotImplementedError):
        BlockSource.drop(source, FINGERPRINT, lambda outcome: None)


def test_records_of_a_session_are_dropped_if_any_are_taken(
    server: BlockServer, source: Memory, client: PeerClient
) -> None:
    def drop(*frames: bytes) -> str:
        with client.connect(server.address, FINGERPRINT) as peer:
            if frames:
                peer.send(Drop(1), *frames)
            return peer.drop(60.0)

    with client.connect(server.address, FINGERPRINT) as peer:
        assert list(peer.put([(1, (b"head", memoryview(b"")))])) == [(1, "outcome 1")]
    assert drop() == "dropped"
    assert source.puts == []
    with pytest.raises(PeerError, match="message does not fit"):
        drop(b"a frame")
    source.takes_records = False
    with pytest.raises(PeerError, match="puts does not fit"):
        drop()


def test_an_answer_for_another_record_ends_the_connection(
    server: BlockServer, source: Memory, client: PeerClient
) -> None:
    source.answers_puts = False

    def answer() -> bool:
        """Answers for another record as soon as there is one, while its client waits."""
        if source.puts:
            (name, session), *_ = server._sessions.items()
            server._taken.append((name, session, Taken(8, "stored")))
            server.wake()
        return False

    def put() -> None:
        with client.connect(server.address, FINGERPRINT, is_cancelled=answer) as peer:
            next(peer.put([(7, (b"head", memoryview(b"")))]))

    with pytest.raises(PeerError, match="another record than 7") as error:
        put()
    assert error.value.reason == "format"


def test_a_directory_takes_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreDirectory.open(tmp_path / "store", 1 << 30)
    source = DirectorySource(store, 1 << 30)
    server, client = BlockServer(source, store.key, "tcp://127.0.0.1:0"), PeerClient(store.key, "D")
    mac, payload, name = RecordMac(store.key), memoryview(bytes(range(200))), (0, b"d" * 32)
    head = make_header(FINGERPRINT, name[1], None, 0, [1], len(payload)).encode()
    record = head + mac.tag(head, [payload]), payload
    with client.connect(server.address, FINGERPRINT) as peer:
        assert list(peer.put([(0, record), (1, record)])) == [(0, "stored"), (1, "present")]
        until(lambda: peer.have([name]) == [True])  # a scan has found it
        assert [(bytes(one[0]), bytes(one[1])) for one in peer.fetch("", [name])] == [(record[0], payload)]
        with client.connect(server.address, b"\x08" * 32) as other:
            assert other.drop(60.0) == "dropped"
        assert peer.have([name]) == [True], "that is another's"
        until(lambda: peer.watch(NO_CURSOR).added == [name])
        cursor = peer.watch(NO_CURSOR).cursor
        assert peer.drop(60.0) == "dropped"
        assert peer.have([name]) == [False]
        with pytest.raises(PeerError, match="has lost block 0"):
            list(peer.fetch("", [name]))
        until(lambda: peer.watch(cursor).removed == [name])
        monkeypatch.setattr(server_module, "MAX_NAMESPACES", 1)
        with client.connect(server.address, b"\x08" * 32) as other:
            assert other.watch(cursor).is_new
        assert list(source._logs) == [b"\x08" * 32]
    with client.connect(server.address, FINGERPRINT) as peer:
        assert list(peer.put([(0, record)])) == [(0, "stored")], "it is not taken as written lately"
    client.close()
    server.close()
    (extent,) = store.list_extents()
    assert store.is_sealed(extent)
    store.close()


# -- hostile messages ----------------------------------------------------------------------------------------------


class Raw:
    """A client that sends what it likes."""

    def __init__(self, server: BlockServer) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(server.address)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def test_nothing_is_answered_before_the_key_is_proven(server: BlockServer, source: Memory) -> None:
    raw, name = Raw(server), source.add(1)
    asks = [Have(1, [name]), Get(1, "lease", [name]), Renew(["lease"]), Release(["lease"]), Credit(1, 1), Put(1)]
    for ask in asks:
        for before in ([], [Hello(PEER_VERSION, FINGERPRINT, "D", b"n" * 32)], [Proof(b"p" * 32)]):
            for message in (*before, ask):
                raw.socket.send(msgspec.msgpack.encode(message))
            answers = [msgspec.msgpack.decode(raw.socket.recv())[0] for _ in (*before, ask)]
            assert set(answers) <= {"refused", "welcome"}
            assert answers[-1] == "refused"
    assert source.calls == []
    raw.close()


def test_mutated_messages_neither_crash_a_server_nor_take_its_memory(
    server: BlockServer, source: Memory, client: PeerClient
) -> None:
    rng = random.Random(seed_of(5))
    raw, names = Raw(server), [source.add(number) for number in range(8)]
    valid = [
        Hello(PEER_VERSION, FINGERPRINT, "D", b"n" * 32), Proof(b"p" * 32), Have(1, names), Get(1, "lease", names, 8),
        Credit(1, 60), Renew(["lease"]), Release(["a"]), Put(3),
    ]  # fmt: skip
    for _ in range(volume(3000)):
        data = bytearray(msgspec.msgpack.encode(rng.choice(valid)))
        for _ in range(rng.randrange(3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        raw.socket.send_multipart([bytes(data)] * rng.choice((1, 1, 1, 2)))
        while raw.socket.poll(0):
            raw.socket.recv_multipart()
    with client.connect(server.address, FINGERPRINT) as peer:  # it lives, and answers
        assert numbers(peer.fetch("lease", names)) == list(range(8))
    assert len(server._sessions) < 10
    raw.close()


def test_a_client_that_does_not_read_has_no_more_blocks_sent_than_its_credit(
    server: BlockServer, source: Memory, client: PeerClient
) -> None:
    names = [source.add(number) for number in range(100)]
    with client.connect(server.address, FINGERPRINT) as peer:
        records = peer.fetch("lease", names)
        first = next(records)
        assert first[1][0] == 0
        (session,) = server._sessions.values()
        until(lambda: session.pulls[0].credit == 0)
        assert session.pulls[0].index == client_module.CREDIT
        assert numbers(records) == list(range(1, 100))
    too_many = [(0, b"k" * 32)] * (MAX_KEYS + 1)
    with pytest.raises(PeerError, match="message does not fit"), client.connect(server.address, FINGERPRINT) as peer:
        peer.have(too_many)


def test_many_sessions_end_the_oldest_of_those_without_proof(server: BlockServer, client: PeerClient) -> None:
    raws = []
    with client.connect(server.address, FINGERPRINT) as peer:
        peer.have([])
        for _ in range(server_module.MAX_UNPROVEN + 3):
            raw = Raw(server)
            raw.socket.send(msgspec.msgpack.encode(Hello(PEER_VERSION, FINGERPRINT, "D", b"n" * 32)))
            raw.socket.recv()
            raws.append(raw)
        assert len(server._sessions) == server_module.MAX_UNPROVEN + 1
        peer.have([])  # it goes on
    for raw in raws:
        raw.close()


# -- the list of peers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("10.1.2.3", 99, "tcp://10.1.2.3:99"),
        ("[::1]", 99, "tcp://[::1]:99"),
        ("prefill-0.internal", 99, "tcp://prefill-0.internal:99"),
        ("Prefill-0.Internal", 99, "tcp://Prefill-0.Internal:99"),
        ("ipc:///run/p", None, "ipc:///run/p"),
        ("ipc:///run/q", None, None),
        ("11.1.2.3", 99, None),
        ("10.1.2.3", 0, None),
        ("10.1.2.3", None, None),
        ("10.1.2.3", 65536, None),
        ("10.1.2.3:1/x", 99, None),
        ("prefill-0.internal.evil.com", 99, None),
        ("169.254.169.254", 80, None),
        ("", 99, None),
        (None, 99, None),
    ],
)
def test_only_listed_hosts_are_peers(host: str | None, port: int | None, address: str | None) -> None:
    peers = PeerList(["10.0.0.0/8", "::1/128", "prefill-0.internal", "ipc:///run/p"])
    assert peers.find_address(host, port) == address


@pytest.mark.parametrize("entry", ["10.0.0.0/64", "http://x", "a b", "", "10.0.0.1/8"])
def test_entries_that_are_no_hosts(entry: str) -> None:
    with pytest.raises(ConfigError, match="is no host and no network"):
        PeerList([entry])
