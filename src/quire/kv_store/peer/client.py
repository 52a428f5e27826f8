"""Asks block servers for blocks. Connections are kept for the next use; each is used by one thread at a time."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from quire.errors import ConfigError
from quire.failpoints import failpoint
from quire.wire.kv_peers import (
    MAX_RECORD_BYTES,
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
    Taken,
    Watch,
    Welcome,
    client_tag,
    curve_keys,
    place_of,
    server_tag,
    unpack_bits,
)
from quire.wire.sockets import is_private, make_peer_socket

SILENCE_S = 2.0
"""Time without an answer after which a peer is given up."""
CONNECT_S = 0.5
CREDIT = 8
"""Blocks that are on their way at once."""
POLL_MS = 10
"""Longest time until a cancel is seen."""
MAX_IDLE = 4
"""Most connections per address that are kept for the next use."""

_NAME = re.compile(r"ipc://.+|[A-Za-z0-9._-]+")

Answer = TypeVar("Answer", Welcome, Bitmap, Taken, Changes)
Result = TypeVar("Result")
Record = tuple[bytes | memoryview, memoryview]
"""Header with tag, and payload."""


class PeerError(Exception):
    """A peer cannot be used. `reason`: unreachable, silent, refused, stale, format, gone or cancelled."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PeerList:
    """The hosts from which blocks may be taken: addresses, networks (CIDR), names, and ipc:// paths."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ConfigError."""
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: set[str] = set()
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError:
                if not _NAME.fullmatch(entry):
                    raise ConfigError(
                        f"peers: {entry!r} is no host and no network; give addresses, networks as 10.0.0.0/8, or names"
                    ) from None
                self._names.add(entry.lower())

    def find_address(self, host: str | None, port: int | None) -> str | None:
        """Returns the address of a host that is in the list; None for another, whatever a request says."""
        if not host:
            return None
        if host.lower().startswith("ipc://"):
            return host if host.lower() in self._names else None
        if port is None or not 0 < port <= 0xFFFF:
            return None
        try:
            ip = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return f"tcp://{host}:{port}" if host.lower() in self._names else None
        if not any(ip in network for network in self._networks):
            return None
        return f"tcp://[{ip}]:{port}" if ip.version == 6 else f"tcp://{ip}:{port}"


class PeerConnection:
    """A session with one server. Methods raise PeerError, after which it must be closed."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        key: bytes,
        hello: Hello,
        is_cancelled: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s`: time in which the session must have begun; None: CONNECT_S, and SILENCE_S for the answer."""
        self.address = address
        self.is_cancelled = is_cancelled
        """Returns whether the thread that uses the session waits no longer. Set anew for each use."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._decoder: msgspec.msgpack.Decoder[PeerAnswer] = msgspec.msgpack.Decoder(PeerAnswer)
        self._next_id = 0
        try:
            place = place_of(address)  # and checks the address
            _probe(address, CONNECT_S if timeout_s is None else min(CONNECT_S, max(0.001, timeout_s)))
            self._socket = make_peer_socket(
                context, address, zmq.DEALER, curve_keys(key)[1], bind=False, max_message_bytes=MAX_RECORD_BYTES,
                high_water_mark=64,
            )  # fmt: skip
        except (zmq.ZMQError, OSError, ConfigError) as e:
            raise PeerError("unreachable", f"{address}: {e}") from None
        try:
            left = None if deadline is None else deadline - time.monotonic()
            welcome = self._greet(key, hello, place if is_private(address) else "", left)
        except BaseException:
            self.close()
            raise
        self.incarnation = welcome.incarnation
        """Name of the server's start."""
        self.takes_records = welcome.takes_records
        """True: records may be put."""

    def _greet(self, key: bytes, hello: Hello, place: str, timeout_s: float | None) -> Welcome:
        self.send(hello)
        welcome = self._await(Welcome, timeout_s)
        expected = server_tag(key, hello, welcome.nonce, welcome.incarnation, place)
        if welcome.version != PEER_VERSION or not hmac.compare_digest(welcome.tag, expected):
            raise PeerError("refused", f"{self.address} has another key")
        self.send(Proof(client_tag(key, hello, welcome.nonce, place)))
        return welcome

    def close(self) -> None:
        """Ends the session."""
        self._socket.close(linger=0)

    def have(self, keys: Sequence[RecordName], timeout_s: float | None = None) -> list[bool]:
        """Returns which blocks the server has."""
        self._next_id += 1
        self.send(Have(self._next_id, list(keys)))
        bitmap = self._await(Bitmap, timeout_s)
        return unpack_bits(bitmap.bits, len(keys))

    def fetch(self, lease: str, keys: Sequence[RecordName]) -> Iterator[tuple[memoryview, memoryview]]:
        """Asks for blocks, and returns their records in order: header with tag, and payload. They are not verified."""
        self._next_id += 1
        self.send(Get(self._next_id, lease, list(keys), CREDIT))
        return self._take_blocks(self._next_id, len(keys))

    def _take_blocks(self, get_id: int, count: int) -> Iterator[tuple[memoryview, memoryview]]:
        for index in range(count):
            answer, frames = self._receive()
            failpoint("kv.peer.receive")
            if isinstance(answer, Gone):
                raise PeerError("gone", f"{self.address} has lost block {index}")
            if not isinstance(answer, Block) or len(frames) != 2 or (answer.get_id, answer.index) != (get_id, index):
                raise PeerError("format", f"{self.address} sent another message than block {index}")
            yield frames[0], frames[1]
            del frames
            if index + CREDIT < count:
                self.send(Credit(get_id, 1))

    def put(self, records: Iterable[tuple[int, Record]]) -> Iterator[tuple[int, str]]:
        """Puts numbered records, and returns their outcomes (`Taken`) in order. A record is taken from `records` when
        it can be sent: few are on their way at once."""
        sent: deque[int] = deque()
        for number, (head, payload) in records:
            if len(sent) == PUT_CREDIT:
                yield self._await_taken(sent.popleft())
            failpoint("kv.peer.put")
            pieces = [payload[i : i + MAX_REQUEST_BYTES] for i in range(0, len(payload), MAX_REQUEST_BYTES)]
            self.send(Put(number), head, *pieces)
            sent.append(number)
        while sent:
            yield self._await_taken(sent.popleft())

    def drop(self, timeout_s: float) -> str:
        """Deletes all records of the session's fingerprint. Returns DROPPED, or why they are not deleted."""
        self.send(Drop(0))
        return self._await(Taken, timeout_s).outcome

    def watch(self, cursor: Cursor) -> Changes:
        """Returns which blocks of the session's fingerprint were added and removed since a cursor."""
        self.send(Watch(cursor))
        return self._await(Changes)

    def _await_taken(self, number: int) -> tuple[int, str]:
        taken = self._await(Taken)
        if taken.put_id != number:
            raise PeerError("format", f"{self.address} answers for another record than {number}")
        return number, taken.outcome

    # -- messages ----------------------------------------------------------------------------------------------

    def send(self, message: PeerRequest, *frames: bytes | memoryview) -> None:
        """Sends what needs no answer, or what is answered later."""
        try:
            self._socket.send_multipart([msgspec.msgpack.encode(message), *frames], zmq.NOBLOCK, copy=not frames)
        except zmq.ZMQError as e:
            raise PeerError("silent", f"{self.address}: {e}") from None

    def _await(self, kind: type[Answer], timeout_s: float | None = None) -> Answer:
        answer, _ = self._receive(timeout_s)
        if not isinstance(answer, kind):
            raise PeerError("format", f"{self.address} sent {type(answer).__name__} and not {kind.__name__}")
        return answer

    def _receive(self, timeout_s: float | None = None) -> tuple[PeerAnswer, list[memoryview]]:
        timeout_s = SILENCE_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(POLL_MS):
            if self.is_cancelled():
                break
            if time.monotonic() >= deadline:
                raise PeerError("silent", f"{self.address} has not answered for {timeout_s:.2f} s")
        if self.is_cancelled():
            raise PeerError("cancelled", f"{self.address}: cancelled")
        first, *frames = self._socket.recv_multipart(copy=False)
        try:
            answer = self._decoder.decode(first.buffer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise PeerError("format", f"{self.address}: {e}") from None
        if isinstance(answer, Refused):
            reason = "stale" if answer.field == "session" else "refused"
            raise PeerError(reason, f"{self.address} refuses: {answer.field} does not fit")
        failpoint("kv.peer.answer", type(answer).__name__)
        return answer, [frame.buffer for frame in frames]


def retry_stale(call: Callable[[], Result]) -> Result:
    """Returns what `call` returns, which takes a connection: those from before a restart of the server are tried and
    dropped. Raises PeerError."""
    for _ in range(MAX_IDLE):
        try:
            return call()
        except PeerError as e:
            if e.reason != "stale":
                raise
    return call()


def _probe(address: str, timeout_s: float) -> None:
    """Raises OSError if nothing listens: the socket itself would try again for ever."""
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()


def _never() -> bool:
    return False


class PeerClient:
    """The connections of one engine to its peers. Callable from any thread."""

    def __init__(self, key: bytes, engine_id: str) -> None:
        self._key, self._engine_id = key, engine_id
        self._context: zmq.Context[Any] = zmq.Context()
        self._idle: dict[tuple[str, bytes], list[PeerConnection]] = {}
        self._num_lent = 0
        self._lock = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def connect(
        self,
        address: str,
        fingerprint: bytes,
        incarnation: str = "",
        is_cancelled: Callable[[], bool] = _never,
        timeout_s: float | None = None,
    ) -> Iterator[PeerConnection]:
        """Lends a connection; one that has failed is closed. `incarnation`: the one that the server must have;
        `is_cancelled` ends what it waits for; `timeout_s`: as of a `PeerConnection`. Raises PeerError."""
        with self._lock:
            if self._is_closed:
                raise PeerError("cancelled", "the engine ends")
            self._num_lent += 1
            idle = self._idle.get((address, fingerprint), [])
            connection = idle.pop() if idle else None
            while connection is not None and incarnation not in ("", connection.incarnation):
                connection.close()
                connection = idle.pop() if idle else None
        is_good = False
        try:
            if connection is None:
                hello = Hello(PEER_VERSION, fingerprint, self._engine_id, secrets.token_bytes(32))
                connection = PeerConnection(self._context, address, self._key, hello, is_cancelled, timeout_s)
            if incarnation and connection.incarnation != incarnation:
                raise PeerError("stale", f"{address} was started again since it promised the blocks")
            connection.is_cancelled = is_cancelled
            yield connection
            is_good = True
        finally:
            self._give_back(connection, fingerprint, is_good=is_good)

    def _give_back(self, connection: PeerConnection | None, fingerprint: bytes, *, is_good: bool) -> None:
        with self._lock:
            self._num_lent -= 1
            if connection is not None:
                idle = self._idle.setdefault((connection.address, fingerprint), [])
                if is_good and not self._is_closed and len(idle) < MAX_IDLE:
                    connection.is_cancelled = _never  # the former holds what its transfer holds
                    idle.append(connection)
                else:
                    connection.close()
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        """Ends the context when the last connection is closed. The caller holds the lock."""
        if self._is_closed and not self._num_lent:
            self._context.term()

    def close(self) -> None:
        """Closes what is idle; what is in use is closed when it is given back. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()
            self._end_if_idle()
