"""A server of KV blocks: sends the records of a source to clients that have the key.

One thread owns the socket. What it takes from clients costs bounded memory: sessions, pulls and puts per session, keys
per message and blocks on their way are limited, and a client that stops reading has no more blocks sent to it. zmq does
not bound the number of a message's frames: a client that never ends a message takes memory until it leaves. Beyond
loopback and ipc:// only clients with the key get that far.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import zmq

from quire.errors import ConfigError
from quire.failpoints import failpoint
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import open_extent, read_header, read_into
from quire.kv_store.index import StoreIndex, StoreScanner
from quire.kv_store.peer.taker import RecordTaker
from quire.kv_store.record import TAG_BYTES, InvalidRecordError, RecordMac
from quire.kv_store.watch import ChangeLog, StoreWatcher
from quire.logger import init_logger
from quire.wire.kv_peers import (
    MAX_CREDIT,
    MAX_REQUEST_BYTES,
    PEER_VERSION,
    PUT_CREDIT,
    Bitmap,
    Block,
    Changes,
    Credit,
    Cursor,
    Drop,
    Get,
    Gone,
    Have,
    Hello,
    PeerAnswer,
    PeerRequest,
    Proof,
    Put,
    RecordName,
    Refused,
    Release,
    Renew,
    Taken,
    Watch,
    Welcome,
    client_tag,
    curve_keys,
    pack_bits,
    place_of,
    server_tag,
)
from quire.wire.sockets import CurveDoor, bound_address, is_private, make_peer_socket

logger = init_logger(__name__)

MAX_SESSIONS, MAX_UNPROVEN = 512, 64
"""Most sessions; the one that was silent for longest ends for another. The second: before they have proven the key."""
MAX_PULLS = 4
"""Most pulls of a session at once."""
LEASE_WAIT_S = 1.0
"""Time that a pull waits for its lease: the order to hold the blocks may be on its way."""
IDLE_S = 1.0
"""Longest sleep of the thread."""
MAX_MESSAGES = 64
"""Most messages that are taken in between two blocks."""
MAX_NAMESPACES = 16
MAX_OPEN_EXTENTS = 64

Record = tuple[bytes | memoryview, bytes | memoryview]
"""Header with tag, and payload."""


class BlockSource(ABC):
    """Where a server's blocks are. The server calls all methods on its thread."""

    takes_records = False
    """True: `put` and `drop` may be called."""

    @abstractmethod
    def accepts(self, fingerprint: bytes) -> bool:
        """Returns whether there may be blocks of a fingerprint."""

    @abstractmethod
    def has(self, fingerprint: bytes, keys: Sequence[RecordName]) -> list[bool]:
        """Returns which blocks can be had without a lease."""

    @abstractmethod
    def read(self, fingerprint: bytes, lease: str, key: RecordName) -> Record | None:
        """Returns a record; None: it cannot be had."""

    def put(self, fingerprint: bytes, frames: Sequence[bytes], report: Callable[[str], None]) -> None:
        """Takes a record in: header with tag, and the parts of the payload. `report` takes the outcome (`Taken`) later,
        on any thread, of each record in order."""
        raise NotImplementedError

    def drop(self, fingerprint: bytes, report: Callable[[str], None]) -> None:
        """Deletes all records of a fingerprint. `report` takes the outcome (`Taken`) later, on any thread, in order
        with those of `put`."""
        raise NotImplementedError

    def find_changes(self, fingerprint: bytes, cursor: Cursor) -> Changes | None:
        """Returns which blocks were added and removed since a cursor; None: that is not known here."""
        return None

    def is_expected(self, lease: str) -> bool:
        """Returns whether a lease may begin soon."""
        return False

    def renew(self, leases: Sequence[str], now: float) -> None:
        """Prolongs leases."""
        return

    def release(self, leases: Sequence[str]) -> None:
        """Ends leases."""
        return

    def end_expired(self, now: float) -> float:
        """Ends leases whose time is over. Returns when the next one ends; infinity: there is none."""
        return float("inf")

    def close(self) -> None:
        """Releases everything."""
        return


class DirectorySource(BlockSource):
    """The records of a directory, of any fingerprint."""

    def __init__(self, directory: StoreDirectory, max_write_bytes_per_s: int = 0) -> None:
        """`max_write_bytes_per_s`: most bytes of records that are taken in a second; 0: none are."""
        self._directory, self._mac = directory, RecordMac(directory.key)
        self._taker = RecordTaker(directory, max_write_bytes_per_s) if max_write_bytes_per_s else None
        self.takes_records = self._taker is not None
        self._indexes: dict[bytes, tuple[StoreIndex, StoreScanner]] = {}
        self._logs: dict[bytes, tuple[ChangeLog, StoreScanner]] = {}
        """Changes of the namespaces that clients watch."""
        self._descriptors: dict[str, int] = {}

    def accepts(self, fingerprint: bytes) -> bool:
        if fingerprint not in self._indexes:
            if len(self._indexes) >= MAX_NAMESPACES:
                self._indexes.pop(next(iter(self._indexes)))[1].stop()
            index = StoreIndex(self._directory, fingerprint)
            with contextlib.suppress(OSError):
                index.scan()  # the first question is answered, too
            self._indexes[fingerprint] = index, StoreScanner(index)
        return True

    def has(self, fingerprint: bytes, keys: Sequence[RecordName]) -> list[bool]:
        index, _ = self._indexes[fingerprint]
        return [index.contains(digest, group) for group, digest in keys]

    def read(self, fingerprint: bytes, lease: str, key: RecordName) -> Record | None:
        """Returns a record that is the one it should be: what a client has to reject would cost it a rest."""
        group, digest = key
        index, _ = self._indexes[fingerprint]
        place = index.find(digest, group)
        if lease or place is None:
            return None
        try:
            descriptor = self._open(place.extent)
            header = read_header(descriptor, place.offset)
            record, start = memoryview(bytearray(header.record_bytes)), header.header_bytes + TAG_BYTES
            if (header.fingerprint, header.digest, header.group) != (fingerprint, digest, group):
                raise InvalidRecordError("key", "it is another block's")
            if read_into(descriptor, [record], place.offset) != len(record):
                raise InvalidRecordError("truncated", "its extent ends within it")
            head, stored = record[:start], record[start:]
            self._mac.check_tag(head, [stored])
        except (OSError, InvalidRecordError) as e:
            logger.debug("a record of %s is not sent: %s", place.extent, e)
            index.forget(digest, group)
            return None
        index.note_use(digest, group)
        return head, stored

    def put(self, fingerprint: bytes, frames: Sequence[bytes], report: Callable[[str], None]) -> None:
        assert self._taker is not None
        index, _ = self._indexes[fingerprint]
        self._taker.put(fingerprint, frames, lambda name: index.contains(name[1], name[0]), report)

    def drop(self, fingerprint: bytes, report: Callable[[str], None]) -> None:
        assert self._taker is not None
        index, _ = self._indexes[fingerprint]
        self._taker.drop(fingerprint, index.scan, report)

    def find_changes(self, fingerprint: bytes, cursor: Cursor) -> Changes:
        if fingerprint not in self._logs:
            if len(self._logs) >= MAX_NAMESPACES:
                self._logs.pop(next(iter(self._logs)))[1].stop()
            log = ChangeLog()
            self._logs[fingerprint] = log, StoreScanner(StoreWatcher(self._directory, fingerprint, log.add))
        return self._logs[fingerprint][0].read(cursor)

    def _open(self, extent: str) -> int:
        descriptor = self._descriptors.get(extent)
        if descriptor is None:
            if len(self._descriptors) >= MAX_OPEN_EXTENTS:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            descriptor = self._descriptors[extent] = open_extent(self._directory.descriptor, extent)
        return descriptor

    def end_expired(self, now: float) -> float:
        """Closes extents that were deleted since, so that their room is free. Called at least each second."""
        for extent, descriptor in list(self._descriptors.items()):
            if not os.fstat(descriptor).st_nlink:
                os.close(self._descriptors.pop(extent))
        return float("inf")

    def close(self) -> None:
        if self._taker is not None:
            self._taker.close()
        for _, scanner in (*self._indexes.values(), *self._logs.values()):
            scanner.stop()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._indexes.clear()
        self._descriptors.clear()


@dataclass
class _Pull:
    """A `Get` that is being answered."""

    order: Get
    credit: int
    wait_until: float
    """Time until which its lease is waited for."""
    index: int = 0


@dataclass
class _Session:
    """One client."""

    hello: Hello
    nonce: bytes
    is_proven: bool = False
    pulls: deque[_Pull] = field(default_factory=deque)
    num_puts: int = 0
    """Records that were put and not answered yet."""


class BlockServer:
    """Serves a source at an address, in a thread of its own, until `close`."""

    def __init__(self, source: BlockSource, key: bytes, address: str, engine_id: str = "") -> None:
        """Raises ConfigError if the address cannot be listened at."""
        self.source, self._key, self._engine_id = source, key, engine_id
        self.incarnation = secrets.token_hex(8)
        """Name of this start of the server."""
        self._sessions: dict[bytes, _Session] = {}
        """Sessions by the socket's name of the client; the one that was silent for longest first."""
        self._taken: deque[tuple[bytes, _Session, Taken]] = deque()
        """Answers to puts that are not sent yet."""
        self._decoder: msgspec.msgpack.Decoder[PeerRequest] = msgspec.msgpack.Decoder(PeerRequest)
        self._is_closed = False
        self._context: zmq.Context[Any] = zmq.Context()
        curve, _ = curve_keys(key)
        try:
            place_of(address)
            if not is_private(address):
                CurveDoor(self._context, [curve.peer_public])
            self._socket = make_peer_socket(
                self._context, address, zmq.ROUTER, curve, bind=True, max_message_bytes=MAX_REQUEST_BYTES
            )
        except (zmq.ZMQError, ConfigError) as e:
            self._context.term()
            raise ConfigError(f"KV blocks cannot be served at {address}: {e}; name another address") from None
        self.address = bound_address(self._socket)
        """Address with the port that the system has chosen, if it was to choose one."""
        self._place = place_of(self.address) if is_private(address) else ""
        self._waker, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._waker.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-peer-server", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread look at its pulls again: a lease has begun or ended. Callable from any thread."""
        with self._wake_lock:
            if not self._is_closed:
                self._waker.send(b"")

    def close(self) -> None:
        """Ends the thread and releases everything, the source too. May be called twice."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._waker.send(b"")
        self._thread.join()
        self._waker.close(linger=0)
        self._context.term()
        self.source.close()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._is_closed:
            now = time.monotonic()
            seconds = min(IDLE_S, self.source.end_expired(now) - now)
            ready = dict(poller.poll(0 if self._send_blocks(now) else max(0, math.ceil(1000 * seconds))))
            if self._woken in ready:
                self._woken.recv()
            self._answer_puts()
            if self._socket in ready:
                self._take_messages()
        self._socket.close(linger=0)
        self._woken.close(linger=0)

    def _take_messages(self) -> None:
        for _ in range(MAX_MESSAGES):
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(name, frames)
            except Exception:
                logger.exception("the server of KV blocks ends a session")
                self._refuse(name, "session")

    def _take(self, name: bytes, frames: list[bytes]) -> None:
        try:
            message = self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            message = None
        if len(frames) != 1 and not isinstance(message, Put):
            message = None
        failpoint("kv.peer.message", type(message).__name__)
        session = self._sessions.pop(name, None)
        if isinstance(message, Hello):
            self._greet(name, message)
        elif session is None or message is None:
            self._send(name, Refused("message" if message is None else "session"))
        else:
            self._sessions[name] = session  # behind all others
            if isinstance(message, Proof):
                self._check_proof(name, session, message)
            elif session.is_proven:
                self._answer(name, session, message, frames[1:])
            else:
                self._refuse(name, "tag")

    def _greet(self, name: bytes, hello: Hello) -> None:
        if hello.version != PEER_VERSION:
            self._send(name, Refused("version"))
            return
        unproven = [other for other, session in self._sessions.items() if not session.is_proven]
        for full, candidates in ((MAX_UNPROVEN, unproven), (MAX_SESSIONS, list(self._sessions))):
            if len(candidates) >= full:
                self._sessions.pop(candidates[0], None)
        session = self._sessions[name] = _Session(hello, secrets.token_bytes(32))
        tag = server_tag(self._key, hello, session.nonce, self.incarnation, self._place)
        takes_records = self.source.takes_records
        self._send(name, Welcome(PEER_VERSION, self._engine_id, self.incarnation, session.nonce, tag, takes_records))

    def _check_proof(self, name: bytes, session: _Session, proof: Proof) -> None:
        if not hmac.compare_digest(proof.tag, client_tag(self._key, session.hello, session.nonce, self._place)):
            self._refuse(name, "tag")
        elif not self.source.accepts(session.hello.fingerprint):
            self._refuse(name, "fingerprint")
        else:
            session.is_proven = True

    def _answer(self, name: bytes, session: _Session, message: PeerRequest, frames: list[bytes]) -> None:
        match message:
            case Have():
                bits = self.source.has(session.hello.fingerprint, message.keys)
                self._send(name, Bitmap(message.ask_id, pack_bits(bits)))
            case Get():
                if len(session.pulls) >= MAX_PULLS:
                    self._refuse(name, "pulls")
                elif message.keys:
                    session.pulls.append(_Pull(message, message.credit, time.monotonic() + LEASE_WAIT_S))
            case Credit():
                for pull in session.pulls:
                    if pull.order.get_id == message.get_id:
                        pull.credit = min(MAX_CREDIT, pull.credit + message.num_blocks)
            case Renew():
                self.source.renew(message.leases, time.monotonic())
            case Release():
                self.source.release(message.leases)
            case Watch():
                changes = self.source.find_changes(session.hello.fingerprint, message.cursor)
                if changes is None:
                    self._refuse(name, "watch")
                else:
                    self._send(name, changes)
            case Put() | Drop():
                is_whole = bool(frames) == isinstance(message, Put)
                if not self.source.takes_records or session.num_puts >= PUT_CREDIT or not is_whole:
                    self._refuse(name, "puts")
                    return
                session.num_puts += 1
                report = partial(self._end_put, name, session, message.put_id)
                if isinstance(message, Put):
                    self.source.put(session.hello.fingerprint, frames, report)
                else:
                    self.source.drop(session.hello.fingerprint, report)

    def _end_put(self, name: bytes, session: _Session, put_id: int, outcome: str) -> None:
        """Takes the outcome of a put or a drop, on any thread."""
        self._taken.append((name, session, Taken(put_id, outcome)))
        self.wake()

    def _answer_puts(self) -> None:
        while self._taken:
            name, session, answer = self._taken.popleft()
            session.num_puts -= 1
            if self._sessions.get(name) is session:
                self._send(name, answer)

    # -- blocks ------------------------------------------------------------------------------------------------

    def _send_blocks(self, now: float) -> bool:
        """Sends a block of each session that has credit. Returns whether there is more to send."""
        has_more = False
        for name, session in list(self._sessions.items()):
            if session.pulls:
                try:
                    has_more |= self._send_block(name, session, now)
                except Exception:
                    logger.exception("the server of KV blocks ends a session")
                    self._refuse(name, "session")
        return has_more

    def _send_block(self, name: bytes, session: _Session, now: float) -> bool:
        """Sends a block of the first pull that has credit. Returns whether there is more to send."""
        for pull in session.pulls:
            if not pull.credit:
                continue
            order = pull.order
            if now < pull.wait_until and self.source.is_expected(order.lease):
                continue
            failpoint("kv.peer.send")
            record = self.source.read(session.hello.fingerprint, order.lease, order.keys[pull.index])
            if record is None:
                self._send(name, Gone(order.get_id, pull.index))
                session.pulls.remove(pull)
            else:
                self._send(name, Block(order.get_id, pull.index), *record)
                pull.index, pull.credit = pull.index + 1, pull.credit - 1
                if pull.index == len(order.keys):
                    session.pulls.remove(pull)
            return True
        return False

    def _refuse(self, name: bytes, what: str) -> None:
        self._sessions.pop(name, None)
        self._send(name, Refused(what))

    def _send(self, name: bytes, message: PeerAnswer, *frames: bytes | memoryview) -> None:
        try:
            parts = [name, msgspec.msgpack.encode(message), *frames]
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=not frames)
        except zmq.ZMQError:  # it has left
            self._sessions.pop(name, None)
