"""Blocks with references outside of block tables: those that a transfer reads or writes, and those it has brought."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, get_args

from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.block_pool import BlockPool

HeldState = Literal["loading", "loaded", "pinned", "zombie", "quarantined", "leased"]
"""loading: being written by a load, and the hits before them. loaded: can be hit, kept for the request that they were
loaded for. pinned: being saved. zombie: of a transfer that was given up and has not let go of them. quarantined: the
same, for so long that nothing waits for them any more. leased: promised to another engine."""
HELD_STATES: tuple[HeldState, ...] = get_args(HeldState)


class HeldBlocks:
    """Owns the references of blocks that are in no table, by holder. A block may have several holders, and tables."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[Hashable, tuple[HeldState, list[KVCacheBlock]]] = {}

    def hold(self, holder: Hashable, state: HeldState, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes over one reference to each of `blocks`, in order of position. Null blocks are left out."""
        assert holder not in self._held, f"{holder} holds blocks already"
        self._held[holder] = state, [block for block in blocks if not block.is_null]

    def pin(self, holder: Hashable, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a reference to each of `blocks`, which can be hit, and holds it as pinned."""
        self._pool.touch(blocks)
        self.hold(holder, "pinned", blocks)

    def change(self, holder: Hashable, state: HeldState) -> None:
        """Moves the blocks of a holder to another state."""
        self._held[holder] = state, self._held[holder][1]

    def release(self, holder: Hashable, only: Sequence[KVCacheBlock] | None = None) -> bool:
        """Drops the references of a holder, or those to `only` some of its blocks, the last of a prefix first. Returns
        whether it had any."""
        if holder not in self._held:
            return False
        state, blocks = self._held.pop(holder)
        gone = blocks
        if only is not None:
            unwanted = set(only)
            gone = [block for block in blocks if block in unwanted]
            self._held[holder] = state, [block for block in blocks if block not in unwanted]
        self._pool.free_blocks(reversed(gone))
        return bool(gone)

    def count(self) -> dict[HeldState, int]:
        """Returns the number of references by state; a state without any is left out."""
        counts: dict[HeldState, int] = {}
        for state, blocks in self._held.values():
            counts[state] = counts.get(state, 0) + len(blocks)
        return counts

    def count_blocks(self) -> int:
        """Returns the number of blocks that are held."""
        return len({block for _, blocks in self._held.values() for block in blocks}) if self._held else 0

    def references(self) -> Iterator[KVCacheBlock]:
        """Yields a block for each reference."""
        for _, blocks in self._held.values():
            yield from blocks
