"""Records and stores for the tests of this folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.kv_store.directory import StoreDirectory
from quire.kv_store.record import RecordHeader, make_header

KEY = bytes(range(32))
FINGERPRINT = hashlib.sha256(b"weights").digest()
PAYLOAD_BYTES = 96


def digest_of(number: int) -> bytes:
    return hashlib.sha256(b"block %d" % number).digest()


def header_of(number: int, *, fingerprint: bytes = FINGERPRINT, payload_bytes: int = PAYLOAD_BYTES) -> RecordHeader:
    parent = digest_of(number - 1) if number else None
    return make_header(fingerprint, digest_of(number), parent, 0, range(number, number + 4), payload_bytes, b"extra")


def payload_of(number: int, num_bytes: int = PAYLOAD_BYTES) -> list[memoryview]:
    data = (hashlib.sha256(b"payload %d" % number).digest() * (num_bytes // 32 + 1))[:num_bytes]
    return [memoryview(data)[: num_bytes // 3], memoryview(data)[num_bytes // 3 :]]


def open_store(path: Path, max_bytes: int = 1 << 30, *, extent_bytes: int | None = None) -> StoreDirectory:
    """Returns a store; with small extents if `extent_bytes` is given, for tests of many."""
    store = StoreDirectory.open(path, max_bytes)
    if extent_bytes is not None:
        store.extent_bytes = extent_bytes
    return store
