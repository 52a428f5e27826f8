"""The record of one KV block: what it is, its bytes, and a tag that proves both.

::

    magic "QUIREKV1" | u16 version | u16 codec | u32 tokens | u64 stored bytes
    | u32 group | u64 payload bytes | fingerprint (32) | digest (32) | parent's digest (32) | i64 token ids
    | u32 length, extra keys | tag (32) | the payload as it is stored

All numbers are little-endian. The payload is, for each layer of the group in order, a block of keys and a block of
values (of a latent layer: keys). The first line says how it is stored (`kv_store/codec.py`); the others are the block's
name, the same however it is stored.

The tag is BLAKE3(key 1, header, BLAKE3(key 2, payload as it is stored)), both keyed, their keys derived from the
store's (https://github.com/BLAKE3-team/BLAKE3-specs). The payload has a digest of its own because one that begins at
byte 0 is hashed several chunks at a time.

What a reader wants is known before it reads: it builds the header that the record must have, reads the record into one
piece of memory, and compares name and tag. A record is used only if both agree.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from quire.wire.block_hash import NONE_HASH, ExtraKeys, encode_extra_keys

MAGIC = b"QUIREKV1"
VERSION = 2
CODEC_RAW, CODEC_PLANES = 0, 1
TAG_BYTES = 32
MAX_TOKENS = 1 << 14
MAX_EXTRA_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 48 << 20
"""Limits that are checked before memory is taken. A block beyond them is not stored."""

_STORED = struct.Struct("<8sHHIQ")
_NAME = struct.Struct("<IQ32s32s32s")
_LENGTH = struct.Struct("<I")
_TOKENS_AT = _STORED.size + _NAME.size
MIN_HEADER_BYTES = _TOKENS_AT + _LENGTH.size
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
    """Bytes of the block in memory."""
    extra_keys: bytes = b""
    """Canonical encoding of what besides tokens names the block; see `seal_extra_keys`."""
    codec: int = CODEC_RAW
    compressed_bytes: int = 0
    """Bytes of the payload as it is stored, if it has a codec."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payload as it is stored."""
        return self.compressed_bytes if self.codec else self.payload_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes before the tag."""
        return MIN_HEADER_BYTES + 8 * len(self.token_ids) + len(self.extra_keys)

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record."""
        return self.header_bytes + TAG_BYTES + self.stored_bytes

    def encode(self) -> bytes:
        """Returns the header's bytes. Raises InvalidRecordError for what no record may hold."""
        _check_limits(len(self.token_ids), len(self.extra_keys), self.payload_bytes)
        stored = _STORED.pack(MAGIC, VERSION, self.codec, len(self.token_ids), self.stored_bytes)
        name = _NAME.pack(self.group, self.payload_bytes, self.fingerprint, self.digest, self.parent)
        try:
            token_ids = struct.pack(f"<{len(self.token_ids)}q", *self.token_ids)
        except struct.error:
            raise InvalidRecordError("format", "a token id has more than 64 bits") from None
        return b"".join((stored, name, token_ids, _LENGTH.pack(len(self.extra_keys)), self.extra_keys))


def decode_header(data: bytes | memoryview) -> RecordHeader:
    """Returns the header at the start of `data`. Raises InvalidRecordError; "truncated" if more bytes are needed."""
    if len(data) < MIN_HEADER_BYTES:
        raise InvalidRecordError("truncated", f"{len(data)} bytes are no header")
    codec, num_tokens, stored_bytes = _decode_stored(data)
    group, payload_bytes, fingerprint, digest, parent = _NAME.unpack_from(data, _STORED.size)
    _check_limits(num_tokens, 0, payload_bytes)
    _check_stored(codec, stored_bytes, payload_bytes)
    length_at = _TOKENS_AT + 8 * num_tokens
    if len(data) < length_at + _LENGTH.size:
        raise InvalidRecordError("truncated", "the header ends within its token ids")
    (extra_bytes,) = _LENGTH.unpack_from(data, length_at)
    _check_limits(num_tokens, extra_bytes, payload_bytes)
    end = length_at + _LENGTH.size + extra_bytes
    if len(data) < end:
        raise InvalidRecordError("truncated", "the header ends within its extra keys")
    token_ids = struct.unpack_from(f"<{num_tokens}q", data, _TOKENS_AT)
    extra_keys = bytes(data[end - extra_bytes : end])
    compressed_bytes = stored_bytes if codec else 0
    return RecordHeader(
        fingerprint, digest, parent, group, token_ids, payload_bytes, extra_keys, codec, compressed_bytes
    )


def _decode_stored(data: bytes | memoryview) -> tuple[int, int, int]:
    """Returns the codec, the number of tokens, and the bytes of the payload as it is stored. Raises
    InvalidRecordError."""
    magic, version, codec, num_tokens, stored_bytes = _STORED.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION) or codec not in (CODEC_RAW, CODEC_PLANES):
        raise InvalidRecordError("format", "no record of this version and codec begins here")
    return codec, num_tokens, stored_bytes


def _check_stored(codec: int, stored_bytes: int, payload_bytes: int) -> None:
    """Raises InvalidRecordError unless the codec has made the payload smaller, or there is none."""
    if stored_bytes >= payload_bytes if codec else stored_bytes != payload_bytes:
        raise InvalidRecordError("format", f"{payload_bytes} bytes are stored as {stored_bytes} by codec {codec}")


def stored_bytes_of(head: memoryview) -> int:
    """Returns how many bytes a payload takes as it is stored. Only the first fields of the header are checked. Raises
    InvalidRecordError."""
    return _decode_stored(head)[2]


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
    """Computes and checks tags under one key."""

    def __init__(self, key: bytes) -> None:
        self._of_record = blake3(key=_derive(key, "tag of a record"))
        self._of_payload = blake3(key=_derive(key, "payload of a record"))

    def tag(self, header: bytes | memoryview, stored: Iterable[bytes | memoryview]) -> bytes:
        """Returns the tag of a record. `stored`: the payload as it is stored, in pieces."""
        payload, record = self._of_payload.copy(), self._of_record.copy()
        for piece in stored:
            payload.update(piece)
        record.update(header)
        record.update(payload.digest())
        return record.digest()

    def check_tag(self, head: memoryview, stored: Iterable[bytes | memoryview]) -> None:
        """Raises InvalidRecordError unless a record, `head` with its tag, has the right one."""
        if not hmac.compare_digest(self.tag(head[:-TAG_BYTES], stored), head[-TAG_BYTES:]):
            raise InvalidRecordError("mac", "the tag is not the record's: it is damaged, or of another key")

    def check(self, wanted: RecordHeader, head: memoryview, stored: Sequence[memoryview]) -> int:
        """Returns the codec of a record, `head` with its tag. Raises InvalidRecordError unless it is the wanted one,
        however its payload is stored, and has the right tag."""
        expected = wanted.encode()
        if bytes(head[_STORED.size : -TAG_BYTES]) != expected[_STORED.size :]:
            raise InvalidRecordError(*_difference(expected, head[:-TAG_BYTES]))
        codec, num_tokens, stored_bytes = _decode_stored(head)
        _check_stored(codec, stored_bytes, wanted.payload_bytes)
        if num_tokens != len(wanted.token_ids) or stored_bytes != sum(map(len, stored)):
            raise InvalidRecordError("format", "the record has another length than its header says")
        self.check_tag(head, stored)
        return codec


def _derive(key: bytes, use: str) -> bytes:
    """Returns a key for one use: no digest under it is one of another use."""
    return blake3(key, derive_key_context=f"Quire KV store 2026-11-27: {use}").digest()


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
