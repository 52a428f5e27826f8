"""Messages between engines, and between an engine and a block server: which KV blocks there are, and their bytes.

A client (DEALER) speaks first. Both sides prove that they have the key under which records are tagged; nothing else is
answered before.

    client                                 server
    Hello(fingerprint, nonce)          ->
                                       <-  Welcome(nonce, tag), or Refused
    Proof(tag)                         ->
    Have(keys)                         ->
                                       <-  Bitmap
    Get(lease, keys, credit)           ->
    Credit                             ->
                                       <-  Block + header and tag + payload, for each key in order; Gone ends it
    Renew(leases), Release(leases)     ->
    Put + header and tag + payload     ->
    Drop                               ->
                                       <-  Taken, for each of both in order
    Watch(cursor)                      ->
                                       <-  Changes

A server sends as many blocks as it has credit for, and takes PUT_CREDIT records of a session at once, if it takes any.
A record is what `kv_store/record.py` describes, and is verified as one that was read from a file, on either side.
"""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from quire.errors import ConfigError
from quire.wire.sockets import CurveKeys, curve_pair

PEER_VERSION = 2
MAX_KEYS = 1 << 14
"""Most keys of a message: blocks of 262,144 tokens where they have 16."""
MAX_CREDIT = 64
MAX_LEASES = 1 << 10
"""Most leases of a message."""
MAX_REQUEST_BYTES = 1 << 20
"""Longest frame of a client: MAX_KEYS take less, and a payload that is put has several."""
PUT_CREDIT = 4
"""Records of a session that may be put before the first of them is answered."""
DROPPED = "dropped"
"""Outcome of a `Drop`: no record is there that was before it."""
DROP_S = 5.0
"""Time in which a server must have dropped records."""
MAX_CHANGES = 1 << 12
"""Most blocks of an answer that were added, and most that were removed."""
MAX_RECORD_BYTES = 50 << 20
"""Longest frame of a server."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Nonce = Annotated[bytes, Meta(min_length=16, max_length=64)]
PeerName = Annotated[str, Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
RecordName = tuple[Annotated[int, Meta(ge=0, le=1 << 16)], Digest]
"""Group and digest of a block."""
RecordNames = Annotated[list[RecordName], Meta(max_length=MAX_KEYS)]
LeaseNames = Annotated[list[PeerName], Meta(max_length=MAX_LEASES)]


class Hello(Struct, array_like=True, tag="hello", gc=False):
    """Begins a session."""

    version: Number
    fingerprint: Digest
    engine_id: PeerName
    nonce: Nonce


class Proof(Struct, array_like=True, tag="proof", gc=False):
    """Proves that the client has the key."""

    tag: Digest


class Have(Struct, array_like=True, tag="have", gc=False):
    """Asks which blocks there are."""

    ask_id: Number
    keys: RecordNames


class Get(Struct, array_like=True, tag="get", gc=False):
    """Asks for blocks, in order."""

    get_id: Number
    lease: PeerName
    """Lease that holds them; empty: none does."""
    keys: RecordNames
    credit: Annotated[int, Meta(ge=1, le=MAX_CREDIT)] = 8
    """Blocks that may be sent at once."""


class Credit(Struct, array_like=True, tag="credit", gc=False):
    """Allows more blocks to be sent."""

    get_id: Number
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_CREDIT)]


class Renew(Struct, array_like=True, tag="renew", gc=False):
    """Prolongs leases."""

    leases: LeaseNames


class Release(Struct, array_like=True, tag="release", gc=False):
    """Ends leases."""

    leases: LeaseNames


class Put(Struct, array_like=True, tag="put", gc=False):
    """Gives a record; its frames follow: header with tag, then the payload, in frames of MAX_REQUEST_BYTES at most."""

    put_id: Number


class Drop(Struct, array_like=True, tag="drop", gc=False):
    """Deletes all records of the session's fingerprint, if records are taken."""

    put_id: Number


Cursor = tuple[Number, Number]
"""Numbers of the last added and of the last removed block that is known; (0, 0): nothing is."""
NO_CURSOR = 0, 0


class Watch(Struct, array_like=True, tag="watch", gc=False):
    """Asks which blocks were added and removed since a cursor. A server of leases refuses."""

    cursor: Cursor


class Welcome(Struct, array_like=True, tag="welcome", gc=False):
    """Proves that the server has the key."""

    version: Number
    engine_id: PeerName
    incarnation: PeerName
    """Another one after each start: leases of an earlier one are gone."""
    nonce: Nonce
    tag: Digest
    takes_records: bool = False
    """True: records may be put."""


class Refused(Struct, array_like=True, tag="refused", gc=False):
    """Ends a session."""

    field: PeerName
    """Name of what does not fit: version, fingerprint, tag, message, pulls, puts, watch; session: it has ended."""


class Bitmap(Struct, array_like=True, tag="bitmap", gc=False):
    """Answers `Have`: a bit per key, the lowest bit of the first byte for the first."""

    ask_id: Number
    bits: Annotated[bytes, Meta(max_length=MAX_KEYS // 8)]


class Block(Struct, array_like=True, tag="block", gc=False):
    """A block; two frames follow: the record's header and tag, and its payload."""

    get_id: Number
    index: Number
    """Position in the keys that were asked for."""


class Gone(Struct, array_like=True, tag="gone", gc=False):
    """Ends a `Get`: this block and those after it cannot be had."""

    get_id: Number
    index: Number


class Taken(Struct, array_like=True, tag="taken", gc=False):
    """Answers a `Put`, after the record was written if it is to be, or a `Drop`."""

    put_id: Number
    outcome: PeerName
    """stored; present: it was there; DROPPED; or a reason: rate, full, error, or one of REJECTIONS."""


class Changes(Struct, array_like=True, tag="changes", gc=False):
    """Answers `Watch`: up to MAX_CHANGES of each kind, the next ones from `cursor` on."""

    added: RecordNames
    removed: RecordNames
    cursor: Cursor
    is_new: bool
    """True: what was known before is to be forgotten, because the cursor is too old, or of another start."""
    has_more: bool
    """True: there is more already."""


PeerRequest = Hello | Proof | Have | Get | Credit | Renew | Release | Put | Drop | Watch
PeerAnswer = Welcome | Refused | Bitmap | Block | Gone | Taken | Changes


def server_tag(key: bytes, hello: Hello, nonce: bytes, incarnation: str, place: str) -> bytes:
    """Returns the tag of a `Welcome`. `place`: the port or the path that the server listens at, so that a program at
    another one cannot pass messages on."""
    text = msgspec.msgpack.encode(["server", PEER_VERSION, hello.fingerprint, hello.nonce, nonce, incarnation, place])
    return hmac.digest(key, b"quire kv peer\n" + text, "sha256")


def client_tag(key: bytes, hello: Hello, nonce: bytes, place: str) -> bytes:
    """Returns the tag of a `Proof`."""
    text = msgspec.msgpack.encode(["client", PEER_VERSION, hello.fingerprint, nonce, hello.nonce, place])
    return hmac.digest(key, b"quire kv peer\n" + text, "sha256")


def place_of(address: str) -> str:
    """Returns the port of a network address, or the path of another. Raises ConfigError."""
    scheme, _, rest = address.partition("://")
    if scheme in ("ipc", "inproc") and rest:
        return rest
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigError(f"{address!r} is no address of a block server; give tcp://HOST:PORT or ipc://PATH")
    return port


def pack_bits(bits: list[bool]) -> bytes:
    """Returns the bytes of a `Bitmap`."""
    number = sum(1 << i for i, bit in enumerate(bits) if bit)
    return number.to_bytes(-(-len(bits) // 8), "little")


def unpack_bits(data: bytes, count: int) -> list[bool]:
    """Returns `count` bits; those that are missing are False."""
    number = int.from_bytes(data, "little")
    return [bool(number >> i & 1) for i in range(count)]


def curve_keys(key: bytes) -> tuple[CurveKeys, CurveKeys]:
    """Returns the keys of the server's and the client's side, derived from the key of records: a process that may read
    records may connect."""
    server = curve_pair(hmac.digest(key, b"quire kv peer: curve key of servers", "sha256"))
    client = curve_pair(hmac.digest(key, b"quire kv peer: curve key of clients", "sha256"))
    return CurveKeys(*server, client[0], silence_s=2.0), CurveKeys(*client, server[0], silence_s=2.0)
