"""Sockets: private on one host, authenticated between hosts."""

from __future__ import annotations

import contextlib
import os
import socket as system_sockets
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from quire.errors import ConfigError
from quire.wire.engine_core import EngineCoreOutput
from quire.wire.nodes import derive_keys
from quire.wire.serial import MsgpackDecoder, MsgpackEncoder
from quire.wire.sockets import (
    MAX_MESSAGE_BYTES,
    OWNER_LOCK,
    CurveDoor,
    CurveKeys,
    SocketDirectory,
    bind_network,
    bound_address,
    has_listener,
    hold_port,
    make_public_socket,
    make_zmq_socket,
)
from quire.wire.worker_link import SecureEnd

ARRIVES_MS = 120_000
STAYS_OUT_MS = 300
"""Long enough for a handshake on this host many times over."""


class Sockets:
    """Makes sockets of one context, and closes them at the end."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._open: list[zmq.Socket[Any]] = []

    def make(self, address: str, socket_type: int, **options: Any) -> zmq.Socket[Any]:
        self._open.append(make_zmq_socket(self.context, address, socket_type, **options))
        return self._open[-1]

    def close(self) -> None:
        for socket in self._open:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


@pytest.fixture
def directory() -> Iterator[SocketDirectory]:
    directory = SocketDirectory()
    yield directory
    directory.remove()


def _arrives(socket: zmq.Socket[Any], timeout_ms: int = ARRIVES_MS) -> bytes | None:
    return socket.recv() if socket.poll(timeout_ms) else None


# -- ipc -----------------------------------------------------------------------------------------------------------


def test_the_directory_is_for_its_user_alone_and_removed(directory: SocketDirectory, sockets: Sockets) -> None:
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    sockets.make(directory.endpoint("out"), zmq.PULL)
    assert (directory.path / "out").is_socket()
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_two_directories_are_two(directory: SocketDirectory) -> None:
    other = SocketDirectory()
    assert other.path != directory.path
    other.remove()


def test_what_a_killed_owner_left_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live = SocketDirectory()
    left = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from quire.wire.sockets import SocketDirectory; d = SocketDirectory(); "
            "(d.path / 'input').touch(); print(d.path, flush=True); os._exit(9)",
        ],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    assert Path(left).is_dir()
    (tmp_path / "quire-of-somebody").mkdir()
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / OWNER_LOCK).touch()
    (tmp_path / "quire-link").symlink_to(target)
    following = SocketDirectory()
    assert not Path(left).exists()
    assert live.path.is_dir()  # its owner lives
    assert (tmp_path / "quire-of-somebody").is_dir()  # it was never locked
    assert target.is_dir()  # a link is not followed
    live.remove()
    following.remove()


def test_a_path_the_system_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch, directory: SocketDirectory) -> None:
    directory.path = Path("/tmp") / ("x" * 200)
    with pytest.raises(ConfigError, match="TMPDIR"):
        directory.endpoint("input")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may become another user")
def test_another_user_cannot_connect(directory: SocketDirectory, sockets: Sockets) -> None:
    endpoint = directory.endpoint("out")
    sockets.make(endpoint, zmq.PULL)
    code = (
        "import os, socket, sys\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect(sys.argv[1])\nexcept PermissionError: sys.exit(7)"
    )
    run = subprocess.run([sys.executable, "-c", code, endpoint.removeprefix("ipc://")], timeout=60, check=False)
    assert run.returncode == 7


def test_messages_pass_without_a_copy(directory: SocketDirectory, sockets: Sockets) -> None:
    """A large array is sent from where it is, and read where it arrived."""
    array = np.arange(1 << 20, dtype=np.float32)
    endpoint = directory.endpoint("out")
    receiver = sockets.make(endpoint, zmq.PULL)
    sender = sockets.make(endpoint, zmq.PUSH)
    sender.send_multipart(MsgpackEncoder().encode(EngineCoreOutput("a", [1], pooling_output=array)), copy=False)
    assert receiver.poll(ARRIVES_MS)
    frames = [frame.buffer for frame in receiver.recv_multipart(copy=False)]
    output = MsgpackDecoder(EngineCoreOutput).decode(frames)
    assert output.pooling_output is not None
    assert np.array_equal(output.pooling_output, array)
    assert np.shares_memory(output.pooling_output, np.frombuffer(frames[1], dtype=np.float32))


def test_sockets_have_the_options_of_their_type(directory: SocketDirectory, sockets: Sockets) -> None:
    """Binding by type, identity, linger, no high-water mark, a bound on what is read."""
    router = sockets.make(directory.endpoint("in"), zmq.ROUTER, linger_ms=5000)
    dealer = sockets.make(directory.endpoint("in"), zmq.DEALER, bind=False, identity=b"\x01\x00")
    assert (router.getsockopt(zmq.LINGER), dealer.getsockopt(zmq.LINGER)) == (5000, 0)
    assert router.getsockopt(zmq.SNDHWM) == dealer.getsockopt(zmq.RCVHWM) == 0
    assert router.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
    dealer.send(b"hello")
    assert router.poll(ARRIVES_MS)
    assert router.recv_multipart() == [b"\x01\x00", b"hello"]


def test_a_socket_that_cannot_be_bound_is_closed(sockets: Sockets) -> None:
    with pytest.raises(zmq.ZMQError):
        sockets.make("ipc:///nowhere/at/all", zmq.PULL)
    sockets.context.term()  # would wait for a socket that was left open


# -- tcp -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("socket_type", [zmq.PULL, zmq.PUSH])
def test_tcp_without_keys_is_refused(sockets: Sockets, socket_type: int) -> None:
    with pytest.raises(ConfigError, match="CURVE"):
        sockets.make("tcp://127.0.0.1:0", socket_type)


class Tcp:
    """A bound socket whose door lets one key in."""

    def __init__(self, sockets: Sockets, with_door: bool = True) -> None:
        self.sockets = sockets
        self.ours, self.theirs = CurveKeys.make_pair()
        if with_door:
            CurveDoor(sockets.context, [self.ours.peer_public])
        self.socket = sockets.make("tcp://127.0.0.1:*", zmq.PULL, curve=self.ours)
        self.address = bound_address(self.socket)

    def send(self, keys: CurveKeys, text: bytes) -> None:
        self.sockets.make(self.address, zmq.PUSH, curve=keys).send(text)


def test_the_right_keys_get_through(sockets: Sockets) -> None:
    tcp = Tcp(sockets)
    assert tcp.address.startswith("tcp://127.0.0.1:")
    assert not tcp.address.endswith((":0", ":*"))
    tcp.send(tcp.theirs, b"right")
    assert _arrives(tcp.socket) == b"right"


def test_foreign_keys_get_nothing_through(sockets: Sockets) -> None:
    tcp = Tcp(sockets)
    public, secret = zmq.curve_keypair()
    tcp.send(CurveKeys(public, secret, public), b"knows nothing")
    tcp.send(CurveKeys(public, secret, tcp.ours.public), b"knows the server's public key")
    tcp.send(CurveKeys(tcp.theirs.public, secret, tcp.ours.public), b"claims another's public key")
    with sockets.context.socket(zmq.PUSH) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(tcp.address)
        plain.send(b"no keys at all")
        assert _arrives(tcp.socket, STAYS_OUT_MS) is None
    tcp.send(tcp.theirs, b"right")
    assert _arrives(tcp.socket) == b"right"


def test_without_a_door_nobody_gets_in(sockets: Sockets) -> None:
    tcp = Tcp(sockets, with_door=False)
    tcp.send(tcp.theirs, b"right")
    assert _arrives(tcp.socket, STAYS_OUT_MS) is None


def test_what_a_foreign_server_says_is_not_heard(sockets: Sockets) -> None:
    """Authentication is mutual: a client with the right keys does not talk to a server with others."""
    tcp = Tcp(sockets)
    public, secret = zmq.curve_keypair()
    keys = CurveKeys(public, secret, tcp.theirs.public)
    foreign = sockets.make("tcp://127.0.0.1:*", zmq.PULL, curve=keys)
    sockets.make(bound_address(foreign), zmq.PUSH, curve=tcp.theirs).send(b"secret")
    assert _arrives(foreign, STAYS_OUT_MS) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_private_socket_may_have_a_network_address_too(
    directory: SocketDirectory, sockets: Sockets, host: str
) -> None:
    """The private one takes no keys, the other refuses a peer without."""
    ours, theirs = derive_keys(bytes(32), 5.0)
    CurveDoor(sockets.context, [ours.peer_public])
    private = directory.endpoint("both")
    socket = sockets.make(private, zmq.PULL, bind=True)
    try:
        bind_network(socket, f"tcp://{host}:*", ours)
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    public = bound_address(socket)
    with sockets.context.socket(zmq.PUSH) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.setsockopt(zmq.IPV6, 1)
        plain.connect(public)
        plain.send(b"no keys at all")
        assert _arrives(socket, STAYS_OUT_MS) is None
    sockets.make(private, zmq.PUSH).send(b"private")
    assert _arrives(socket) == b"private"
    sockets.make(public, zmq.PUSH, curve=theirs).send(b"right")
    assert _arrives(socket) == b"right"
    with pytest.raises(ConfigError, match=r"cannot be listened on: .*in use"):
        bind_network(sockets.make(directory.endpoint("other"), zmq.PULL, bind=True), public, ours)


@pytest.mark.skipif(sys.platform != "linux", reason="ports can be held on Linux alone")
def test_a_held_port_is_for_one_that_names_it() -> None:
    """A process may listen at the port by name, again and again. A program that wants any port gets another."""
    port, held = hold_port("127.0.0.1")
    with held:
        for _ in range(2):
            end = SecureEnd(f"tcp://127.0.0.1:{port}", bytes(32), 5.0, bind=True)
            assert end.port == port
            end.close()
            with system_sockets.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with system_sockets.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_socket_where_a_process_listens_is_not_taken_from_it(tmp_path: Path) -> None:
    """Only the file that a killed process has left behind is replaced."""
    address = f"ipc://{tmp_path}/socket"

    def bind() -> zmq.Socket[Any]:
        return make_public_socket(context, address, zmq.PUB, bind=True, high_water_mark=9, linger_ms=0)

    code = f"import os, zmq; s = zmq.Context().socket(zmq.PUB); s.bind({address!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with zmq.Context() as context, pytest.raises(zmq.ZMQError, match="Address already in use"):
            bind()
        other.kill()
    assert (tmp_path / "socket").exists()
    with zmq.Context() as context:
        bind().close()


def test_a_listener_with_a_full_queue_is_one(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    assert not has_listener(path)
    with system_sockets.socket(system_sockets.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(path)
        listener.listen(0)
        for _ in range(2):
            other = waiting.enter_context(system_sockets.socket(system_sockets.AF_UNIX))
            other.setblocking(False)
            other.connect_ex(path)
        assert has_listener(path)
    assert not has_listener(path)


def test_each_pair_of_keys_is_new() -> None:
    first, second = CurveKeys.make_pair()
    assert len({first.public, first.secret, second.public, second.secret}) == 4
    assert (first.peer_public, second.peer_public) == (second.public, first.public)
