"""What passes between a server and its API processes: how each is started, and what they ask one another.

The way is a pair of connected Unix sockets, the process's standard input one of them: a message is its length and
msgpack. What ends one of the two processes ends the connection, and so is seen by the other.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from quire.wire.handshake import PROTOCOL_VERSION, ClientAddresses

LENGTH = struct.Struct("<I")
"""Before each message: its bytes."""
MAX_PEER_BYTES = 1 << 29
"""A longer message is none."""
PARENT = 0
"""The target that is the parent; the API processes are numbered from 1, as clients of the core are."""
EVERYBODY = -1
"""The target that is all other API processes."""


class ApiLaunch(msgspec.Struct, frozen=True):
    """The first message to an API process: all it needs to serve. Every field is sent."""

    index: int
    """From 1: its number among the processes, and as a client of the core."""
    num_processes: int
    parent_pid: int
    engine_config: bytes
    """`quire.config.server.encode_config`."""
    server_config: bytes
    """The same of the `ServerConfig`, without keys."""
    key_digests: tuple[bytes, ...]
    salt_secret: bytes
    """What cache salts are made with: one for all processes, or they would not share cached prefixes."""
    created: int
    """When the server was started, as /v1/models tells."""
    client: ClientAddresses
    listener: int
    """The descriptor of the socket to accept connections from; all processes share it."""
    admin_listener: int | None
    urls: tuple[str, str | None]
    """Of the two, as people are told."""
    counts_path: str
    """The file of the `SharedCounts`."""
    metrics_path: str = ""
    """Unused: metrics are calls like all others. The field goes when the protocol version next changes."""
    protocol_version: int = PROTOCOL_VERSION


class PeerMessage(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A call, with a `method`, or the answer to one, without. A call of number 0 is not answered."""

    call_id: int
    method: str = ""
    target: int = PARENT
    """Whom a call of an API process is for."""
    args: tuple[Any, ...] = ()
    result: Any = None
    error_type: str = ""
    """Of an answer that is an error: the name of its class in `quire.errors`; empty for one that is not ours."""
    error: str = ""
    """Why the call failed; empty where it did not."""


def encode_peer(message: ApiLaunch | PeerMessage) -> bytes:
    """The bytes to send."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
