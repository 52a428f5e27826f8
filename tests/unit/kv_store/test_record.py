"""The bytes of a record, and that no others are taken for them."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest

from quire.kv_store.record import (
    CODEC_PLANES,
    CODEC_RAW,
    MAX_PAYLOAD_BYTES,
    MAX_TOKENS,
    TAG_BYTES,
    InvalidRecordError,
    RecordHeader,
    RecordMac,
    decode_header,
    make_header,
    seal_extra_keys,
)
from quire.wire.block_hash import NONE_HASH

from ...seeds import seed_of, volume
from .stores import FINGERPRINT, KEY, digest_of, header_of, payload_of

GOLDEN = (
    "51554952454b5631" "0200" "0000" "03000000" "0400000000000000"
    "02000000" "0400000000000000"
    + "11" * 32 + "22" * 32 + "33" * 32
    + "0100000000000000" "ffffffffffffffff" "0000000001000000"
    "02000000" "6b31"
    "ed91b7cdcd15ff9e4ea0f10503492fda3e78ac4e589b7191e423482324e37f24"
)  # fmt: skip


def record_of(number: int, codec: int = 0) -> bytes:
    """`codec`: the payload is 7 bytes that stand for compressed ones."""
    stored = [memoryview(b"seven b")] if codec else payload_of(number)
    head = dataclasses.replace(header_of(number), codec=codec, compressed_bytes=7 if codec else 0).encode()
    return head + RecordMac(KEY).tag(head, stored) + b"".join(stored)


def is_accepted(wanted: RecordHeader, record: bytes, key: bytes = KEY) -> bool:
    """Reads as the worker does: where header, tag and payload are is known beforehand."""
    view, start = memoryview(record), wanted.header_bytes + TAG_BYTES
    if len(view) < start:
        return False
    try:
        RecordMac(key).check(wanted, view[:start], [view[start:]])
    except InvalidRecordError:
        return False
    return True


def test_golden_bytes() -> None:
    header = make_header(b"\x11" * 32, b"\x22" * 32, b"\x33" * 32, 2, (1, -1, 1 << 32), 4, b"k1")
    head = header.encode()
    assert head.hex() + RecordMac(KEY).tag(head, [b"ab", b"cd"]).hex() == GOLDEN
    assert decode_header(head) == header
    assert (header.header_bytes, header.record_bytes) == (len(head), len(head) + TAG_BYTES + 4)


def test_the_tag_is_the_same_however_the_payload_is_cut() -> None:
    head = header_of(1).encode()
    assert RecordMac(KEY).tag(head, [b"ab", b"cd"]) == RecordMac(KEY).tag(head, [b"abcd"])
    assert RecordMac(KEY).tag(head, [b"abcd"]) != RecordMac(bytes(32)).tag(head, [b"abcd"])
    assert RecordMac(KEY).tag(head + b"a", [b"bcd"]) != RecordMac(KEY).tag(head, [b"abcd"])


def test_a_first_block_has_the_constant_parent() -> None:
    assert make_header(FINGERPRINT, digest_of(0), None, 0, [1], 4).parent == NONE_HASH


@pytest.mark.fresh
@pytest.mark.parametrize("codec", [CODEC_RAW, CODEC_PLANES])
def test_every_flipped_bit_and_every_truncation_is_noticed(codec: int) -> None:
    for number in range(volume(5)):
        record, wanted = bytearray(record_of(number, codec)), header_of(number)
        assert is_accepted(wanted, bytes(record))
        for bit in range(8 * len(record)):
            record[bit // 8] ^= 1 << bit % 8
            assert not is_accepted(wanted, bytes(record)), (number, bit)
            record[bit // 8] ^= 1 << bit % 8
        assert not any(is_accepted(wanted, bytes(record[:length])) for length in range(len(record)))


def test_a_header_that_is_not_whole_is_truncated() -> None:
    record, expected = record_of(1), header_of(1).encode()
    for length in range(len(expected)):
        with pytest.raises(InvalidRecordError) as caught:
            decode_header(record[:length])
        assert caught.value.reason == "truncated"


def test_another_block_is_never_taken_and_the_reason_is_named() -> None:
    mac, found = RecordMac(KEY), header_of(1)
    head, payload = found.encode(), payload_of(1)
    tag = mac.tag(head, payload)
    other_tokens = make_header(FINGERPRINT, found.digest, found.parent, 0, (7, 8, 9, 9), 96, b"extra")
    other_keys = make_header(FINGERPRINT, found.digest, found.parent, 0, found.token_ids, 96, b"EXTRA")
    for wanted, reason in (
        (header_of(2), "key"),
        (header_of(1, fingerprint=bytes(32)), "key"),
        (other_tokens, "tokens"),
        (other_keys, "key"),
    ):
        with pytest.raises(InvalidRecordError) as caught:
            mac.check(wanted, memoryview(head + tag), payload)
        assert caught.value.reason == reason
    with pytest.raises(InvalidRecordError) as caught:
        RecordMac(bytes(32)).check(found, memoryview(head + tag), payload)
    assert caught.value.reason == "mac"


def test_what_is_compressed_is_smaller_or_not_a_record() -> None:
    header = header_of(1)
    for codec, compressed_bytes in ((1, header.payload_bytes), (1, 1 << 40), (2, 7)):
        with pytest.raises(InvalidRecordError) as caught:
            decode_header(dataclasses.replace(header, codec=codec, compressed_bytes=compressed_bytes).encode())
        assert caught.value.reason == "format"
    compressed = dataclasses.replace(header, codec=CODEC_PLANES, compressed_bytes=7)
    assert decode_header(compressed.encode()) == compressed
    assert compressed.record_bytes == header.record_bytes - header.payload_bytes + 7


def test_lengths_are_checked_before_anything_is_taken() -> None:
    for header in (
        make_header(FINGERPRINT, digest_of(1), None, 0, range(MAX_TOKENS + 1), 4),
        make_header(FINGERPRINT, digest_of(1), None, 0, [1], MAX_PAYLOAD_BYTES + 1),
        make_header(FINGERPRINT, digest_of(1), None, 0, [1], 4, bytes(1 << 17)),
        make_header(FINGERPRINT, digest_of(1), None, 0, [1 << 64], 4),
    ):
        with pytest.raises(InvalidRecordError):
            header.encode()


@pytest.mark.fresh
def test_no_bytes_crash_the_parser() -> None:
    rng = random.Random(seed_of(1))
    head = header_of(1).encode()
    for _ in range(volume(10_000)):
        data = bytearray(head)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(InvalidRecordError):
            decode_header(bytes(data[: rng.randrange(len(data) + 1)]))


def test_a_salt_is_not_in_the_record() -> None:
    keys = (("lora", "name", "/path"), ("cache_salt", "secret"))
    sealed = seal_extra_keys(KEY, keys)
    assert b"secret" not in sealed
    assert b"/path" in sealed
    assert sealed == seal_extra_keys(KEY, keys)
    assert len({seal_extra_keys(KEY, (("cache_salt", salt),)) for salt in ("", "a", "b")}) == 3
    assert seal_extra_keys(bytes(32), keys) != sealed
    assert seal_extra_keys(KEY, None) == b""
