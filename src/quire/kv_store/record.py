"""The record of one KV block: what it is, its bytes, and a tag that proves both.

::

    magic "QUIREKV1" | u16 version | u16 codec | u32 group | u32 tokens | u64 payload bytes
    | fingerprint (32) | digest (32) | parent's digest (32) | i64 token ids | u32 length, extra keys
    | tag (32) | payload

All numbers are little-endian. The tag is HMAC-SHA256(key of the store, everything else of the record). The payload is,
for each layer of the group in order, a block of keys and a block of values (of a latent layer: keys).

What a reader wants is known before it reads: it builds the header that the record must have, reads the record into the
block's own memory, and compares header and tag. A record is used only if both agree.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.wire.block_hash import NONE_HASH, ExtraKeys, encode_extra_keys

MAGIC = b"QUIREKV1"
VERSION = 1
CODEC_RAW = 0
TAG_BYTES = 32
MAX_TOKENS = 1 << 14
MAX_EXTRA_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 48 << 20
"""Limits that are checked before memory is taken. A block beyond them is not stored."""

_FIXED = struct.Struct("<8sHHIIQ32s32s32s")
_LENGTH = struct.Struct("<I")
MIN_HEADER_BYTES = _FIXED.size + _LENGTH.size
MAX_HEADER_BYTES = MIN_HEADER_BYTES + 8 * MAX_TOKENS + MAX_EXTRA_BYTES


class InvalidRecordError(Exception):
    """Bytes that are not the record that was asked for, or no record at all. `reason` is one of REJECTIONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """All of a record but its tag and its payload."""

    fingerprint: bytes
    """Digest of what decides the block's bytes besides its tokens: weights, configuration, kernels."""
    digest: bytes
    """Hash of the block and of all before it."""
    parent: bytes
    """Hash of the block before; NONE_HASH for a first block."""
    group: int
    """Index of the KV cache group."""
    token_ids: tuple[int, ...]
    payload_bytes: int
    extra_keys: bytes = b""
    """Canonical encoding of what besides tokens names the block; see `seal_extra_keys`."""
    codec: int = CODEC_RAW

    @property
    def header_bytes(self) -> int:
        """Bytes before the tag."""
        return MIN_HEADER_BYTES + 8 * len(self.token_ids) + len(self.extra_keys)

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record."""
        return self.header_bytes + TAG_BYTES + self.payload_bytes

    def encode(self) -> bytes:
        """Returns the header's bytes. Raises InvalidRecordError for what no record may hold."""
        _check_limits(len(self.token_ids), len(self.extra_keys), self.payload_bytes)
        fixed = _FIXED.pack(
            *(MAGIC, VERSION, self.codec, self.group, len(self.token_ids), self.payload_bytes),
            *(self.fingerprint, self.digest, self.parent),
        )
        try:
            token_ids = struct.pack(f"<{len(self.token_ids)}q", *self.token_ids)
        except struct.error:
            raise InvalidRecordError("format", "a token id has more than 64 bits") from None
        return b"".join((fixed, token_ids, _LENGTH.pack(len(self.extra_keys)), self.extra_keys))


def decode_header(data: bytes | memoryview) -> RecordHeader:
    """Returns the header at the start of `data`. Raises InvalidRecordError; "truncated" if more bytes are needed."""
    if len(data) < MIN_HEADER_BYTES:
        raise InvalidRecordError("truncated", f"{len(data)} bytes are no header")
    magic, version, codec, group, num_tokens, payload_bytes, fingerprint, digest, parent = _FIXED.unpack_from(data)
    if (magic, version, codec) != (MAGIC, VERSION, CODEC_RAW):
        raise InvalidRecordError("format", "no record of this version and codec begins here")
    _check_limits(num_tokens, 0, payload_bytes)
    length_at = _FIXED.size + 8 * num_tokens
    if len(data) < length_at + _LENGTH.size:
        raise InvalidRecordError("truncated", "the header ends within its token ids")
    (extra_bytes,) = _LENGTH.unpack_from(data, length_at)
    _check_limits(num_tokens, extra_bytes, payload_bytes)
    end = length_at + _LENGTH.size + extra_bytes
    if len(data) < end:
        raise InvalidRecordError("truncated", "the header ends within its extra keys")
    token_ids = struct.unpack_from(f"<{num_tokens}q", data, _FIXED.size)
    extra_keys = bytes(data[end - extra_bytes : end])
    return RecordHeader(fingerprint, digest, parent, group, token_ids, payload_bytes, extra_keys, codec)


def _check_limits(num_tokens: int, extra_bytes: int, payload_bytes: int) -> None:
    for name, value, limit in (
        ("tokens", num_tokens, MAX_TOKENS),
        ("bytes of extra keys", extra_bytes, MAX_EXTRA_BYTES),
        ("bytes of payload", payload_bytes, MAX_PAYLOAD_BYTES),
    ):
        if value > limit:
            raise InvalidRecordError("format", f"a record of {value} {name}; at most {limit} are stored")


def make_header(
    fingerprint: bytes,
    digest: bytes,
    parent: bytes | None,
    group: int,
    token_ids: Sequence[int],
    payload_bytes: int,
    extra_keys: bytes = b"",
) -> RecordHeader:
    """Returns the header of a block; `parent` None: it is a first block."""
    parent = NONE_HASH if parent is None else parent
    return RecordHeader(fingerprint, digest, parent, group, tuple(token_ids), payload_bytes, extra_keys)


def seal_extra_keys(key: bytes, extra_keys: ExtraKeys | None) -> bytes:
    """Returns the encoding of a block's extra keys, in which a salt is replaced by its HMAC: a salt is a secret."""
    if not extra_keys:
        return b""
    sealed = tuple(
        (name, hmac.digest(key, str(values[0]).encode("utf-8", "surrogatepass"), "sha256"))
        if name == "cache_salt"
        else (name, *values)
        for name, *values in extra_keys
    )
    return encode_extra_keys(sealed)


class RecordMac:
    """Computes tags under one key."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")

    def tag(self, header: bytes | memoryview, payload: Iterable[bytes | memoryview]) -> bytes:
        """Returns the tag of a record."""
        mac = self._keyed.copy()
        mac.update(header)
        for piece in payload:
            mac.update(piece)
        return mac.digest()

    def check(
        self, expected: bytes, found: memoryview, tag: bytes | memoryview, payload: Iterable[bytes | memoryview]
    ) -> None:
        """Raises InvalidRecordError unless the header `found` is the `expected` one and the tag is the record's."""
        if found != expected:
            raise InvalidRecordError(*_difference(expected, found))
        if not hmac.compare_digest(self.tag(found, payload), tag):
            raise InvalidRecordError("mac", "the tag is not the record's: it is damaged, or of another key")


def _difference(expected: bytes, found: memoryview) -> tuple[str, str]:
    """Returns the reason why a header is not the expected one, and a sentence."""
    try:
        header, wanted = decode_header(found), decode_header(expected)
    except InvalidRecordError as e:
        return e.reason, str(e)
    if (header.fingerprint, header.digest, header.group) != (wanted.fingerprint, wanted.digest, wanted.group):
        return "key", "the record is another block's"
    if header.token_ids != wanted.token_ids:
        return "tokens", "the record has the digest of other tokens"
    return "key", "the record has another parent, other extra keys or another size"
