"""The link of a server's head and the machines that have engines of it: messages, key and ports.

Both sides repeat their whole state every BEAT_INTERVAL_S, and at once when it changes: a message that is lost with its
connection needs no answer and no second sending. A node says NodeHello until it gets NodeWelcome or NodeRefusal. Then
it sends NodeReport, and the head HeadReport. A head that does not know a node asks it to say NodeHello again.

All of it goes over TCP with CURVE. The keys of both sides follow from one secret, the fleet's key.
"""

from __future__ import annotations

import hashlib
import secrets
import stat
from pathlib import Path

import msgspec
import zmq
import zmq.utils.z85

from quire.errors import ConfigError
from quire.wire.handshake import PROTOCOL_VERSION
from quire.wire.sockets import CurveKeys

BEAT_INTERVAL_S = 0.5
"""Interval of reports."""
NUM_PORTS = 3
"""Ports of a head: that of this link is the first, then come those to which cores connect, for inputs and outputs."""
_KEY_PREFIX = "quire-fleet-key-1:"
_KEY_BYTES = 32


class NodeHello(msgspec.Struct, tag="hello"):
    """A node that wants to serve with its engines. Every field is sent: another version's defaults may differ."""

    protocol_version: int
    first_engine: int
    num_engines: int
    data_parallel_size: int
    facts: dict[str, str]
    """Settings that must be the same on all machines, by the name of their flag."""
    host: str
    pid: int


class CoreEnd(msgspec.Struct, array_like=True):
    """The death of a core, as its supervisor has found it (`CoreDeath`)."""

    incarnation: int
    cause: str
    description: str
    request_ids: list[str] | None
    was_asked: bool = False
    is_planned: bool = False


class CoreReport(msgspec.Struct, array_like=True):
    """An engine of a node."""

    engine: int
    incarnation: int
    """Number of its present core."""
    pid: int | None
    restarts: dict[str, int]
    last_death: CoreEnd | None = None
    gone_reason: str = ""
    """Why no core will come any more; empty: they will."""


class NodeReport(msgspec.Struct, tag="report"):
    """State of a node."""

    cores: list[CoreReport]
    is_ending: bool = False
    """True: it was asked to end, and waits until others have taken over its requests."""
    has_ended: bool = False


class NodeRefusal(msgspec.Struct, tag="refusal"):
    """Why a node cannot serve with the head."""

    message: str


class NodeWelcome(msgspec.Struct, tag="welcome"):
    """Values that the cores of a node need to serve with the head."""

    first_incarnations: list[int]
    """Numbers of the first core of each engine: above those of all before it."""
    max_model_len: int | None = None
    """Context length that clients were promised; None: nothing yet."""


class NodeUnknown(msgspec.Struct, tag="unknown"):
    """The head does not know the node, or has given it up."""


class CoreOrder(msgspec.Struct, array_like=True):
    """Wishes of the head for an engine of a node."""

    engine: int
    is_needed: bool
    """Requests wait for it, or are with it."""
    connected: int = -1
    """Number of the last core that has connected; -1: none has."""
    num_restarts: int = 0
    """Restarts that operators have asked for so far."""
    num_gpu_blocks: int = 0
    """Size of the KV cache of that core, which later ones must have, too."""


class HeadReport(msgspec.Struct, tag="head"):
    """State of the head, as far as it concerns a node."""

    orders: list[CoreOrder]
    max_model_len: int | None = None
    is_draining: bool = False
    """True: the server ends once its requests have ended."""
    is_closing: bool = False
    """True: the server ends now."""
    knows_end: bool = False
    """True: the head has given the node's engines no requests since it learned that the node ends."""


FromNode = NodeHello | NodeReport
ToNode = NodeWelcome | NodeRefusal | NodeUnknown | HeadReport


class _AnyHello(msgspec.Struct):
    """Fields of every version of `NodeHello`."""

    type: str
    protocol_version: int


def read_hello_version(data: bytes) -> int | None:
    """Returns the protocol version of a NodeHello of any version; None for another message."""
    try:
        hello = msgspec.msgpack.decode(data, type=_AnyHello)
    except msgspec.MsgspecError:
        return None
    return hello.protocol_version if hello.type == "hello" else None


def is_own_version(version: int) -> bool:
    """Returns whether a node of this version can be understood."""
    return version == PROTOCOL_VERSION


def make_fleet_key() -> str:
    """Returns a new key of a fleet, as the text of a key file."""
    return _KEY_PREFIX + secrets.token_hex(_KEY_BYTES)


def read_fleet_key(path: str) -> bytes:
    """Reads a key file. Raises ConfigError for a file that others may read, or that holds no key."""
    file = Path(path)
    try:
        mode = file.stat().st_mode
        text = file.read_text(encoding="ascii").strip() if stat.S_ISREG(mode) else ""
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--fleet-key {path} cannot be read: {e}") from e
    if mode & 0o077:
        raise ConfigError(
            f"--fleet-key {path} has mode {stat.S_IMODE(mode):04o}: other users may use it; chmod 600 {path}, and make "
            "another key if somebody else has read it"
        )
    digits = text.removeprefix(_KEY_PREFIX)
    if digits == text or len(digits) != 2 * _KEY_BYTES:
        raise ConfigError(f"--fleet-key {path} holds no key of a fleet; quire fleet key > {path} makes one")
    try:
        return bytes.fromhex(digits)
    except ValueError as e:
        raise ConfigError(f"--fleet-key {path} holds no key of a fleet: {e}") from e


def derive_keys(fleet_key: bytes, silence_s: float) -> tuple[CurveKeys, CurveKeys]:
    """Returns the keys of the head, and those of the nodes and their cores. `silence_s` as in `CurveKeys`."""
    pairs = []
    for side in (b"head", b"node"):
        secret = zmq.utils.z85.encode(hashlib.sha256(b"quire fleet " + side + fleet_key).digest())
        pairs.append((zmq.curve_public(secret), secret))
    (head_public, head_secret), (node_public, node_secret) = pairs
    return (
        CurveKeys(head_public, head_secret, node_public, silence_s),
        CurveKeys(node_public, node_secret, head_public, silence_s),
    )


def network_addresses(host: str, port: int) -> list[str]:
    """Returns the addresses of a head: of this link, of inputs, of outputs."""
    shown = f"[{host}]" if ":" in host else host
    return [f"tcp://{shown}:{port + i}" for i in range(NUM_PORTS)]
