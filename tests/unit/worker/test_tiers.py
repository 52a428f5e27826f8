"""Questions to block servers: a dead, hung, foreign or slow one costs a request the time of one question, and then
nothing."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from quire.kv_store import rests
from quire.kv_store.peer.client import MAX_IDLE, PeerError
from quire.wire.kv_peers import NO_CURSOR, Changes, Cursor, RecordName, pack_bits
from quire.worker.kv_transfer import tiers as tiers_module
from quire.worker.kv_transfer.tiers import Answers, ServerWatcher, TierAsker

KEYS: list[RecordName] = [(0, bytes([number]) * 32) for number in range(3)]
FINGERPRINT = b"f" * 32
ALL = pack_bits([True] * 3)


class Server:
    """Stands for one address."""

    def __init__(self) -> None:
        self.connect: Callable[[], None] = lambda: None
        self.num_asked = 0
        self.cursors: list[Cursor] = []
        self.changes: queue.Queue[Changes] = queue.Queue()
        self.asked_for: list[list[RecordName]] = []

    def watch(self, cursor: Cursor) -> Changes:
        self.cursors.append(cursor)
        return self.changes.get()

    takes_records = True
    outcome = "dropped"

    def drop(self, timeout_s: float) -> str:
        return self.outcome

    def have(self, keys: Sequence[RecordName], timeout_s: float | None = None) -> list[bool]:
        self.asked_for.append(list(keys))
        return [True] * len(keys)


class Client:
    """Stands for a `PeerClient`."""

    def __init__(self, servers: dict[str, Server]) -> None:
        self.servers = servers

    @contextlib.contextmanager
    def connect(self, address: str, fingerprint: bytes, **options: Any) -> Iterator[Server]:
        server = self.servers[address]
        server.num_asked += 1
        server.connect()
        yield server


class Engine:
    """Asks, and takes the answers."""

    def __init__(self, *servers: Server) -> None:
        self.servers = {f"server {number}": server for number, server in enumerate(servers)}
        client: Any = Client(self.servers)
        self.asker = TierAsker(client, list(self.servers))
        self.reports: queue.Queue[Answers] = queue.Queue()

    def ask(self) -> Answers:
        self.asker.ask(KEYS, FINGERPRINT, self.reports.put)
        return self.reports.get(timeout=60)


def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        time.sleep(0.001)


def fail(reason: str) -> Callable[[], None]:
    def connect() -> None:
        raise PeerError(reason, "a fault")

    return connect


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Two servers. No test depends on how quickly one answers."""
    monkeypatch.setattr(tiers_module, "ASK_S", 60.0)
    engine = Engine(Server(), Server())
    yield engine
    assert engine.asker.stop(time.monotonic() + 120)


def test_all_servers_are_asked(engine: Engine) -> None:
    assert engine.ask() == {"server 0": ALL, "server 1": ALL}
    assert [server.asked_for for server in engine.servers.values()] == [[KEYS], [KEYS]]
    engine.asker.ask(KEYS, None, engine.reports.put)
    assert engine.reports.get_nowait() == {}, "what the blocks are made of is not known"


@pytest.mark.parametrize("reason", ["unreachable", "silent", "refused", "format"])
def test_a_server_that_cannot_be_used_is_not_asked_again(engine: Engine, reason: str) -> None:
    dead = engine.servers["server 0"]
    dead.connect = fail(reason)
    for _ in range(3):
        assert engine.ask() == {"server 1": ALL}
    assert dead.num_asked == 1


def test_an_error_of_ours_costs_no_request(engine: Engine) -> None:
    def connect() -> None:
        raise ZeroDivisionError

    for server in engine.servers.values():
        server.connect = connect
    assert engine.ask() == engine.ask() == {}


def test_a_server_that_is_there_again_is_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that it is tried without a request that waits; here at once."""
    monkeypatch.setattr(rests, "REST_S", 0.001)
    monkeypatch.setattr(rests, "MAX_REST_S", 0.001)
    server = engine.servers["server 0"]
    server.connect = fail("unreachable")
    assert engine.ask() == {"server 1": ALL}
    until(lambda: server.num_asked > 3)
    server.connect = lambda: None
    until(lambda: len(engine.ask()) == 2)
    assert [] in server.asked_for


def test_connections_from_before_a_restart_are_dropped(engine: Engine) -> None:
    server = engine.servers["server 0"]

    def connect() -> None:
        if server.num_asked <= MAX_IDLE:
            raise PeerError("stale", "it was started again")

    server.connect = connect
    assert engine.ask() == {"server 0": ALL, "server 1": ALL}


def test_a_hung_server_costs_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hangs the thread that asks, for ever."""
    monkeypatch.setattr(tiers_module, "ASK_S", 0.05)
    hung, alive, hangs = Server(), Server(), threading.Event()
    hung.connect = lambda: bool(hangs.wait()) and None
    engine = Engine(hung, alive)
    while engine.ask() != {"server 1": ALL}:
        pass  # the other was not quick enough, on a busy machine
    monkeypatch.setattr(tiers_module, "ASK_S", 60.0)
    until(lambda: "server 1" in engine.ask())  # that one may have to be tried first
    for _ in range(3):
        assert engine.ask() == {"server 1": ALL}
    assert hung.num_asked == 1
    assert not engine.asker.stop(time.monotonic())
    hangs.set()


def test_a_server_that_has_answered_another_question_meanwhile_is_not_dead(engine: Engine) -> None:
    """Stands for many questions at once, of which the last end without an answer."""
    late = tiers_module._Question(FINGERPRINT, 2, engine.reports.put, KEYS)
    engine.ask()
    assert late.end()
    assert not late.end(), "it is answered once"
    assert engine.reports.get_nowait() == {}
    for server in engine.asker._servers:
        server.note_late(late)
    assert len(engine.ask()) == 2
    late.answer("server 0", ALL)
    assert engine.reports.empty()


def test_records_are_dropped_at_all_servers_and_each_says_why_not(engine: Engine) -> None:
    reports: queue.Queue[dict[str, str]] = queue.Queue()
    prepared: list[float] = []

    def drop() -> list[str]:
        engine.asker.drop(FINGERPRINT, prepared.append, reports.put)
        return [outcome for _, outcome in sorted(reports.get(timeout=60).items())]

    first, second = engine.servers.values()
    assert drop() == ["dropped", "dropped"]
    assert len(prepared) == 2
    first.takes_records, second.outcome = False, "error"
    assert drop() == ["it is served without --allow-writes", "its disk fails (error)"]
    first.connect, second.connect = fail("unreachable"), lambda: 1 / 0  # type: ignore[assignment,return-value]
    assert drop() == ["a fault", "an error of this engine"]
    num_stale = [0]

    def connect() -> None:
        num_stale[0] += 1
        if num_stale[0] <= MAX_IDLE:
            raise PeerError("stale", "it was started again")

    first.connect = second.connect = lambda: None
    first.connect, first.takes_records, second.outcome = connect, True, "dropped"
    assert drop() == ["dropped", "dropped"]
    engine.asker.drop(None, prepared.append, reports.put)
    assert set(reports.get(timeout=60).values()) == {"the namespace is not known yet"}


def test_without_servers_nothing_is_asked() -> None:
    engine = Engine()
    assert engine.ask() == {}
    assert engine.asker.stop(time.monotonic())


def test_what_a_server_holds_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is away holds what it held, for a while, and is read anew then."""
    for name in ("REST_S", "MAX_REST_S"):
        monkeypatch.setattr(rests, name, 0.001)
    monkeypatch.setattr(tiers_module, "WATCH_S", 0.001)
    monkeypatch.setattr(tiers_module, "FORGET_S", 3600.0)
    server, reports = Server(), queue.Queue[tuple[list[RecordName], list[RecordName], bool]]()
    client: Any = Client({"server": server})

    def report(added: Sequence[RecordName], removed: Sequence[RecordName], is_new: bool) -> None:
        reports.put((list(added), list(removed), is_new))

    def answer(added: list[RecordName], removed: list[RecordName], cursor: Cursor, *flags: bool) -> None:
        server.changes.put(Changes(added, removed, cursor, *flags))

    watcher = ServerWatcher(client, "server", FINGERPRINT, report)
    answer([], [], (5, 5), True, False)
    answer(KEYS[:2], [], (6, 6), False, True)
    answer([], [], (6, 6), False, False)
    answer(KEYS[2:], KEYS[:1], (7, 8), False, False)
    assert reports.get(timeout=60) == (KEYS[:2], [], False)
    assert reports.get(timeout=60) == (KEYS[2:], KEYS[:1], False)
    answer(KEYS[:1], [], (9, 9), True, False)
    assert reports.get(timeout=60) == (KEYS[:1], [], True), "it was away for long"
    assert server.cursors[:5] == [NO_CURSOR, (5, 5), (6, 6), (6, 6), (7, 8)]
    until(lambda: len(server.cursors) == 6)
    server.connect = fail("unreachable")
    answer([], [], (9, 9), False, False)
    num_asked = server.num_asked
    until(lambda: server.num_asked > num_asked + 3)
    assert reports.empty()
    monkeypatch.setattr(tiers_module, "FORGET_S", 0.0)
    assert reports.get(timeout=60) == ([], [], True)
    num_asked = server.num_asked
    until(lambda: server.num_asked > num_asked + 3)
    assert reports.empty(), "it is forgotten once"
    server.connect = lambda: None
    answer(KEYS, [], (11, 11), True, False)
    assert reports.get(timeout=60) == (KEYS, [], False), "nothing was known"
    assert server.cursors[6] == NO_CURSOR
    while not watcher.stop():  # it waits for an answer
        answer([], [], (11, 11), False, False)
