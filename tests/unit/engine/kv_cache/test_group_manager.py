"""Hits in each kind of group, and hits that several groups have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.group_manager import GroupManager, find_longest_common_hit, make_group_manager
from quire.engine.kv_cache.hashing import PrefixQuery
from quire.wire.kv_cache import AnyKVCacheSpec
from tests.unit.engine.kv_cache.model import BLOCK_SIZE, ModelRequest, chunked, full, sliding

REQUEST = ModelRequest("r", list(range(10 * BLOCK_SIZE)))


def _groups(*specs_and_cached: tuple[AnyKVCacheSpec, set[int]]) -> list[GroupManager]:
    """Groups that have only the given blocks of REQUEST cached; its block i has id 10 g + i + 1 in group g."""
    pool = BlockPool(10 * len(specs_and_cached) + 1, len(specs_and_cached))
    tables = [pool.get_new_blocks(10) for _ in specs_and_cached]
    pool.cache_full_blocks(REQUEST, tables, range(10), BLOCK_SIZE, None)
    for table, (_, cached) in zip(tables, specs_and_cached, strict=True):
        pool.evict_blocks(block for index, block in enumerate(table) if index not in cached)
    return [make_group_manager(spec, i, pool, None) for i, (spec, _) in enumerate(specs_and_cached)]


def _hit(groups: list[GroupManager], max_blocks: int = 10) -> list[list[int]]:
    tables = find_longest_common_hit(groups, PrefixQuery(REQUEST, BLOCK_SIZE), max_blocks)
    return [[block.block_id for block in table] for table in tables]


@pytest.mark.parametrize(
    ("cached", "max_blocks", "expected"),
    [
        (set(), 10, []),
        ({0, 1, 2}, 10, [1, 2, 3]),
        ({0, 1, 2}, 2, [1, 2]),
        ({0, 2, 3}, 10, [1]),
        ({1, 2}, 10, []),
    ],
)
def test_full_attention_hit(cached: set[int], max_blocks: int, expected: list[int]) -> None:
    assert _hit(_groups((full(), cached)), max_blocks) == [expected]


@pytest.mark.parametrize(
    ("window", "cached", "max_blocks", "expected"),
    [
        (5, {3}, 10, [0, 0, 0, 4]),  # the 4 tokens before the next fill one block
        (6, {3}, 10, []),  # 5 tokens need two
        (6, {2, 3}, 10, [0, 0, 3, 4]),
        (6, {0, 2}, 10, [1]),  # a shorter run counts from the start of the prompt on
        (6, {1, 2, 5, 6, 9}, 10, [0, 0, 0, 0, 0, 6, 7]),  # the rightmost run that is long enough
        (6, {1, 2, 5, 6}, 6, [0, 2, 3]),
        (9, {0, 1, 2, 3}, 10, [0, 0, 3, 4]),
        (1, {0, 1}, 10, [0, 2]),  # needs nothing before it, but a hit is proven by a block all the same
        (100, {0, 1}, 10, [1, 2]),
        (100, {1, 2}, 10, []),
        (5, set(), 10, []),
    ],
)
def test_sliding_window_hit(window: int, cached: set[int], max_blocks: int, expected: list[int]) -> None:
    assert _hit(_groups((sliding(window), cached)), max_blocks) == [expected]


@pytest.mark.parametrize(
    ("window", "position", "expected"),
    [(1, 0, 0), (1, 3, 0), (1, 4, 1), (4, 6, 0), (4, 7, 1), (5, 7, 0), (5, 8, 1), (100, 50, 0)],
)
def test_first_block_read(window: int, position: int, expected: int) -> None:
    group = _groups((sliding(window), set()))[0]
    assert group.first_block_read(position) == expected
    assert _groups((full(), set()))[0].first_block_read(position) == 0


@pytest.mark.parametrize(
    ("chunk", "cached", "max_blocks", "expected"),
    [
        (8, {1}, 10, [0, 2]),  # the next token begins a chunk; a hit is proven by a block all the same
        (8, {2}, 10, [0, 0, 3]),  # the next token has half a chunk before it
        (8, {3}, 10, [0, 0, 0, 4]),
        (6, {2}, 10, [0, 0, 3]),  # position 12 begins a chunk
        (6, {1}, 10, [0, 2]),  # position 8 reads from 6 on, in the second block
        (6, {3}, 10, [0, 0, 0, 4]),  # position 16 reads from 12 on
        (10, {1}, 10, []),  # position 8 reads from 0 on
        (10, {0, 3}, 10, [1]),  # position 16 reads from 10 on, in the third block
        (10, {2, 3}, 10, [0, 0, 3, 4]),
        (100, {0, 1}, 10, [1, 2]),
        (100, {1, 2}, 10, []),
    ],
)
def test_chunked_hit(chunk: int, cached: set[int], max_blocks: int, expected: list[int]) -> None:
    assert _hit(_groups((chunked(chunk), cached)), max_blocks) == [expected]


@pytest.mark.parametrize(("chunk", "position", "expected"), [(6, 5, 0), (6, 6, 1), (6, 11, 1), (6, 12, 3), (8, 8, 2)])
def test_first_block_read_of_a_chunk(chunk: int, position: int, expected: int) -> None:
    assert _groups((chunked(chunk), set()))[0].first_block_read(position) == expected


def test_groups_agree_on_the_shortest() -> None:
    assert _hit(_groups((full(), {0, 1, 2, 3}), (full(), {0, 1}))) == [[1, 2], [11, 12]]


def test_a_sliding_group_shrinks_what_a_full_group_found() -> None:
    groups = _groups((full(), {0, 1, 2, 3, 4}), (sliding(6), {1, 2, 4}))
    assert _hit(groups) == [[1, 2, 3], [0, 12, 13]]


def test_shrinking_goes_on_until_all_agree() -> None:
    """Each group alone finds more: 7, then 6 and 5, where both start again, and meet at 3."""
    groups = _groups((full(), {0, 1, 2, 3, 4, 5, 6}), (sliding(6), {1, 2, 4, 5}), (sliding(6), {1, 2, 3, 4}))
    assert _hit(groups) == [[1, 2, 3], [0, 12, 13], [0, 22, 23]]


def test_no_common_hit() -> None:
    assert _hit(_groups((full(), {0, 1, 2}), (sliding(6), {2, 3}))) == [[], []]


@given(
    st.lists(st.tuples(st.sampled_from([None, 1, 5, 6, 9, 14]), st.sets(st.integers(0, 9))), min_size=1, max_size=4),
    st.integers(0, 10),
)
def test_longest_common_hit_against_brute_force(kinds: list[tuple[int | None, set[int]]], max_blocks: int) -> None:
    def is_hit(window: int | None, cached: set[int], length: int) -> bool:
        """Returns whether everything that the token after `length` blocks attends to is cached (and at least one
        block)."""
        first_token = 0 if window is None else max(0, length * BLOCK_SIZE - window + 1)
        needed = range(min(first_token // BLOCK_SIZE, max(length - 1, 0)), length)
        return cached.issuperset(needed)

    expected = max(n for n in range(max_blocks + 1) if all(is_hit(window, cached, n) for window, cached in kinds))
    groups = _groups(*((full() if window is None else sliding(window), cached) for window, cached in kinds))
    for (window, cached), group_id, ids in zip(kinds, range(4), _hit(groups, max_blocks), strict=False):
        assert len(ids) == expected
        for index, block_id in enumerate(ids):
            assert block_id in (0, 10 * group_id + index + 1)
            assert block_id == 0 or index in cached
        first_token = 0 if window is None else max(0, expected * BLOCK_SIZE - window + 1)
        assert all(ids[first_token // BLOCK_SIZE :])  # nothing that is read is null
