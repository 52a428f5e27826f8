"""The free queue against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.block import FreeKVCacheBlockQueue, IntegrityError, KVCacheBlock

NUM_BLOCKS = 8


def _make(num_blocks: int = NUM_BLOCKS) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue]:
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def _ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


def test_starts_in_id_order() -> None:
    _, queue = _make()
    assert _ids(queue) == list(range(NUM_BLOCKS))
    assert queue.num_free_blocks == NUM_BLOCKS


def test_an_empty_queue_gives_nothing() -> None:
    _, queue = _make(0)
    queue.check_integrity()
    assert _ids(queue) == []
    assert queue.popleft_n(0) == []
    with pytest.raises(IntegrityError, match="1 blocks were taken from a free queue of 0"):
        queue.popleft()


def test_each_method_by_hand() -> None:
    blocks, queue = _make(5)
    assert queue.popleft() is blocks[0]
    assert queue.popleft_n(2) == blocks[1:3]
    queue.append_n([blocks[1]])
    assert _ids(queue) == [3, 4, 1]
    queue.remove(blocks[4])
    assert _ids(queue) == [3, 1]
    queue.prepend_n([blocks[4], blocks[0]])
    assert _ids(queue) == [4, 0, 3, 1]
    queue.append_n([blocks[2]])
    assert _ids(queue) == [4, 0, 3, 1, 2]


@given(st.lists(st.tuples(st.sampled_from(["popleft_n", "remove", "append_n", "prepend_n"]), st.randoms())))
def test_behaves_like_a_list(operations: list[tuple[str, object]]) -> None:
    blocks, queue = _make()
    oracle = list(blocks)
    for name, random in operations:
        outside = [block for block in blocks if block not in oracle]
        random.shuffle(outside)  # type: ignore[attr-defined]
        count: int = random.randint(0, len(outside))  # type: ignore[attr-defined]
        match name:
            case "popleft_n":
                n: int = random.randint(0, len(oracle))  # type: ignore[attr-defined]
                assert queue.popleft_n(n) == oracle[:n]
                del oracle[:n]
            case "remove" if oracle:
                block = random.choice(oracle)  # type: ignore[attr-defined]
                queue.remove(block)
                oracle.remove(block)
            case "append_n":
                queue.append_n(outside[:count])
                oracle += outside[:count]
            case "prepend_n":
                queue.prepend_n(outside[:count])
                oracle[:0] = outside[:count]
        queue.check_integrity()
        assert queue.get_all_free_blocks() == oracle
        assert queue.num_free_blocks == len(oracle)
        assert all(block.next_free_block is block.prev_free_block is None for block in blocks if block not in oracle)


def test_remove_needs_a_member() -> None:
    _, queue = _make()
    taken = queue.popleft()
    with pytest.raises(IntegrityError, match="not in it"):
        queue.remove(taken)


@pytest.mark.parametrize("method", ["append_n", "prepend_n"])
def test_a_block_is_not_freed_twice(method: str) -> None:
    blocks, queue = _make()
    with pytest.raises(IntegrityError, match="in the free queue already"):
        getattr(queue, method)([blocks[3]])
    taken = _make()[1]
    block = taken.popleft()
    with pytest.raises(IntegrityError, match="in the free queue already"):
        getattr(taken, method)([block, block])


def _tear_backwards(blocks: list[KVCacheBlock], queue: FreeKVCacheBlockQueue) -> None:
    blocks[4].prev_free_block = blocks[2]


def _cut(blocks: list[KVCacheBlock], queue: FreeKVCacheBlockQueue) -> None:
    blocks[4].next_free_block = None


def _skip(blocks: list[KVCacheBlock], queue: FreeKVCacheBlockQueue) -> None:
    blocks[3].next_free_block = blocks[5]


def _make_cycle(blocks: list[KVCacheBlock], queue: FreeKVCacheBlockQueue) -> None:
    blocks[5].next_free_block = blocks[2]


def _move_tail(blocks: list[KVCacheBlock], queue: FreeKVCacheBlockQueue) -> None:
    queue.tail.prev_free_block = blocks[1]


def _miscount(blocks: list[KVCacheBlock], queue: FreeKVCacheBlockQueue) -> None:
    queue.num_free_blocks += 1


def _use(blocks: list[KVCacheBlock], queue: FreeKVCacheBlockQueue) -> None:
    blocks[2].ref_cnt = 1


@pytest.mark.parametrize("damage", [_tear_backwards, _cut, _skip, _make_cycle, _move_tail, _miscount, _use])
def test_integrity_check_finds(damage: object) -> None:
    blocks, queue = _make()
    queue.check_integrity()
    damage(blocks, queue)  # type: ignore[operator]
    with pytest.raises(IntegrityError):
        queue.check_integrity()
