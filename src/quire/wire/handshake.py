"""The handshake of a core process and its frontend.

On the handshake socket: the core sends HELLO, the frontend answers with `EngineHandshakeMetadata`, the core starts and
sends READY, or FAILED with the reason. All other traffic is on the input and output sockets named in the metadata; the
first frame on each input socket is the core's `EngineCoreReadyResponse`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.errors import ConfigError
from quire.wire.group import GroupNetwork, HubLaunch
from quire.wire.sockets import CurveKeys

PROTOCOL_VERSION = 3
"""Version of everything in `wire/`. Both sides must have the same: other versions are refused."""

HANDSHAKE_TIMEOUT_S = 300.0
"""Seconds that a core waits for the answer to its HELLO (HANDSHAKE_TIMEOUT_MINS = 5)."""
HANDSHAKE_LINGER_MS = 5000
OUTPUT_LINGER_MS = 4000

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The last message of a core that failed, on every output socket: this single frame."""


COORDINATOR = -1
"""Index that stands for the coordinator among the clients of a core."""
COORDINATOR_READY = b"READY"
"""Answer of the coordinator to a subscription."""
SUBSCRIPTION = b"\x01"
"""Subscription of an XSUB socket to everything."""


def engine_identity(engine_index: int) -> bytes:
    """Returns the DEALER identity of a core: its index, 2 bytes, little-endian."""
    return engine_index.to_bytes(2, "little")


class EngineZmqAddresses(msgspec.Struct, omit_defaults=True):
    """Addresses a core connects to: one input and one output per frontend, by client index."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class ClientAddresses(msgspec.Struct, frozen=True):
    """Addresses and keys for a further frontend of an engine core: plain values, to be passed on as its process
    likes."""

    client_index: int
    input_address: str
    output_address: str
    is_judged: bool = False
    """True if the process that starts the core reports its deaths, and tries the suspects (`MemberLink`)."""
    board_path: str = ""
    """Page of the loads of all clients (`LoadBoard`); empty: there is none."""


class CoordinatorAddresses(msgspec.Struct, frozen=True):
    """Addresses of the coordinator's sockets: for clients, for engines, and for the notices of engines."""

    front: str
    back: str
    intake: str


class CoordinatorLaunch(msgspec.Struct, frozen=True):
    """Values that a coordinator process is started with."""

    addresses: CoordinatorAddresses
    num_expected: int
    """Engines that have subscribed before it first answers; 1 for one that takes another's place."""
    parent_pid: int
    curve: CurveKeys | None = None
    group: HubLaunch | None = None
    """The hub of engines on several machines that share experts; None: there are none."""


class EngineStatus(msgspec.Struct):
    """A message of a core on the handshake socket. Every field is sent: a default of the sender may not be the
    receiver's."""

    status: Literal["HELLO", "READY", "FAILED"]
    local: bool = True
    headless: bool = False
    protocol_version: int = PROTOCOL_VERSION
    pid: int = 0
    error_type: str = ""
    """With FAILED: name of the error's class in `quire.errors`; empty for another error."""
    message: str = ""
    """With FAILED: the reason."""
    parallel_config_hash: str | None = None


class EngineHandshakeMetadata(msgspec.Struct):
    """The frontend's answer to HELLO. Every field is sent, as in `EngineStatus`."""

    addresses: EngineZmqAddresses
    engine_config: bytes
    """Result of `quire.config.server.encode_config`."""
    incarnation: int = 0
    """0 for the first core process of an engine, one more after each restart."""
    log_stats: bool = True
    heartbeat_path: str | None = None
    """Path of the `HeartbeatPage`; None for a core without a supervisor."""
    protocol_version: int = PROTOCOL_VERSION
    parallel_config: dict[str, Any] = {}
    without_drafts: bool = False
    """True: this core must not speculate."""
    group_file: str | None = None
    """Page of the engines that this one steps together with (`DPGroup`); None for an independent engine."""
    experts_file: int = -1
    """Descriptor that the core has inherited, of the file of engines that share experts; -1: they share none."""
    curve: CurveKeys | None = None
    """The core's keys for network addresses; None: there are none."""
    experts_generation: int = 0
    """Number of the group of engines that share experts."""
    is_scale_up_launch: bool = False
    """True for an engine that is started for a group which does not compute yet."""
    group_network: GroupNetwork | None = None
    """The hub of a group on several machines that share experts; None: the group is in `group_file`, or there is
    none."""


def check_protocol_version(theirs: int, who: str) -> None:
    """Raises ConfigError if the other side ("the engine core", "the frontend") has another version of the protocol."""
    if theirs != PROTOCOL_VERSION:
        raise ConfigError(
            f"{who} speaks protocol version {theirs}, this process speaks {PROTOCOL_VERSION}; "
            "run the same version of Quire on both sides"
        )
