"""The shape of the KV cache, agreed between worker and engine at start-up.

The worker reports one `KVCacheSpec` per attention layer that stores keys and values. The engine sorts layers of one
kind into *groups* (the layers of every group take the same bytes, or nearly, so a block costs the same whichever group
holds it), sizes the cache, and answers with one `KVCacheConfig`. One pool of block ids serves all groups: tensor j is
shared by the j-th layer of each group. Where some layers take fewer bytes than others, several share a place.
"""

from __future__ import annotations

from typing import Any

import msgspec


class KVCacheSpec(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """KV that one attention layer keeps per token. Sizes in bytes; `dtype` is torch's name without the prefix."""

    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    @property
    def reach(self) -> int | None:
        """Most tokens that a token attends to, itself included; None for no limit."""
        return None

    def first_token_read(self, position: Any) -> Any:
        """Returns the position of the first token that a token at `position`, or any after it, attends to. Both may be
        numpy arrays."""
        return position * 0


class FullAttentionSpec(KVCacheSpec, frozen=True, tag="full", omit_defaults=True):
    """Every token is kept until the request ends."""


class SlidingWindowSpec(KVCacheSpec, frozen=True, tag="sliding", omit_defaults=True):
    """Only the last `sliding_window` tokens are ever read (the current one included)."""

    sliding_window: int = 0

    @property
    def reach(self) -> int | None:
        return self.sliding_window

    def first_token_read(self, position: Any) -> Any:
        first = position - self.sliding_window + 1
        return first * (first > 0)


class ChunkedSpec(KVCacheSpec, frozen=True, tag="chunked", omit_defaults=True):
    """A text is cut into chunks of `chunk_size` tokens; a token reads those of its own chunk."""

    chunk_size: int = 0

    @property
    def reach(self) -> int | None:
        return self.chunk_size

    def first_token_read(self, position: Any) -> Any:
        return position - position % self.chunk_size


class LatentSpec(KVCacheSpec, frozen=True, tag="latent", omit_defaults=True):
    """Every token is kept until the request ends. Values are parts of keys and have no place of their own."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


AnyKVCacheSpec = FullAttentionSpec | SlidingWindowSpec | ChunkedSpec | LatentSpec

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class KVCacheGroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Layers that share one block table."""

    layer_names: list[str]
    kv_cache_spec: AnyKVCacheSpec


class ExtraKVCacheLayer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A layer of a drafter. It has a tensor of its own and reads the block table of a group, to which it does not
    belong: blocks are allocated, hashed and freed for the group's layers alone."""

    layer_name: str
    kv_cache_spec: AnyKVCacheSpec
    group: int


class KVCacheTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """One allocation of `size` bytes, the same number for each block. A layer of each group (or several, if they are
    small) has a place in every block, so that layers of different groups share it."""

    size: int
    shared_by: list[str]
    offsets: list[int] = []
    """Bytes of a block before the part of each of those layers; empty: no layer has any."""


class KVCacheConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole cache of one worker. Block 0 is the null block: never allocated, never read."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    extra_layers: list[ExtraKVCacheLayer] = []

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per block, per group."""
        return [group.kv_cache_spec.block_size for group in self.kv_cache_groups]
