"""Planted bugs in blocks, prefix caching and sliding windows."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.kv_cache import block_pool, hashing
from quire.engine.kv_cache.block import FreeKVCacheBlockQueue
from quire.engine.kv_cache.block_pool import BlockPool, CachedBlockMap
from quire.engine.kv_cache.group_manager import WindowManager
from quire.engine.kv_cache.hashing import PrefixQuery
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request, RequestStatus
from tests.simulation.mutants.registry import Patch, mutant, wrap

# -- the pool ----------------------------------------------------------------------------------------------------


@mutant
def leak_on_abort(patch: Patch) -> None:
    """The blocks of an aborted request are never freed."""

    def free(original: Any, self: KVCacheManager, request: Request) -> None:
        if request.status is not RequestStatus.FINISHED_ABORTED:
            original(self, request)

    wrap(patch, KVCacheManager, "free", free)


@mutant
def double_free(patch: Patch) -> None:
    """A finished request's blocks lose two references; a shared one is freed under its other owner."""

    def free_blocks(original: Any, self: BlockPool, blocks: Any) -> None:
        blocks = list(blocks)
        for block in blocks:
            if block.ref_cnt > 1:
                block.ref_cnt -= 1
        original(self, blocks)

    wrap(patch, BlockPool, "free_blocks", free_blocks)


@mutant
def shared_block_not_counted(patch: Patch) -> None:
    """A hit takes a block out of the free queue, but a second owner does not add a reference."""

    def touch(original: Any, self: BlockPool, blocks: Any) -> None:
        original(self, [block for block in blocks if block.ref_cnt == 0])

    wrap(patch, BlockPool, "touch", touch)


@mutant
def evict_in_use(patch: Patch) -> None:
    """A hit leaves the block in the free queue: it can be given out while it is read."""

    def touch(original: Any, self: BlockPool, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += not block.is_null

    wrap(patch, BlockPool, "touch", touch)


@mutant
def copies_are_events(patch: Patch) -> None:
    """A second block with the same content is an event, too: subscribers forget both with the first."""

    def add(original: Any, self: CachedBlockMap, key: Any, block: Any) -> bool:
        original(self, key, block)
        return True

    wrap(patch, CachedBlockMap, "add", add)


@mutant
def evicted_block_stays_findable(patch: Patch) -> None:
    """A block that is given out again can still be hit under its old hash."""

    def get_new_blocks(original: Any, self: BlockPool, num_blocks: int) -> Any:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(BlockPool, "_forget", lambda self, block: None)
            return original(self, num_blocks)

    wrap(patch, BlockPool, "get_new_blocks", get_new_blocks)


@mutant
def wrong_free_order(patch: Patch) -> None:
    """The start of a prefix is freed first, so that it is evicted before its end: the end is useless then."""

    def free_blocks(original: Any, self: BlockPool, blocks: Any) -> None:
        original(self, list(blocks)[::-1])

    wrap(patch, BlockPool, "free_blocks", free_blocks)


@mutant
def worthless_blocks_last(patch: Patch) -> None:
    """Blocks that cannot be hit go to the tail of the free queue, and cached ones are evicted before them."""
    patch.setattr(FreeKVCacheBlockQueue, "prepend_n", FreeKVCacheBlockQueue.append_n)


@mutant
def eviction_from_the_tail(patch: Patch) -> None:
    """The most recently used blocks are given out first."""

    def get_new_blocks(original: Any, self: BlockPool, num_blocks: int) -> Any:
        queue = self.free_block_queue
        for block in queue.get_all_free_blocks()[::-1][:num_blocks]:
            queue.remove(block)
            queue.prepend_n([block])
        return original(self, num_blocks)

    wrap(patch, BlockPool, "get_new_blocks", get_new_blocks)


# -- the prefix cache --------------------------------------------------------------------------------------------


def trust_hashes(patch: Patch) -> None:
    """Not a bug alone: hits are not compared with what the block was computed from, so that only hashes protect."""
    patch.setattr(PrefixQuery, "is_prefix", lambda self, content, index: True)


@mutant
def hash_without_parent(patch: Patch) -> None:
    """A block is named by its own tokens only (and hits are not compared)."""
    trust_hashes(patch)
    wrap(patch, hashing, "hash_block", lambda original, parent, tokens, keys: original(None, tokens, keys))
    patch.setattr(hashing.make_block_hasher, "__defaults__", (hashing.hash_block,))


@mutant
def hash_without_salt(patch: Patch) -> None:
    """Cache salts do not enter the hash (and hits are not compared)."""
    trust_hashes(patch)
    drop_extra_keys(patch, "cache_salt")


@mutant
def hash_without_adapter(patch: Patch) -> None:
    """LoRA adapters do not enter the hash (and hits are not compared)."""
    trust_hashes(patch)
    drop_extra_keys(patch, "lora")


def drop_extra_keys(patch: Patch, tag: str) -> None:
    """Leaves the keys with this tag out of hashes and comparisons."""
    original = hashing.block_extra_keys

    def block_extra_keys(request: Any, index: int, block_size: int) -> Any:
        return tuple(key for key in original(request, index, block_size) or () if key[0] != tag) or None

    for module in (hashing, block_pool):
        patch.setattr(module, "block_extra_keys", block_extra_keys)


@mutant
def collisions_are_hits(patch: Patch) -> None:
    """Hashes of one byte, and hits are not compared."""
    trust_hashes(patch)
    weak_hashes(patch)


def weak_hashes(patch: Patch) -> None:
    """Not a bug: hashes of one byte collide all the time, and the comparison of contents must hold."""
    original = hashing.hash_block
    weak = (lambda parent, tokens, keys: original(parent, tokens, keys)[:1],)
    patch.setattr(hashing.make_block_hasher, "__defaults__", weak)


@mutant
def registered_before_computed(patch: Patch) -> None:
    """A block that a chunk of the prompt only begins to fill can be hit at once."""

    def cache(original: Any, self: KVCacheManager, request: Request, held: Any, num_tokens: int) -> None:
        original(self, request, held, min(-(-num_tokens // self.block_size) * self.block_size, request.num_tokens))

    wrap(patch, KVCacheManager, "_cache_full_blocks", cache)


@mutant
def last_block_never_hit(patch: Patch) -> None:
    """Hits are one block shorter than they could be."""

    def get_computed_blocks(original: Any, self: KVCacheManager, request: Request) -> Any:
        blocks, num_tokens = original(self, request)
        if any(group.drops_blocks for group in self.groups) or not num_tokens:
            return blocks, num_tokens
        if num_tokens == self.block_size:
            return self.empty_kv_cache_blocks, 0
        return type(blocks)(tuple(group[:-1] for group in blocks.blocks)), num_tokens - self.block_size

    wrap(patch, KVCacheManager, "get_computed_blocks", get_computed_blocks)


@mutant
def eviction_unnoticed_by_look_up(patch: Patch) -> None:
    """A remembered look-up is still believed after a block was evicted."""

    def remove(original: Any, self: CachedBlockMap, *args: Any) -> None:
        original(self, *args)
        self.num_changes -= 1

    wrap(patch, CachedBlockMap, "remove", remove)


@mutant
def new_block_unnoticed_by_look_up(patch: Patch) -> None:
    """A remembered look-up is still believed after a block was cached that would make it longer."""

    def add(original: Any, self: CachedBlockMap, *args: Any) -> None:
        original(self, *args)
        self.num_changes -= 1

    wrap(patch, CachedBlockMap, "add", add)


@mutant
def reset_keeps_the_cache(patch: Patch) -> None:
    """`reset_prefix_cache` says it did and does nothing."""
    patch.setattr(BlockPool, "reset_prefix_cache", lambda self: True)


@mutant
def counts_every_look_up(patch: Patch) -> None:
    """The prefix query of a request that has to wait is counted each time it is tried."""

    def get_computed_blocks(original: Any, self: KVCacheManager, request: Request) -> Any:
        blocks, num_tokens = original(self, request)
        if self._prefix_cache_stats is not None and self.enable_caching and not request.skip_reading_prefix_cache:
            self._prefix_cache_stats.record(request.num_tokens, num_tokens, preempted=False)
        return blocks, num_tokens

    wrap(patch, KVCacheManager, "get_computed_blocks", get_computed_blocks)


# -- sliding windows ---------------------------------------------------------------------------------------------


@mutant
def window_freed_too_early(patch: Patch) -> None:
    """A window's oldest block is dropped one token before nothing reads it any more."""
    wrap(patch, WindowManager, "first_block_read", lambda original, self, p: original(self, p + 1))


@mutant
def window_hit_too_short(patch: Patch) -> None:
    """A hit in a sliding-window group covers one block less than the window needs."""

    def find_longest_hit(original: Any, self: WindowManager, *args: Any) -> Any:
        first_block_read = self.first_block_read
        with patch.context() as during_the_search:
            during_the_search.setattr(self, "first_block_read", lambda position: first_block_read(position) + 1)
            return original(self, *args)

    wrap(patch, WindowManager, "find_longest_hit", find_longest_hit)


@mutant
def window_blocks_leak(patch: Patch) -> None:
    """Blocks that leave the window become null in the table but are not freed."""

    def drop(original: Any, self: KVCacheManager, dropped: Any) -> None:
        for table, index in dropped:
            table[index] = self.block_pool.null_block

    wrap(patch, KVCacheManager, "_drop_blocks", drop)
