"""Blocks with references outside of block tables: those of transfers, and those that other engines were promised."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, get_args

from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.request import Request
from quire.wire.stats import KVTransferStats

HeldState = Literal["loading", "loaded", "pinned", "zombie", "quarantined", "leased"]
"""loading: being written by a load, and the hits before them. loaded: can be hit, kept for the request that they were
loaded for. pinned: being saved. zombie: of a transfer that was given up and has not let go of them. quarantined: the
same, for so long that nothing waits for them any more. leased: promised to another engine."""
HELD_STATES: tuple[HeldState, ...] = get_args(HeldState)


class TransferObserver:
    """Base of observers of transfers and of the blocks that they hold. They must not change anything."""

    def on_match(self, request: Request, source: str, num_tokens: int) -> None:
        """A load of these tokens, which a source has, was ordered. The last call of `on_held` had its blocks."""

    def on_loaded(self, request: Request, num_tokens: int, outcome: str) -> None:
        """A request waits no longer for its load, which has brought `num_tokens` verified tokens."""

    def on_held(self, holder: Hashable, state: HeldState, blocks: Sequence[KVCacheBlock]) -> None:
        """A holder got a reference to each of `blocks`: loading, pinned or leased."""

    def on_accepted(self, holder: Hashable, num_blocks: int) -> None:
        """The first `num_blocks` positions of a load can be hit, and the rest of its blocks were freed."""

    def on_released(self, holder: Hashable) -> None:
        """A holder has dropped all its references."""


def add_count(counts: dict[str, int], name: str, number: int = 1) -> None:
    """Adds to a count of statistics."""
    counts[name] = counts.get(name, 0) + number


class HeldBlocks:
    """Owns the references of blocks that are in no table, by holder. A block may have several holders, and tables."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[Hashable, tuple[HeldState, list[KVCacheBlock]]] = {}
        self.stats = KVTransferStats()
        """Counts of transfers since the last statistics; they are replaced by new ones then."""
        self.has_changed = True
        """True if `count` may have another answer, or `stats` has, than when this was set to False."""
        self.observer = TransferObserver()

    def hold(self, holder: Hashable, state: HeldState, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes over one reference to each of `blocks`, in order of position. Null blocks are left out."""
        held = [block for block in blocks if not block.is_null]
        self._pool.hold_blocks(held)
        self._add(holder, state, held)

    def _add(self, holder: Hashable, state: HeldState, blocks: list[KVCacheBlock]) -> None:
        assert holder not in self._held, f"{holder} holds blocks already"
        self.has_changed = True
        self._held[holder] = state, blocks
        self.observer.on_held(holder, state, blocks)

    def pin(self, holder: Hashable, blocks: list[KVCacheBlock]) -> None:
        """Adds a reference to each of `blocks`, which can be hit, and holds it as pinned. The list must not be changed
        any more."""
        self._pool.pin_blocks(blocks)
        self._add(holder, "pinned", blocks)

    def lease(self, holder: Hashable, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Adds a reference to each block of a cached prefix, per group, and holds it as leased."""
        for table in tables:
            self._pool.touch(table)
        self.hold(holder, "leased", [block for column in zip(*tables, strict=True) for block in column])

    def change(self, holder: Hashable, state: HeldState) -> None:
        """Moves the blocks of a holder to another state."""
        self.has_changed = True
        self._held[holder] = state, self._held[holder][1]

    def release(self, holder: Hashable, only: Sequence[KVCacheBlock] | None = None) -> bool:
        """Drops the references of a holder, or those to `only` some of its blocks, the last of a prefix first. Returns
        whether it had any."""
        if holder not in self._held:
            return False
        self.has_changed = True
        state, blocks = self._held.pop(holder)
        gone = blocks
        if only is not None:
            unwanted = set(only)
            gone = [block for block in blocks if block in unwanted]
            self._held[holder] = state, [block for block in blocks if block not in unwanted]
        else:
            self.observer.on_released(holder)
        self._pool.release_blocks(reversed(gone))
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

    def count_alone(self) -> int:
        """Returns the number of blocks that are held and in no table."""
        return self._pool.num_only_held

    def references(self) -> Iterator[KVCacheBlock]:
        """Yields a block for each reference."""
        for _, blocks in self._held.values():
            yield from blocks
