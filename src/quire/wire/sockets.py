"""ZMQ sockets, private by default (promise P20).

On one host: `ipc://` in a directory that only this user may enter. Between hosts: `tcp://`, and then every connection
is encrypted and authenticated with CURVE (RFC 26/ZMTP-CURVE) and keys that both sides were given beforehand. The
binding side also needs a `CurveDoor`: without one it refuses every peer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import math
import os
import shutil
import socket
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.utils.z85

from quire.errors import ConfigError

MAX_MESSAGE_BYTES = 1 << 30
"""Longest frame; a longer one ends its connection before it is read."""
MAX_REQUEST_BYTES = 1 << 12
"""Longest frame of a request to a public socket."""
ZAP_DOMAIN = b"quire"
BEATS_PER_SILENCE = 10
"""Number of signs of life that zmq exchanges in the time after which a connection is given up."""
BINDS_BY_DEFAULT = frozenset(t for t in zmq.SocketType if t not in (zmq.PUSH, zmq.SUB, zmq.XSUB))


DIRECTORY_PREFIX = "quire-"
OWNER_LOCK = "owner.lock"


class CurveKeys(msgspec.Struct, frozen=True):
    """Keys of one side of an authenticated connection: its own pair and the other's public key (Z85 text)."""

    public: bytes
    secret: bytes
    peer_public: bytes
    silence_s: float = 0.0
    """Silence after which both sides give a connection up; 0: they never do."""

    @staticmethod
    def make_pair() -> tuple[CurveKeys, CurveKeys]:
        """Makes keys of the binding side and of the connecting side."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return (
            CurveKeys(server_public, server_secret, client_public),
            CurveKeys(client_public, client_secret, server_public),
        )


def curve_pair(secret: bytes) -> tuple[bytes, bytes]:
    """Returns (public key, secret key) for 32 secret bytes."""
    text = zmq.utils.z85.encode(secret)
    return zmq.curve_public(text), text


class CurveDoor:
    """Admits exactly the peers with these public keys, for all sockets of a context (RFC 27/ZAP).

    One per context, made before its sockets are bound; its thread ends when the context is terminated.
    """

    def __init__(self, context: zmq.Context[Any], allowed: Iterable[bytes]) -> None:
        self._allowed = frozenset(zmq.utils.z85.decode(key) for key in allowed)
        own_view: zmq.Context[Any] = zmq.Context.shadow(
            context.underlying
        )  # what closes the other's sockets leaves ours
        self._socket = own_view.socket(zmq.REP)
        self._socket.bind("inproc://zeromq.zap.01")
        threading.Thread(target=self._run, name="CurveDoor", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        self._socket.close(linger=0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request_id, domain, _address, _identity, mechanism, *credentials = question
        is_known = mechanism == b"CURVE" and domain == ZAP_DOMAIN and credentials[0] in self._allowed
        verdict = [b"200", b"OK"] if is_known else [b"400", b"unknown key"]
        return [version, request_id, *verdict, b"", b""]


class SocketDirectory:
    """A directory of mode 0700 for `ipc://` endpoints and the heartbeat page; `remove` deletes it with its contents.

    Its owner holds a lock (flock(2)) in it. One whose owner was killed is deleted when the same user makes the next.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        unlocked = self.path / "owner.new"  # never seen under its final name without the lock
        self._lock: int | None = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / OWNER_LOCK)

    def endpoint(self, name: str) -> str:
        """Returns the address of a socket of this name. Raises ConfigError where the system allows no path that
        long."""
        path = str(self.path / name)
        if len(path.encode()) > zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(
                f"the socket path {path} is longer than the {zmq.IPC_PATH_MAX_LEN} bytes the system allows; "
                "set TMPDIR to a shorter directory"
            )
        return f"ipc://{path}"

    def remove(self) -> None:
        """Deletes the directory. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{DIRECTORY_PREFIX}*"):
        try:
            status = directory.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue
            lock = os.open(directory / OWNER_LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not one of ours, or deleted meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner is alive
        finally:
            os.close(lock)


def make_zmq_socket(
    context: zmq.Context[Any],
    address: str,
    socket_type: int,
    *,
    bind: bool | None = None,
    identity: bytes | None = None,
    linger_ms: int = 0,
    curve: CurveKeys | None = None,
) -> zmq.Socket[Any]:
    """Makes a socket without a high-water mark, bound or connected. The admitted requests limit what is queued.

    A receiver needs that too: libzmq stops reading for one that has reached its mark, and when the sender closes the
    connection then, it discards what the kernel still holds. Raises ConfigError for TCP without keys.
    """
    if address.startswith("tcp://") and curve is None:
        raise ConfigError(f"{address} is a network address and needs CURVE keys; use ipc:// on one host")
    socket: zmq.Socket[Any] = context.socket(socket_type)
    try:
        binds = socket_type in BINDS_BY_DEFAULT if bind is None else bind
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, linger_ms)
        if socket_type == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted core takes over the identity of the dead one
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        if curve is not None:
            _secure(socket, address, curve, is_server=binds)
        if binds:
            socket.bind(address)
        else:
            socket.connect(address)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def make_public_socket(
    context: zmq.Context[Any], address: str, socket_type: int, *, bind: bool, high_water_mark: int, linger_ms: int
) -> zmq.Socket[Any]:
    """Makes a socket whose messages other programs read, without encryption: what is beyond the mark is lost to a slow
    reader. It takes in short requests only. Raises zmq.ZMQError."""
    socket: zmq.Socket[Any] = context.socket(socket_type)
    try:
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.LINGER, linger_ms)
        (_bind if bind else zmq.Socket.connect)(socket, address)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def has_listener(path: str) -> bool:
    """Returns whether a process listens at a Unix socket. Another that binds its path would take its clients."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # many wait there
            return True
        except OSError:
            return False
    return True


def _bind(socket: zmq.Socket[Any], address: str) -> None:
    if address.startswith("ipc://") and has_listener(address.removeprefix("ipc://")):
        raise zmq.ZMQError(errno.EADDRINUSE)
    socket.bind(address)


def is_private(address: str) -> bool:
    """Returns whether an address leads no further than this machine: it is no network address, or a loopback one."""
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        return True
    try:
        return ipaddress.ip_address(rest.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def make_peer_socket(
    context: zmq.Context[Any],
    address: str,
    socket_type: int,
    curve: CurveKeys,
    *,
    bind: bool,
    max_message_bytes: int,
    high_water_mark: int = 0,
) -> zmq.Socket[Any]:
    """Makes a socket whose messages authenticate their senders. It is encrypted besides where `is_private` is False.

    `high_water_mark`: most messages that wait on either side; 0: any number. Raises zmq.ZMQError.
    """
    socket: zmq.Socket[Any] = context.socket(socket_type)
    try:
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.LINGER, 0)
        if socket_type == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error shows that a client has left
        if not is_private(address):
            _secure(socket, address, curve, is_server=bind)
        elif address.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        (_bind if bind else zmq.Socket.connect)(socket, address)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def bind_network(socket: zmq.Socket[Any], address: str, curve: CurveKeys) -> None:
    """Binds a socket to a network address, too. Its private addresses, bound before, stay as they are.

    Raises ConfigError if that is no address of this machine, or is in use.
    """
    _secure(socket, address, curve, is_server=True)
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        raise ConfigError(f"{address} cannot be listened on: {e}") from e


def bound_address(socket: zmq.Socket[Any]) -> str:
    """Returns the address a socket is bound to: with the port that the system chose, for `tcp://host:0`."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)  # a text option
    return endpoint.rstrip(b"\0").decode()


def hold_port(host: str) -> tuple[int, socket.socket]:
    """Returns a free port of this machine, and a socket that keeps it until it is closed, or its process has ended.

    That socket does not listen. Another process may listen at the port by name, and again later; sockets that name no
    port do not get it.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    port = held.getsockname()[1]
    if sys.platform != "linux":  # others let nothing listen beside it
        held.close()
    return port, held


def _secure(socket: zmq.Socket[Any], address: str, keys: CurveKeys, *, is_server: bool) -> None:
    if address.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    if keys.silence_s:
        silence_ms = math.ceil(1000 * keys.silence_s)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, silence_ms // BEATS_PER_SILENCE))
        for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HANDSHAKE_IVL, zmq.CONNECT_TIMEOUT):
            socket.setsockopt(option, silence_ms)
    if is_server:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a door no peer enters
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.peer_public)


def receive_event(monitor: zmq.Socket[Any]) -> tuple[int, int]:
    """Returns the number and the value of a monitor's next event (zmq_socket_monitor(3)). The function that pyzmq has
    for it would import asyncio, which an engine core does not need."""
    number, value = struct.unpack("=Hi", monitor.recv_multipart()[0])
    return number, value


class ConnectionState:
    """The state of the one connection that a socket makes, by its handshakes. Belongs to the socket's thread."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self.monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        """The socket that can be read when there is something to `follow`."""
        self.is_up = False
        self.was_up = False
        """True once the other side has proved that it has the key."""
        self.was_rejected = False
        """True once the other side has ended a connection without having proved it."""

    def follow(self) -> None:
        """Takes in what has become of the connection."""
        while self.monitor.poll(0):
            self.is_up = receive_event(self.monitor)[0] == zmq.Event.HANDSHAKE_SUCCEEDED
            self.was_up |= self.is_up
            self.was_rejected |= not self.was_up

    def close(self) -> None:
        """Ends the monitor, before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)
