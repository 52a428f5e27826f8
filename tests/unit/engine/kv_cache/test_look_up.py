"""A look-up is repeated exactly when its answer may have changed."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.group_manager import PrefixLookUp, make_group_manager
from tests.unit.engine.kv_cache.model import BLOCK_SIZE, ModelRequest, admit, decode, full, letters, make_manager


class Counted:
    """A look-up in a pool that has the first two blocks of ABCDEFGH... cached; counts how often it really looks."""

    def __init__(self) -> None:
        self.pool = BlockPool(20)
        group = make_group_manager(full(), 0, self.pool, None)
        self.look_up = PrefixLookUp([group], self.pool, BLOCK_SIZE)
        self.request = ModelRequest("r", letters("ABCDEFGHIJKLM"))
        self.blocks = self.cache(self.request, 2)
        self.num_looks = 0
        look = group.find_longest_hit

        def find_longest_hit(*args: Any) -> list[KVCacheBlock]:
            self.num_looks += 1
            return look(*args)

        group.find_longest_hit = find_longest_hit  # type: ignore[method-assign]

    def cache(self, request: ModelRequest, num_blocks: int) -> list[KVCacheBlock]:
        """Cache the first blocks of a request."""
        blocks = self.pool.get_new_blocks(num_blocks)
        self.pool.cache_full_blocks(request, [blocks], range(num_blocks), BLOCK_SIZE, None)
        return blocks

    def find(self, request: ModelRequest | None = None, max_blocks: int = 3) -> tuple[int, int]:
        """(blocks found, times looked)."""
        before = self.num_looks
        (hit,) = self.look_up.find(request or self.request, max_blocks)
        return len(hit), self.num_looks - before


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_the_same_question_is_answered_from_memory(counted: Counted) -> None:
    assert counted.find() == (2, 1)
    assert counted.find() == (2, 0)
    counted.pool.free_blocks(counted.blocks)  # free blocks can still be hit
    assert counted.find() == (2, 0)


def test_an_evicted_block_is_noticed(counted: Counted) -> None:
    assert counted.find() == (2, 1)
    counted.pool.evict_blocks(counted.blocks[1:])
    assert counted.find() == (1, 1)


def test_a_block_cached_meanwhile_is_noticed(counted: Counted) -> None:
    assert counted.find() == (2, 1)
    counted.cache(counted.request, 3)
    assert counted.find() == (3, 1)


def test_another_question_is_looked_up(counted: Counted) -> None:
    other = ModelRequest("r", letters("ABCDxxxxx"))  # of the same name
    assert counted.find() == (2, 1)
    assert counted.find(max_blocks=1) == (1, 1)
    assert counted.find(other, max_blocks=1) == (1, 1)
    assert counted.find(max_blocks=1) == (1, 1)
    counted.look_up.forget()
    assert counted.find(max_blocks=1) == (1, 1)


def test_what_was_proven_is_not_compared_again(counted: Counted) -> None:
    assert counted.find() == (2, 1)
    content = counted.blocks[0].content
    assert content is not None
    content.token_ids = ()  # would be noticed
    counted.cache(ModelRequest("other", letters("zzzz")), 1)
    assert counted.find() == (2, 1)
    assert counted.find(ModelRequest("another", counted.request.all_token_ids)) == (0, 1)


def test_an_admitted_request_is_looked_up_anew_after_a_preemption() -> None:
    manager = make_manager(20)
    request = ModelRequest("r", letters("ABCDEFGH"))
    assert admit(manager, request) == 0
    decode(manager, request, letters("IJKL"))
    manager.free(request)
    request.num_computed_tokens = 0
    assert admit(manager, request) == 8  # all but its last block, which holds its last token
