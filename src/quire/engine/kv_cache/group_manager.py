"""The rules of each kind of attention: which blocks of a request may be dropped, and what counts as a hit.

A group is a set of layers with one block table per request. All groups of a model have one block size and draw from one
pool, so tables of a request have equal lengths; they differ in which entries are the null block. `PrefixLookUp` finds
the longest prefix that all groups have cached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.hashing import PrefixQuery
from quire.engine.request import Request
from quire.wire.kv_cache import AnyKVCacheSpec


class GroupManager(ABC):
    """The rules of one group. Holds no state of requests: tables live in `KVCacheManager`."""

    drops_blocks: ClassVar[bool]
    """True if entries of a table may become null while the request runs."""

    def __init__(self, spec: AnyKVCacheSpec, group_id: int, pool: BlockPool, max_step_tokens: int | None) -> None:
        self.spec = spec
        self.group_id = group_id
        self.pool = pool
        self.max_step_tokens = max_step_tokens

    @abstractmethod
    def find_longest_hit(self, query: PrefixQuery, max_blocks: int) -> list[KVCacheBlock]:
        """Returns the table of the longest cached prefix of at most `max_blocks` blocks. Changes nothing."""

    @abstractmethod
    def first_block_read(self, position: int) -> int:
        """Returns the index of the first block that a token at `position`, or any after it, attends to."""


class FullAttentionManager(GroupManager):
    """Every token attends to all before it: no block is dropped, and a hit is an unbroken run from the start."""

    drops_blocks = False

    def find_longest_hit(self, query: PrefixQuery, max_blocks: int) -> list[KVCacheBlock]:
        hit: list[KVCacheBlock] = []
        for index in range(max_blocks):
            block = self.pool.get_cached_block(query, index, self.group_id)
            if block is None:
                break
            hit.append(block)
        return hit

    def first_block_read(self, position: int) -> int:
        return 0


class WindowManager(GroupManager):
    """A token attends to the tokens of a window before it, or of its own chunk. Blocks further back become null."""

    drops_blocks = True

    def find_longest_hit(self, query: PrefixQuery, max_blocks: int) -> list[KVCacheBlock]:
        """Returns the rightmost run that has all that the token after it reads; null blocks before it."""
        run: list[KVCacheBlock] = []  # right to left
        first = 0  # block of the run that is to end here
        for index in range(max_blocks - 1, -1, -1):
            if not run:  # at least one block, so that a hit always rests on one
                first = min(index, self.first_block_read((index + 1) * self.spec.block_size))
            block = self.pool.get_cached_block(query, index, self.group_id)
            if block is None:
                run.clear()
                continue
            run.append(block)
            if index == first:
                return [self.pool.null_block] * index + run[::-1]
        return []

    def first_block_read(self, position: int) -> int:
        first: int = self.spec.first_token_read(position)
        return first // self.spec.block_size


def make_group_manager(
    spec: AnyKVCacheSpec, group_id: int, pool: BlockPool, max_step_tokens: int | None
) -> GroupManager:
    """Returns the manager for a group of this kind."""
    manager = FullAttentionManager if spec.reach is None else WindowManager
    return manager(spec, group_id, pool, max_step_tokens)


def find_longest_common_hit(
    groups: Sequence[GroupManager], query: PrefixQuery, max_blocks: int
) -> list[list[KVCacheBlock]]:
    """Returns the longest prefix that is a hit in every group: tables of one length, one per group.

    Each group in turn shortens the length to its own best hit, round after round, until all agree. No common hit is
    skipped: a group's best hit within a bound is at least as long as any common hit within it.
    """
    length = max_blocks
    while True:
        hits: list[list[KVCacheBlock]] = []
        for group in groups:
            hits.append(group.find_longest_hit(query, length))
            length = len(hits[-1])
        if all(len(hit) == length for hit in hits):
            return hits


class PrefixLookUp:
    """Looks up prefixes, and caches the last answer.

    While the head of the waiting queue does not fit, it is looked up in every step. Comparisons stay valid: tokens are
    append-only and contents never change. The answer itself is valid until a block is cached or evicted, or the request
    has other tokens.
    """

    def __init__(self, groups: Sequence[GroupManager], pool: BlockPool, block_size: int) -> None:
        self._groups = groups
        self._cached_blocks = pool.cached_blocks
        self._block_size = block_size
        self._query: PrefixQuery | None = None
        self._hits: list[list[KVCacheBlock]] = []
        self._asked: tuple[int, int] | None = None
        """The question that `_hits` answers: the most blocks, and the number of changes of the cache by then."""

    def find(self, request: Request, max_blocks: int) -> list[list[KVCacheBlock]]:
        """Returns, per group, the table of the longest prefix of at most `max_blocks` blocks that every group has
        cached.

        The lists must not be changed.
        """
        if self._query is None or self._query.request is not request:
            self._query, self._asked = PrefixQuery(request, self._block_size), None
        asks = (max_blocks, self._cached_blocks.num_changes)
        if asks != self._asked:
            self._hits = find_longest_common_hit(self._groups, self._query, max_blocks)
            self._asked = asks
        return self._hits

    def forget(self) -> None:
        """Drops the cached answer: its request was admitted."""
        self._query, self._hits, self._asked = None, [], None
