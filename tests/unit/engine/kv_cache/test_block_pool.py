"""The pool by itself: free blocks and their order, hits, and the damage that the integrity check finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.engine.kv_cache.block import IntegrityError, KVCacheBlock
from quire.engine.kv_cache.block_pool import BlockPool, CachedBlockMap
from quire.engine.kv_cache.hashing import PrefixQuery
from tests.unit.engine.kv_cache.model import BLOCK_SIZE, ModelRequest, letters


def _ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def _free_ids(pool: BlockPool) -> list[int]:
    return _ids(pool.free_block_queue.get_all_free_blocks())


def _cache(pool: BlockPool, text: str, blocks: list[KVCacheBlock]) -> None:
    request = ModelRequest("r", letters(text))
    pool.cache_full_blocks(request, [blocks], range(request.num_tokens // BLOCK_SIZE), BLOCK_SIZE, None)


def _find(pool: BlockPool, text: str, index: int, group_id: int = 0) -> KVCacheBlock | None:
    return pool.get_cached_block(PrefixQuery(ModelRequest("q", letters(text)), BLOCK_SIZE), index, group_id)


class TestCachedBlockMap:
    def test_several_blocks_under_one_key(self) -> None:
        cached, (a, b, c) = CachedBlockMap(), [KVCacheBlock(i) for i in range(3)]
        assert cached.get(b"k") == ()
        for block in (a, b, c):
            cached.add(b"k", block)
        assert list(cached.get(b"k")) == [a, b, c]
        assert cached.num_blocks == 3
        cached.remove(b"k", b)
        assert list(cached.get(b"k")) == [a, c]
        cached.remove(b"k", a)
        assert list(cached.get(b"k")) == [c]
        cached.remove(b"k", c)
        assert cached.get(b"k") == ()
        assert cached.num_blocks == 0

    def test_only_members_are_removed(self) -> None:
        cached, (a, b, c) = CachedBlockMap(), [KVCacheBlock(i) for i in range(3)]
        cached.add(b"k", a)
        for stranger in (b, c):
            with pytest.raises(IntegrityError, match="not in the prefix cache"):
                cached.remove(b"k", stranger)
            cached.add(b"k", b)
        with pytest.raises(IntegrityError, match="not in the prefix cache"):
            cached.remove(b"other", a)


def test_null_block_is_never_free() -> None:
    pool = BlockPool(4)
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null
    assert _free_ids(pool) == [1, 2, 3]
    assert (pool.get_num_free_blocks(), pool.get_usage()) == (3, 0.0)
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block, pool.null_block])
    pool.check_integrity()
    assert _free_ids(pool) == [1, 2, 3]


def test_a_pool_needs_room_for_the_null_block() -> None:
    assert BlockPool(1).get_usage() == 0.0
    with pytest.raises(ValueError, match="no room for the null block"):
        BlockPool(0)


def test_usage_leaves_out_the_null_block() -> None:
    pool = BlockPool(5)
    pool.get_new_blocks(3)
    assert pool.get_usage() == 0.75


def test_more_than_there_is() -> None:
    pool = BlockPool(4)
    with pytest.raises(IntegrityError, match="4 blocks were taken from a free queue of 3"):
        pool.get_new_blocks(4)


def test_uncached_blocks_are_reused_first_and_cached_ones_last() -> None:
    """The caller frees tables from their end."""
    pool = BlockPool(7)
    blocks = pool.get_new_blocks(4)
    _cache(pool, "ABCDEFGH", blocks)
    pool.free_blocks(reversed(blocks))
    assert _free_ids(pool) == [4, 3, 5, 6, 2, 1]


def test_eviction_is_lazy_and_least_recently_freed_first() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    _cache(pool, "ABCDEFGHIJKL", blocks)
    pool.free_blocks(reversed(blocks))
    assert [_find(pool, "ABCDEFGHIJKL", index) for index in range(3)] == blocks
    assert pool.get_new_blocks(1) == [blocks[2]]
    assert [_find(pool, "ABCDEFGHIJKL", index) for index in range(3)] == [blocks[0], blocks[1], None]
    assert (blocks[2].block_hash, blocks[2].content, blocks[2].ref_cnt) == (None, None, 1)
    pool.check_integrity()


def test_touch_takes_a_block_out_of_the_queue_once() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(1)
    _cache(pool, "ABCD", blocks)
    pool.free_blocks(blocks)
    pool.touch(blocks)
    pool.touch(blocks)
    assert blocks[0].ref_cnt == 2
    assert _free_ids(pool) == [2, 3, 4]
    pool.free_blocks(blocks)
    assert _free_ids(pool) == [2, 3, 4]
    pool.free_blocks(blocks)
    assert _free_ids(pool) == [2, 3, 4, 1]


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free_blocks(blocks)


def test_duplicates_live_under_one_hash() -> None:
    """The older block is hit while it exists, then the other."""
    pool = BlockPool(4)
    one, other = pool.get_new_blocks(1), pool.get_new_blocks(1)
    _cache(pool, "ABCD", one)
    _cache(pool, "ABCD", other)
    assert one[0].content is other[0].content  # shared, so that chains on either are compared at a glance
    assert _find(pool, "ABCD", 0) is one[0]
    pool.evict_blocks(one)
    assert _find(pool, "ABCD", 0) is other[0]
    pool.check_integrity()


def test_a_colliding_block_is_not_found() -> None:
    pool = BlockPool(4)
    one, other = pool.get_new_blocks(1), pool.get_new_blocks(1)

    def collide(*_: object) -> bytes:
        return b"same"

    for text, blocks in (("ABCD", one), ("EFGH", other)):
        request = ModelRequest("r", letters(text), hash_function=collide)
        pool.cache_full_blocks(request, [blocks], range(1), BLOCK_SIZE, None)

    def find(text: str) -> KVCacheBlock | None:
        request = ModelRequest("q", letters(text), hash_function=collide)
        return pool.get_cached_block(PrefixQuery(request, BLOCK_SIZE), 0, 0)

    assert find("ABCD") is one[0]
    assert find("EFGH") is other[0]
    assert find("IJKL") is None
    pool.check_integrity()


def test_groups_are_cached_apart() -> None:
    pool = BlockPool(4, num_groups=2)
    first, second = pool.get_new_blocks(1), pool.get_new_blocks(1)
    request = ModelRequest("r", letters("ABCD"))
    pool.cache_full_blocks(request, [first, second], range(1), BLOCK_SIZE, None)
    assert [_find(pool, "ABCD", 0, group_id) for group_id in range(2)] == [first[0], second[0]]


def test_null_entries_are_not_cached_and_content_goes_on_behind_them() -> None:
    pool = BlockPool(4)
    table = [pool.null_block, *pool.get_new_blocks(1)]
    _cache(pool, "ABCDEFGH", table)
    assert pool.null_block.block_hash is None
    assert _find(pool, "ABCDEFGH", 1) is table[1]
    assert _find(pool, "abcdEFGH", 1) is None


def test_a_block_becomes_full_once() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(1)
    _cache(pool, "ABCD", blocks)
    with pytest.raises(IntegrityError, match="full twice"):
        _cache(pool, "EFGH", blocks)


def test_evicted_blocks_keep_their_references() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    _cache(pool, "ABCD", blocks)
    pool.evict_blocks(blocks)
    assert _find(pool, "ABCD", 0) is None
    assert [block.ref_cnt for block in blocks] == [1, 1]
    pool.check_integrity([1, 1, 1, 0])


def test_reset_only_when_nothing_is_in_use() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(1)
    _cache(pool, "ABCD", blocks)
    assert not pool.reset_prefix_cache()
    assert _find(pool, "ABCD", 0) is blocks[0]
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert _find(pool, "ABCD", 0) is None
    assert pool.cached_blocks.num_blocks == 0
    pool.check_integrity()


def _damaged_pool() -> BlockPool:
    """Blocks 1, 2 in use (1 cached), 3 free and cached, 4, 5 free."""
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(3)
    _cache(pool, "ABCD", blocks)
    _cache(pool, "EFGH", blocks[2:])
    pool.free_blocks(blocks[2:])
    pool.check_integrity([1, 1, 1, 0, 0, 0])
    return pool


def _steal(pool: BlockPool) -> None:
    pool.free_block_queue.popleft()  # neither free nor used


def _leak(pool: BlockPool) -> None:
    pool.blocks[2].ref_cnt = 0


def _count_too_much(pool: BlockPool) -> None:
    pool.blocks[2].ref_cnt = 2


def _use_a_free_block(pool: BlockPool) -> None:
    pool.blocks[4].ref_cnt = 1


def _free_the_null_block(pool: BlockPool) -> None:
    pool.null_block.ref_cnt = 0
    pool.free_block_queue.append_n([pool.null_block])


def _reference_the_null_block(pool: BlockPool) -> None:
    pool.null_block.ref_cnt = 2


def _hash_the_null_block(pool: BlockPool) -> None:
    pool.null_block.block_hash = b"k"


def _lose_the_entry(pool: BlockPool) -> None:
    pool.cached_blocks.remove(pool.blocks[3].block_hash or b"", pool.blocks[3])


def _hash_without_content(pool: BlockPool) -> None:
    pool.blocks[3].content = None


def _entry_of_another_block(pool: BlockPool) -> None:
    pool.cached_blocks.add(b"k", pool.blocks[2])


def _change_the_hash(pool: BlockPool) -> None:
    pool.blocks[3].block_hash = pool.blocks[1].block_hash


@pytest.mark.parametrize(
    "damage",
    [
        _steal,
        _leak,
        _count_too_much,
        _use_a_free_block,
        _free_the_null_block,
        _reference_the_null_block,
        _hash_the_null_block,
        _lose_the_entry,
        _hash_without_content,
        _entry_of_another_block,
        _change_the_hash,
    ],
)
def test_integrity_check_finds(damage: Callable[[BlockPool], None]) -> None:
    pool = _damaged_pool()
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity([1, 1, 1, 0, 0, 0])
