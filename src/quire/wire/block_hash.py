"""The hash chain that names cached prefixes: equal in every process, on every host, in every run.

hash(block i) = SHA-256(encode(hash(block i - 1), token ids, extra keys)), where `encode` is injective: two different
inputs never become the same bytes. Only full blocks have a hash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

BlockHash = bytes
"""Digest of one full block and, through its parent, of everything before it."""

ExtraKeys = tuple[tuple[str | int | bytes, ...], ...]
"""Everything besides token ids that decides a block's keys and values: tagged tuples such as ("lora", name, path)."""

NONE_HASH: BlockHash = sha256(b"quire: the parent of a first block").digest()
"""The parent of a first block: a constant, so that hashes agree between processes without any seed."""

_BLOCK_TAG = b"quire kv block 1\n"
"""First bytes of what is hashed. Change it with the encoding."""


def hash_block(parent: BlockHash | None, token_ids: Sequence[int], extra_keys: ExtraKeys | None) -> BlockHash:
    """Returns the digest (32 bytes) of a full block after the block with digest `parent`; None: it is the first.

    Token ids are encoded as 64-bit integers. Raises TypeError for an extra key that is no str, int, bytes, None or
    tuple.
    """
    tokens = _token_struct(len(token_ids)).pack(len(token_ids), *token_ids)
    keys = encode_extra_keys(extra_keys) if extra_keys else b""
    return sha256(_BLOCK_TAG + (NONE_HASH if parent is None else parent) + tokens + keys).digest()


@lru_cache(maxsize=8)
def _token_struct(num_tokens: int) -> struct.Struct:
    return struct.Struct(f"<Q{num_tokens}q")


def encode_extra_keys(value: Any) -> bytes:
    """Returns a prefix-free encoding of extra keys, or a part of them: a type letter, a length, the bytes."""
    match value:
        case None:
            return b"n"
        case tuple():
            return b"t%d:" % len(value) + b"".join(map(encode_extra_keys, value))
        case str():
            # lone surrogates can be sent in JSON and must neither fail nor coincide
            body = value.encode("utf-8", "surrogatepass")
            return b"s%d:" % len(body) + body
        case bytes():
            return b"b%d:" % len(value) + value
        case int() if not isinstance(value, bool):
            return b"i%d:" % value
        case _:
            raise TypeError(f"{value!r} in the extra keys of a block is no str, int, bytes, None or tuple")
