"""Blocks with references outside of block tables: those of transfers, and those that other engines were promised."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.hashing import block_extra_keys
from quire.engine.request import Request
from quire.wire.kv_transfer import BlockKey, SavedBlocks, SaveOrder, SaveResult
from quire.wire.stats import KVTransferStats

if TYPE_CHECKING:
    from quire.engine.kv_cache.manager import KVCacheManager

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


class SaveOrders:
    """Orders of which each ends with a `SaveResult`."""

    def __init__(self) -> None:
        self.unsent: list[SaveOrder] = []
        """Orders for the next step. They have no id yet."""
        self.sent: dict[int, SaveOrder] = {}
        """Orders that the worker has, by id, the oldest first."""
        self.cancels: list[int] = []
        """Ids to be sent."""

    def send(self, ids: Iterable[int]) -> list[SaveOrder]:
        """Returns the orders to send, with ids from `ids`."""
        orders, self.unsent = self.unsent, []
        for order, save_id in zip(orders, ids, strict=False):
            order.save_id = save_id
            self.sent[save_id] = order
        return orders


class BlockLeases(SaveOrders):
    """Owns the leases of one engine, and the holds on their blocks. A lease is sent to the worker as a save, and ends
    with its result."""

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__()
        self._manager = manager
        self._broken: set[int] = set()
        """Ids of leases that were cancelled."""
        self._given_up: set[int] = set()
        """Ids of those that are not waited for."""

    def grant(self, request: Request, name: str, filled: Collection[int]) -> int:
        """Holds the computed blocks of an ended request's prompt, but for its last token. Returns how many tokens they
        hold: whole blocks, and all that a token after them reads.

        What is found may be another request's block of the same content: with one that a step in flight still fills
        (`filled`), nothing is held.
        """
        size = self._manager.block_size
        order, hashes = SaveOrder(0, SavedBlocks(extra_keys=[]), name), request.block_hashes
        num_blocks = min((request.num_prompt_tokens - 1) // size, len(hashes))
        tables = self._manager.find_cached(request, num_blocks) if num_blocks > 0 else []
        if not tables or len(tables[0]) < num_blocks:
            return 0
        if any(block.block_id in filled for table in tables for block in table if not block.is_null):
            return 0
        self._manager.held.lease(id(order), tables)
        for index in range(num_blocks):
            tokens = tuple(request.all_token_ids[index * size : (index + 1) * size])
            key = BlockKey(
                hashes[index], hashes[index - 1] if index else None, tokens, block_extra_keys(request, index, size)
            )
            for group_id, table in enumerate(tables):
                if not table[index].is_null:
                    order.blocks.add(group_id, table[index].block_id, key)
        self.unsent.append(order)
        return num_blocks * size

    def end(self, result: SaveResult) -> None:
        """Takes in the end of a lease. One that is not known has ended before, or is no lease."""
        order = self.sent.pop(result.save_id, None)
        if order is not None:
            self._broken.discard(result.save_id)
            self._given_up.discard(result.save_id)
            add_count(self._manager.held.stats.num_leases, result.reason or "broken")
            self._manager.held.release(id(order))

    @property
    def num_expected(self) -> int:
        """Number of leases whose blocks come back."""
        return len(self.unsent) + len(self.sent) - len(self._given_up)

    def break_oldest(self) -> bool:
        """Asks for the blocks of the oldest lease back: they are needed. Returns whether they are free already, because
        it was not sent."""
        lease_id = next((i for i in self.sent if i not in self._broken), None)
        if lease_id is not None:
            self._broken.add(lease_id)
            self.cancels.append(lease_id)
        elif self.unsent:
            self._manager.held.release(id(self.unsent.pop(0)))
            add_count(self._manager.held.stats.num_leases, "broken")
            return True
        return False

    def break_all(self) -> None:
        """Asks for the blocks of all leases back."""
        for _ in range(len(self.sent) - len(self._broken) + len(self.unsent)):
            self.break_oldest()

    def give_up(self) -> None:
        """Waits no longer for the leases that were broken and have not ended."""
        for lease_id in self._broken - self._given_up:
            self._given_up.add(lease_id)
            self._manager.held.change(id(self.sent[lease_id]), "quarantined")
