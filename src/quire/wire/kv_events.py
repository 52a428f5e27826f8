"""KV cache events: which prefixes an engine holds, for routers that choose an engine by them.

What is published are three frames: the topic; a sequence number, 8 bytes, big-endian; an encoded `KVEventBatch`. Names,
order of fields and types are vLLM's, so that its subscribers read them.
"""

from __future__ import annotations

from typing import Any

import msgspec

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the last message of a replay, which has no payload."""
DEVICE_MEDIUM = "GPU"
"""vLLM's name of the memory that an engine computes in, on any device."""
STORE_MEDIUM, LOCAL, REMOTE = "STORAGE", "LOCAL", "REMOTE"
"""Medium of stores, and localities of a directory of --kv-store and of a block server."""

EventHash = int | bytes
"""A block's digest: its last 8 bytes as a number, or all 32."""


class KVEvent(msgspec.Struct, omit_defaults=True, tag_field="type", gc=False):
    """Base of events. Fields without a default are always sent, also if they are None."""


class BlockStored(KVEvent, tag="BlockStored"):
    """Blocks that follow one another can be found from now on."""

    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    """The block before the first; None: there is none."""
    token_ids: list[int]
    """Tokens of all blocks."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    """Further values that decide each block's content: adapter, salt, embeddings; None for a block without any."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVEvent, tag="BlockRemoved"):
    """A block cannot be found any more."""

    block_hashes: list[EventHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVEvent, tag="AllBlocksCleared"):
    """No block can be found any more."""


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """Events of one step, in the order in which they happened."""

    ts: float
    """Wall clock."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventSource(msgspec.Struct, frozen=True, gc=False):
    """Where an engine publishes its events."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    event_format: str


def short_hash(digest: bytes) -> int:
    """Returns the number that stands for a digest: its last 8 bytes, big-endian."""
    return int.from_bytes(digest[-8:], "big")


def encode_batch(batch: KVEventBatch, *, as_arrays: bool = False) -> bytes:
    """Returns the payload of a batch: an event is a map with a key `type`; or, as in older versions of vLLM, an array
    of its type and its fields."""
    if not as_arrays:
        return _ENCODER.encode(batch)
    return _ENCODER.encode([batch.ts, [_as_array(event) for event in batch.events], batch.data_parallel_rank])


def decode_batch(payload: bytes) -> KVEventBatch:
    """Returns the batch of a payload whose events are maps. Raises msgspec.DecodeError."""
    return _DECODER.decode(payload)


def encode_sequence(sequence: int) -> bytes:
    """Returns the frame of a sequence number."""
    return sequence.to_bytes(8, "big")


def _as_array(event: KVEvent) -> list[Any]:
    values = [type(event).__name__, *(getattr(event, name) for name in event.__struct_fields__)]
    num_required = 1 + len(event.__struct_fields__) - len(event.__struct_defaults__)
    while len(values) > num_required and values[-1] is None:
        values.pop()
    return values


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(KVEventBatch)
