"""Orders that each end with a `SaveResult`, and those of them that are leases to other engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quire.engine.kv_cache.hashing import block_extra_keys
from quire.engine.kv_cache.held import add_count
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request
from quire.wire.kv_transfer import BlockKey, SavedBlocks, SaveOrder, SaveResult


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
