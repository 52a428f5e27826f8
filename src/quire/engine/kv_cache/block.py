"""The units of the KV cache: a block, the blocks handed to a request, and what a request must show to be cached.

Nothing here holds keys or values: those live in the worker's tensors. A `KVCacheBlock` is the engine's record of one
slot of every such tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.lora_request import LoRARequest
from quire.wire.execution import BlockIds

BlockHash = bytes
"""Digest of one full block and, through its parent, of everything before it. See `hashing`."""

ExtraKeys = tuple[tuple[str | int | bytes, ...], ...]
"""What besides token ids decides a block's keys and values: tagged tuples such as ("lora", name, path)."""


class IntegrityError(AssertionError):
    """The bookkeeping of the KV cache contradicts itself: a bug here or a broken contract of the caller.

    Never to be caught and ignored: the next token could be read from another request's cache.
    """


class CacheableRequest(Protocol):
    """What the KV cache needs to know of a request. `quire.engine.request.Request` satisfies it."""

    @property
    def request_id(self) -> str:
        """Unique among live requests."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens; draft tokens are not certain and do not count."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache, or will be before any later step reads them."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often the request lost its blocks."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The `num_tokens` tokens."""
        ...

    @property
    def block_hashes(self) -> list[BlockHash]:
        """One per full block of `all_token_ids`: certain tokens only. Kept up to date with a `BlockHasher`."""
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True if every prompt token must be computed (prompt logprobs). Its blocks are still cached for others."""
        ...

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter, which changes keys and values."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Separates the caches of those who must not see each other's; None and "" are different salts."""
        ...


@dataclass(slots=True, eq=False)
class BlockContent:
    """What a full block was computed from. With its parents it is the exact prefix that a hash only stands for.

    Contents are compared on every hit, so that two prefixes with one hash never share a block (promise S8). A content
    outlives the eviction of its parent's block: a sliding window keeps the end of a prefix without its start.
    """

    parent: BlockContent | None
    token_ids: tuple[int, ...]
    extra_keys: ExtraKeys | None


class KVCacheBlock:
    """One block of the pool (checklist S1-KV-009).

    In the free queue exactly while `ref_cnt` is 0; a free block may still hold a cached prefix (S1-KV-012, S1-KV-013).
    `block_hash` (the content's hash and the group id) and `content` are set together while the block can be hit.
    """

    __slots__ = ("block_hash", "block_id", "content", "is_null", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockHash | None = None
        self.content: BlockContent | None = None
        self.is_null = False
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash is not None else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={digest})"


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of a request, a list per KV cache group. A value: nobody changes the lists after it is made."""

    blocks: tuple[list[KVCacheBlock], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return KVCacheBlocks(tuple(mine + theirs for mine, theirs in zip(self.blocks, other.blocks, strict=True)))

    @property
    def is_empty(self) -> bool:
        """True if no group has a block."""
        return not any(self.blocks)

    def get_block_ids(self) -> BlockIds:
        """Ids per group; 0, the null block, stands for tokens a sliding window has left behind."""
        return tuple([block.block_id for block in group] for group in self.blocks)
