"""The prefixes that engines have cached, as far as is known from what was sent to them.

All engines share one tree. A node is a run of blocks that follow one another in every prompt that has them, so a prompt
passes a few nodes, however long it is. An engine that has a block has all blocks before it: it forgets those first
whose last use is longest ago, and of one use the last block first, which is what its own cache does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.wire.block_hash import BlockHash

DEFAULT_NUM_BLOCKS = 1 << 16


class _Run:
    """Blocks that follow one another. A hash names its block and all before it: where two are equal, so is the way."""

    __slots__ = ("after", "before", "blocks", "uses")

    def __init__(self, blocks: list[BlockHash], before: _Run | None) -> None:
        self.blocks = blocks
        self.before = before
        self.after: dict[BlockHash, _Run] = {}
        """Runs that follow, by their first block."""
        self.uses: dict[int, int] = {}
        """Engines that have the run, and the number of the last use there."""


class _Cache:
    """Cache of one engine."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_blocks = 0
        self.ends: OrderedDict[_Run, int] = OrderedDict()
        """Last runs of prompts, and the numbers of the uses, oldest first. All runs are reached from these."""


class PrefixDirectory:
    """The prefixes of each engine. Single-threaded."""

    def __init__(self) -> None:
        self._root = _Run([], None)
        self._caches: dict[int, _Cache] = {}
        self._num_uses = 0

    def open(self, engine: int, num_blocks: int | None = None) -> None:
        """Begins with an empty cache of an engine that has so many blocks: it is new, or was started again."""
        self.close(engine)
        self._caches[engine] = _Cache(num_blocks or DEFAULT_NUM_BLOCKS)

    def close(self, engine: int) -> None:
        """Forgets an engine, or what it had cached."""
        if (cache := self._caches.pop(engine, None)) is not None:
            self._shrink(engine, cache, 0)

    def count_cached(self, engines: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        """Returns how many blocks at the start of a prompt each of the engines has."""
        found: dict[int, int] = {}
        run, depth, length = self._root, 0, len(hashes)
        while depth < length and (following := run.after.get(hashes[depth])) is not None:
            run = following
            num_equal = _count_equal(run.blocks, hashes, depth)
            depth += num_equal
            found.update(dict.fromkeys(run.uses, depth))
            if num_equal < len(run.blocks):
                break
        return [found.get(engine, 0) for engine in engines] if found else [0] * len(engines)

    def note_sent(self, engine: int, hashes: Sequence[BlockHash]) -> None:
        """Records that an engine computes a prompt."""
        cache = self._caches.get(engine)
        if cache is None or not hashes:
            return
        self._num_uses = use = self._num_uses + 1
        run, depth, length = self._root, 0, len(hashes)
        while depth < length:
            following = run.after.get(hashes[depth])
            if following is None:
                following = run.after[hashes[depth]] = _Run(list(hashes[depth:]), run)
            else:
                num_equal = _count_equal(following.blocks, hashes, depth)
                if num_equal < len(following.blocks):
                    following = self._split(following, num_equal)
            run = following
            depth += len(run.blocks)
            if engine not in run.uses:
                cache.num_blocks += len(run.blocks)
            run.uses[engine] = use
        cache.ends[run] = use
        cache.ends.move_to_end(run)
        if cache.num_blocks > cache.limit:
            self._shrink(engine, cache, cache.limit)

    @staticmethod
    def _split(run: _Run, num_blocks: int) -> _Run:
        """Makes two runs of one, and returns the first, of so many blocks."""
        first = _Run(run.blocks[:num_blocks], run.before)
        first.uses = run.uses.copy()
        assert run.before is not None  # all but the root
        run.before.after[first.blocks[0]] = first
        run.blocks, run.before = run.blocks[num_blocks:], first
        first.after[run.blocks[0]] = run
        return first

    def _shrink(self, engine: int, cache: _Cache, limit: int) -> None:
        """Forgets what was used longest ago, until an engine has no more than `limit` blocks."""
        while cache.num_blocks > limit:
            run, use = cache.ends.popitem(last=False)
            while run.uses.get(engine) == use:  # else a later prompt has passed it, which has an end of its own
                num_left = cache.num_blocks - limit
                if num_left <= 0:
                    cache.ends[run] = use
                    cache.ends.move_to_end(run, last=False)
                    break
                if num_left < len(run.blocks):
                    self._split(run, len(run.blocks) - num_left)
                run = self._forget(engine, cache, run)

    @staticmethod
    def _forget(engine: int, cache: _Cache, run: _Run) -> _Run:
        """Takes a run from an engine, and returns the one before."""
        before = run.before
        assert before is not None  # no engine has the root
        cache.num_blocks -= len(run.blocks)
        del run.uses[engine]
        if not run.uses:
            del before.after[run.blocks[0]]
        return before


def _count_equal(blocks: list[BlockHash], hashes: Sequence[BlockHash], start: int) -> int:
    """Returns how many of the blocks the hashes from `start` on begin with; the first ones are equal."""
    length = min(len(blocks), len(hashes) - start)
    if blocks[length - 1] == hashes[start + length - 1]:
        return length
    low, high = 1, length - 1  # so many are equal; no more than so many are
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] == hashes[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
