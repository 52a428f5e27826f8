"""The pool of all blocks: which are free, in what order they are given out, and which can be hit."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from quire.engine.kv_cache.block import (
    BlockContent,
    FreeKVCacheBlockQueue,
    IntegrityError,
    KVCacheBlock,
    KVCacheMetricsCollector,
)
from quire.engine.kv_cache.changes import BlockChanges
from quire.engine.kv_cache.hashing import PrefixQuery, block_extra_keys
from quire.engine.request import Request
from quire.wire.block_hash import BlockHash, ExtraKeys


class CachedBlockMap:
    """Maps a hash and a group to the blocks cached under them.

    There is usually one block; there are several after two requests computed the same prefix side by side, or on a
    collision. A single block is stored without a list: lists for 100,000 blocks cost memory and garbage-collector time.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_changes = 0
        """Number of additions and removals: while it is the same, every look-up has the same answer."""
        self._blocks: dict[BlockHash, KVCacheBlock | list[KVCacheBlock]] = {}

    def get(self, key: BlockHash) -> Sequence[KVCacheBlock]:
        """Returns the blocks under `key`, oldest first."""
        found = self._blocks.get(key)
        if found is None:
            return ()
        return found if isinstance(found, list) else (found,)

    def add(self, key: BlockHash, block: KVCacheBlock) -> bool:
        """Adds `block` under `key`. Returns whether it is the first there."""
        found = self._blocks.get(key)
        if found is None:
            self._blocks[key] = block
        elif isinstance(found, list):
            found.append(block)
        else:
            self._blocks[key] = [found, block]
        self.num_blocks += 1
        self.num_changes += 1
        return found is None

    def remove(self, key: BlockHash, block: KVCacheBlock) -> bool:
        """Removes `block` from under `key`. Returns whether it was the last there. Raises IntegrityError if it is not
        there."""
        found = self._blocks.get(key)
        if found is block:
            del self._blocks[key]
        elif isinstance(found, list) and block in found:
            found.remove(block)
            if len(found) == 1:
                self._blocks[key] = found[0]
        else:
            raise IntegrityError(f"{block} is not in the prefix cache under its hash")
        self.num_blocks -= 1
        self.num_changes += 1
        return found is block


class BlockPool:
    """Owns every block. Reads requests only for the tokens of blocks that became full.

    Block 0 is the null block: it stands for tokens that no layer reads any more, and is never given out, cached or
    free. `num_groups` groups draw from one pool and are cached apart.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        num_groups: int = 1,
        metrics: KVCacheMetricsCollector | None = None,
    ) -> None:
        if num_gpu_blocks < 1:
            raise ValueError(f"a pool of {num_gpu_blocks} blocks has no room for the null block; it needs at least 1")
        self.num_gpu_blocks = num_gpu_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_blocks = CachedBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.null_block.forgotten_at = sys.maxsize  # it never has content
        self.null_block.ref_cnt = 1  # so that "free" and "no references" mean the same for every block
        self.num_touched = 1
        """Blocks from this id on have never been given out."""
        self._group_suffixes = [group_id.to_bytes(4, "little") for group_id in range(num_groups)]
        self._metrics = metrics
        self.forgotten_at = 0
        """Number of changes of the cache at which a block last lost its content."""
        self.changes: BlockChanges | None = None
        """Record of what can be found from now on, and no longer; None: there is none."""
        self.num_cached_free_blocks = 0
        """Number of blocks without references whose content may be hit."""
        self.num_only_held = 0
        """Number of blocks with references, none of which is a table's."""
        self.num_lent = 0
        """Number of blocks in use that are in no table: a reset does not wait for them."""

    def get_cached_block(self, query: PrefixQuery, index: int, group_id: int) -> KVCacheBlock | None:
        """Returns the block that holds block `index` of the query's request for group `group_id`, or None.

        A hash only proposes blocks; the query compares what they hold.
        """
        for block in self.cached_blocks.get(query.block_hashes[index] + self._group_suffixes[group_id]):
            if block.content is not None and query.is_prefix(block.content, index):
                return block
        return None

    def cache_full_blocks(
        self,
        request: Request,
        tables: Sequence[Sequence[KVCacheBlock]],
        block_range: range,
        block_size: int,
        parent: BlockContent | None,
    ) -> BlockContent | None:
        """Makes the request's blocks `block_range` available to others, in every group's table.

        `parent` is the content before the range. Returns the content of its last block: the next parent.
        """
        for index in block_range:
            token_ids = tuple(request.all_token_ids[index * block_size : (index + 1) * block_size])
            block_hash = request.block_hashes[index]
            extra_keys = block_extra_keys(request, index, block_size)
            parent = self._find_or_make_content(block_hash, parent, token_ids, extra_keys)
            for group_id, (table, suffix) in enumerate(zip(tables, self._group_suffixes, strict=True)):
                block = table[index]
                if block.is_null:
                    continue
                if block.block_hash is not None:
                    raise IntegrityError(f"{block} became full twice")
                block.block_hash = block_hash + suffix
                block.content = parent
                is_first = self.cached_blocks.add(block.block_hash, block)
                if is_first and self.changes is not None:
                    self.changes.on_stored(request, index, group_id, token_ids, extra_keys)
        return parent

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes blocks from the head of the free queue; content that they had cached is evicted now.

        Raises IntegrityError if fewer are free: check `get_num_free_blocks` first.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            if block.block_hash is not None:
                if self._metrics is not None:
                    self._metrics.on_block_evicted(block.block_id)
                self._forget(block)
            elif block.block_id >= self.num_touched:
                self.num_touched = block.block_id + 1
            block.ref_cnt = 1
            if self._metrics is not None:
                self._metrics.on_block_allocated(block.block_id)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a reference to hit blocks; those that were free leave the queue."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == block.num_holds:
                if block.ref_cnt == 0:
                    self.free_block_queue.remove(block)
                    self.num_cached_free_blocks -= block.block_hash is not None
                else:
                    self.num_only_held -= 1
            block.ref_cnt += 1
            if self._metrics is not None:
                self._metrics.on_block_accessed(block.block_id)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drops a reference from each block, first to be evicted first: the caller gives a table's end before its
        start.

        A block without references becomes free: at the tail of the queue if it can be hit, at the head if not, so that
        nothing cached is evicted while a block without cached content is free.
        """
        cached: list[KVCacheBlock] = []
        worthless: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                raise IntegrityError(f"{block} was freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == block.num_holds:
                if block.ref_cnt == 0:
                    (worthless if block.block_hash is None else cached).append(block)
                else:
                    self.num_only_held += 1
        self._add_free(cached, worthless)

    def _add_free(self, cached: list[KVCacheBlock], worthless: list[KVCacheBlock]) -> None:
        self.num_cached_free_blocks += len(cached)
        self.free_block_queue.prepend_n(worthless)
        self.free_block_queue.append_n(cached)

    # -- references that are of no table -----------------------------------------------------------------------

    def hold_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Makes one reference of each block, which a table had or would have had, one of no table."""
        for block in blocks:
            block.num_holds += 1
            self.num_only_held += block.ref_cnt == block.num_holds

    def pin_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a reference of no table to each block."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
                self.num_cached_free_blocks -= block.block_hash is not None
                self.num_only_held += 1
            block.ref_cnt += 1
            block.num_holds += 1

    def release_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drops a reference of no table from each block, in the order of `free_blocks`."""
        cached: list[KVCacheBlock] = []
        worthless: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.num_holds == 0:
                raise IntegrityError(f"{block} was released twice")
            block.num_holds -= 1
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.num_only_held -= 1
                (worthless if block.block_hash is None else cached).append(block)
        if cached or worthless:
            self._add_free(cached, worthless)

    def evict_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Makes blocks impossible to hit, because their content is not, or no longer, right. References stay."""
        for block in blocks:
            if block.block_hash is not None:
                self._forget(block)

    def reset_prefix_cache(self) -> bool:
        """Drops everything cached. Returns False, and does nothing, while any block is in use that is not lent."""
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1 - self.num_lent:
            return False
        changes, self.changes = self.changes, None
        self.evict_blocks(self.blocks)
        self.changes = changes
        if changes is not None:
            changes.on_cleared()
        if self._metrics is not None:
            self._metrics.reset()
        return True

    def get_num_free_blocks(self) -> int:
        """Returns the number of blocks that can be given out, cached ones included."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Returns the share of blocks in use, 0...1, without the null block."""
        usable = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / usable if usable else 0.0

    def check_integrity(self, num_references: list[int] | None = None) -> None:
        """Raises IntegrityError if queue, references and cache contradict one another. O(blocks).

        `num_references`, a list by block id, is how often the caller's tables hold each block (the null block: 1).
        """
        self.free_block_queue.check_integrity()
        ref_counts = [block.ref_cnt for block in self.blocks]
        # The walk of the queue saw no block twice and only blocks without references: equal counts mean equal sets.
        if ref_counts.count(0) != self.free_block_queue.num_free_blocks:
            lost = [block for block in self.blocks if block.ref_cnt == 0 and block.next_free_block is None]
            raise IntegrityError(f"blocks without references are not in the free queue: {lost}")
        if num_references is not None and ref_counts != num_references:
            pairs = zip(self.blocks, num_references, strict=True)
            wrong = [f"{block} is in {count} tables" for block, count in pairs if block.ref_cnt != count]
            raise IntegrityError("; ".join(wrong))
        null = self.null_block
        if null.ref_cnt != 1 or null.block_hash is not None or null.next_free_block is not None:
            raise IntegrityError(f"the null block {null} was allocated, freed or cached")
        self._check_cached_blocks()

    def check_holds(self, num_holds: list[int]) -> None:
        """Raises IntegrityError if blocks are held otherwise than by `num_holds`, a list by block id."""
        pairs = zip(self.blocks, num_holds, strict=True)
        wrong = [
            f"{block} has {block.num_holds} holds, not {count}" for block, count in pairs if block.num_holds != count
        ]
        num_only_held = sum(block.ref_cnt == count > 0 for block, count in zip(self.blocks, num_holds, strict=True))
        if wrong or num_only_held != self.num_only_held:
            raise IntegrityError("; ".join([*wrong, f"{num_only_held} blocks are only held, not {self.num_only_held}"]))

    def _check_cached_blocks(self) -> None:
        num_cached = num_cached_free = 0
        get = self.cached_blocks.get
        for block in self.blocks:
            key = block.block_hash
            if key is None:
                continue
            num_cached += 1
            num_cached_free += block.ref_cnt == 0
            if block.content is None or block not in get(key):
                raise IntegrityError(f"{block} has a hash, but cannot be found under it")
        if num_cached != self.cached_blocks.num_blocks:
            raise IntegrityError(f"{self.cached_blocks.num_blocks} cache entries, {num_cached} blocks with a hash")
        if num_cached_free != self.num_cached_free_blocks:
            raise IntegrityError(
                f"{self.num_cached_free_blocks} free blocks are said to be cached, {num_cached_free} have a hash"
            )

    def _find_or_make_content(
        self,
        block_hash: BlockHash,
        parent: BlockContent | None,
        token_ids: tuple[int, ...],
        extra_keys: ExtraKeys | None,
    ) -> BlockContent:
        """Returns an equal content that a block of the first group holds, or a new one: chains that share objects
        compare faster."""
        for block in self.cached_blocks.get(block_hash + self._group_suffixes[0]):
            content = block.content
            if (
                content is not None
                and content.parent is parent
                and content.token_ids == token_ids
                and content.extra_keys == extra_keys
            ):
                return content
        return BlockContent(parent, token_ids, extra_keys)

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        self.num_cached_free_blocks -= block.ref_cnt == 0
        is_last = self.cached_blocks.remove(block.block_hash, block)
        if is_last and self.changes is not None:
            self.changes.on_removed(int.from_bytes(block.block_hash[-4:], "little"), block.block_hash[:-4])
        self.forgotten_at = block.forgotten_at = self.cached_blocks.num_changes
        block.block_hash = None
        block.content = None
