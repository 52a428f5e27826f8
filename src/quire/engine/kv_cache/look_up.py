"""Finding the longest cached prefix of a request, again and again."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.kv_cache.block import CacheableRequest, KVCacheBlock
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.group_manager import GroupManager, find_longest_common_hit
from quire.engine.kv_cache.prefix_query import PrefixQuery


class PrefixLookUp:
    """Looks prefixes up, and remembers the last one.

    While the head of the waiting queue does not fit, it is looked up in every step. What was proven of it stays
    proven: tokens are append-only and contents never change. The answer itself holds until a block is cached or
    evicted, or the request has other tokens.
    """

    def __init__(self, groups: Sequence[GroupManager], pool: BlockPool, block_size: int) -> None:
        self._groups = groups
        self._cached_blocks = pool.cached_blocks
        self._block_size = block_size
        self._query: PrefixQuery | None = None
        self._hits: list[list[KVCacheBlock]] = []
        self._asked: tuple[int, int] | None = None
        """What `_hits` answers: the most blocks, and the number of changes of the cache by then."""

    def find(self, request: CacheableRequest, max_blocks: int) -> list[list[KVCacheBlock]]:
        """Per group, the table of the longest prefix of at most `max_blocks` blocks that every group has cached.

        Nobody may change the lists.
        """
        if self._query is None or self._query.request is not request:
            self._query, self._asked = PrefixQuery(request, self._block_size), None
        asks = (max_blocks, self._cached_blocks.num_changes)
        if asks != self._asked:
            self._hits = find_longest_common_hit(self._groups, self._query, max_blocks)
            self._asked = asks
        return self._hits

    def forget(self) -> None:
        """The last request needs no look-up any more."""
        self._query, self._hits, self._asked = None, [], None
