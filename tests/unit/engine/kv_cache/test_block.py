"""The values that travel between manager and scheduler."""

from __future__ import annotations

from quire.engine.kv_cache.block import KVCacheBlock, KVCacheBlocks


def _blocks(*ids: int) -> list[KVCacheBlock]:
    return [KVCacheBlock(block_id) for block_id in ids]


def test_new_block_is_free_and_uncached() -> None:
    block = KVCacheBlock(3)
    assert (block.ref_cnt, block.block_hash, block.content, block.is_null) == (0, None, None, False)
    assert (block.prev_free_block, block.next_free_block) == (None, None)


def test_block_ids_are_given_group_by_group() -> None:
    assert KVCacheBlocks((_blocks(1, 2), [], _blocks(3))).get_block_ids() == ([1, 2], [], [3])


def test_repr_does_not_follow_links() -> None:
    first, second = _blocks(1, 2)
    first.next_free_block, second.prev_free_block = second, first
    second.block_hash = b"\xab\xcd\xef\x01\x02"
    assert repr([first, second]) == (
        "[KVCacheBlock(1, ref_cnt=0, block_hash=None), KVCacheBlock(2, ref_cnt=0, block_hash=abcdef01)]"
    )
