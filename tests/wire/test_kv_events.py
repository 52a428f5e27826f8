"""The bytes of KV cache events are vLLM's."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from quire.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
    short_hash,
)

STORED = BlockStored([7], None, [1, 2], 2, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention")
BATCH = KVEventBatch(1.0, [STORED, BlockRemoved([7], "GPU", group_idx=0), AllBlocksCleared()], 0)


def test_bytes_are_those_of_vllm() -> None:
    """The digest is of a batch that vLLM 0.32 encoded."""
    payload = encode_batch(BATCH)
    assert len(payload) == 244
    assert sha256(payload).hexdigest() == "7308d71e952c02409284db3425465ece0763d33364fa500de0dfc21b4c472603"
    assert decode_batch(payload) == BATCH


def test_events_of_older_versions_are_arrays() -> None:
    _, events, rank = msgspec.msgpack.decode(encode_batch(BATCH, as_arrays=True))
    assert events == [
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, None, 0, "full_attention"],
        ["BlockRemoved", [7], "GPU", 0],
        ["AllBlocksCleared"],
    ]
    assert rank == 0


def test_fields_that_are_always_sent_may_be_nil() -> None:
    event = msgspec.msgpack.decode(encode_batch(BATCH))[1][0]
    assert list(event)[:8] == [
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    ]
    assert "extra_keys" not in event


def test_a_short_hash_is_the_end_of_the_digest() -> None:
    assert short_hash(bytes(range(32))) == 0x18191A1B1C1D1E1F
