"""Engines on several machines that share experts: their agreement, and the messages of each with the hub of the group.

The hub is in the coordinator's process, on the first machine (`quire.coordinator`). An engine repeats its whole state
(RankState) whenever that changes, and when a connection begins: a message that is lost with its connection needs no
answer and no second sending. All of it goes over TCP with CURVE; the keys follow from the fleet's key: `nodes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import msgspec

from quire.wire.sockets import CurveKeys

NUM_GROUP_PORTS = 4
"""Ports of a head besides those of nodes.py, after them: two of the coordinator, the hub's, and that of the exchange of
hidden states."""


class Verdict(IntEnum):
    """The common next step of all engines after an agreement."""

    GO = 1
    """The wave goes on."""
    STOP = 2
    """None has requests: the wave is over."""
    PAUSE = 3
    """The same, because all are to pause."""


class Vote(NamedTuple):
    """Contribution of one engine to an agreement."""

    has_work: bool
    """True if it has requests that it may compute."""
    is_pausing: bool


def agree(votes: Iterable[Vote], any_paused: bool = False) -> Verdict | None:
    """Returns the verdict. While some engines are to pause and others do not know yet, all go on.

    `any_paused`: others are paused, and do not vote. Nothing is decided without them (None) but that all pause.
    """
    votes = tuple(votes)
    num_pausing = sum(vote.is_pausing for vote in votes)
    if any(vote.has_work for vote in votes) or 0 < num_pausing < len(votes):
        verdict = Verdict.GO
    else:
        verdict = Verdict.PAUSE if num_pausing else Verdict.STOP
    return None if any_paused and verdict is not Verdict.PAUSE else verdict


class Standing(IntEnum):
    """Standings of a rank, as it takes part in its group (`engine/dp_group.py` draws them)."""

    ABSENT = 0
    JOINING = 1
    PAUSED = 2
    MEMBER = 3


class RankState(msgspec.Struct, tag="state", frozen=True):
    """State of an engine. Every field is sent."""

    rank: int
    joins: int
    """Number of times that it has joined."""
    standing: Standing
    number: int
    """Number of the agreement that a member votes in."""
    vote: tuple[bool, bool] | None
    """Its `Vote`; None: a joining rank that is idle."""
    fingerprint: int
    """64 bits that are the same in all ranks which can share experts."""
    weights: int
    """Digest of its weights, 64 bits: nothing is decided while those of two ranks differ."""
    wave: int
    epoch: int
    """Greatest wave and greatest epoch that its machine knows of."""
    machine: bytes
    """Name of the file that it shares with other engines: the same means the same machine."""
    listens: str
    """Address at which it can listen for the exchange of hidden states; empty: at that of the first machine."""


class GroupWelcome(msgspec.Struct, tag="welcome", frozen=True):
    """The hub knows the rank."""

    wave: int


class GroupRefusal(msgspec.Struct, tag="refusal", frozen=True):
    """Why the rank cannot be in the group."""

    message: str


class GroupVerdict(msgspec.Struct, tag="verdict", frozen=True):
    """An agreement, for a rank that has voted in it or was admitted by it."""

    number: int
    joins: int
    """`RankState.joins` of the receiver: a rank that has joined again since is not in it."""
    verdict: Verdict
    wave: int
    """Wave of the group after it."""
    epoch: int
    session: bytes
    """Name of the epoch, which no other epoch has."""
    machines: list[list[int]]
    """Ranks on each machine, in ascending order."""
    address: str
    """Address of the exchange that the first rank has named; empty: that of the first machine."""


class EpochEnd(msgspec.Struct, tag="end", frozen=True):
    """The end of an epoch: no step of it can succeed any more."""

    epoch: int


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Nothing but a sign of life: sending it shows whether there is a connection."""


FromHub = GroupWelcome | GroupRefusal | GroupVerdict | EpochEnd | Ping

FROM_RANK: msgspec.msgpack.Decoder[RankState] = msgspec.msgpack.Decoder(RankState)
FROM_HUB: msgspec.msgpack.Decoder[FromHub] = msgspec.msgpack.Decoder(FromHub)


class GroupNetwork(msgspec.Struct, frozen=True):
    """Values that an engine needs to take part in a group on several machines."""

    hub: str
    """Address of the hub."""
    exchange: str
    """Address of the exchange of hidden states: the first machine listens there. Empty: where the first rank says."""
    fleet_key: bytes
    silence_s: float
    machine: bytes
    """Name of the machine, for this life of the process that starts its engines."""
    listens: str = ""
    """`RankState.listens`."""


class HubLaunch(msgspec.Struct, frozen=True):
    """Values that a coordinator needs to be the hub of a group on several machines."""

    size: int
    """Number of engines."""
    back: str
    intake: str
    """Addresses for engines of other machines, of what `CoordinatorAddresses` has for those of its own."""
    hub: str
    keys: CurveKeys


class GroupAddresses(NamedTuple):
    """Addresses of a head for its group: two of the coordinator, the hub's, and that of the exchange."""

    back: str
    intake: str
    hub: str
    exchange: str


def group_addresses(host: str, port: int) -> GroupAddresses:
    """Returns the addresses. `port` is the first that follows those of `nodes.network_addresses`."""
    shown = f"[{host}]" if ":" in host else host
    return GroupAddresses(*(f"tcp://{shown}:{port + i}" for i in range(NUM_GROUP_PORTS)))
