"""Chooses computed blocks to be saved, and pins them until they are."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.connector import KVConnectorScheduler
from quire.engine.kv_cache.load_cost import NEVER, QUARANTINE_S
from quire.engine.kv_cache.manager import FullBlocks, KVCacheManager
from quire.engine.request import Request
from quire.wire.kv_transfer import BlockKey, SavedBlock, SaveOrder, SaveResult


def may_be_stored(request: Request) -> bool:
    """Returns whether blocks of a request may be saved and loaded.

    Those with an adapter may not: their hashes have its name and path, and after a restart other files may be there.
    """
    return request.lora_request is None


class BlockSaver:
    """Owns the saves of one engine. Blocks are noted when their step is scheduled, and saved when its result is in.

    A block may be freed, and even given to others, before the result of its step is known: only one that still has the
    content that this step has computed is saved.
    """

    def __init__(self, connector: KVConnectorScheduler, manager: KVCacheManager, max_pinned_blocks: int) -> None:
        self._connector, self._manager = connector, manager
        self._max_pinned_blocks = max_pinned_blocks
        manager.full_blocks = []
        self._steps: deque[tuple[int, list[FullBlocks]]] = deque()
        """Steps without a result that fill blocks: number and blocks."""
        self._filled_by: dict[int, int] = {}
        """The last step that fills a block, by block id; of steps without a result."""
        self.unsent: list[SaveOrder] = []
        """Orders for the next step. They have no id yet."""
        self.sent: dict[int, SaveOrder] = {}
        self._given_up: set[int] = set()
        """Ids of sent saves that are not waited for."""
        self.cancels: list[int] = []
        """Ids to be sent."""
        self._deadlines: dict[int, float] = {}
        """Times at which cancelled saves are given up, by id."""
        self._num_pinned = 0
        self._in_progress: set[tuple[int, bytes]] = set()
        """Group and digest of the blocks in orders."""
        self.num_dropped: Counter[str] = Counter()
        """Blocks that were wanted and are not saved, by reason, since the last statistics."""
        self.num_saved = 0
        """Blocks that were saved, since the last statistics."""

    def note_scheduled(self, step: int) -> None:
        """Notes the blocks that a step fills."""
        full = self._manager.full_blocks
        if full:
            self._manager.full_blocks = []
            self._steps.append((step, full))
            for part in full:
                for table in part.tables:
                    for block in table:
                        self._filled_by[block.block_id] = step

    def note_computed(self, step: int) -> None:
        """Orders saves of the blocks that a step has filled: its result is in."""
        while self._steps and self._steps[0][0] <= step:
            number, full = self._steps.popleft()
            order = SaveOrder(0, [])
            pinned: list[KVCacheBlock] = []
            for part in full:
                self._add(part, number, order, pinned)
            if order.blocks:
                self._manager.held.pin(id(order), pinned)
                self._num_pinned += len(pinned)
                self.unsent.append(order)

    def is_being_filled(self, block_id: int) -> bool:
        """Returns whether a step without a result fills a block: others may hit it, but it cannot be read yet."""
        return block_id in self._filled_by

    def forget_steps(self) -> None:
        """Forgets the blocks of steps that were given up."""
        self._steps.clear()
        self._filled_by.clear()
        self._manager.full_blocks = []

    def _add(self, part: FullBlocks, step: int, order: SaveOrder, pinned: list[KVCacheBlock]) -> None:
        request = part.request
        is_wanted = may_be_stored(request) and self._connector.wants_saves(request)
        hashes = request.block_hashes
        for group_id, table in enumerate(part.tables):
            for index, block in enumerate(table, start=part.start):
                if self._filled_by.get(block.block_id) != step:
                    continue  # it was given to another request, and filled again by a later step
                del self._filled_by[block.block_id]
                content, digest = block.content, hashes[index] if index < len(hashes) else None
                if content is None or digest is None or block.block_hash is None or block.block_hash[:-4] != digest:
                    continue
                key = BlockKey(digest, hashes[index - 1] if index else None, content.token_ids, content.extra_keys)
                if not is_wanted or (group_id, digest) in self._in_progress:
                    continue
                if not self._connector.wants_block(group_id, key):
                    continue
                if self._num_pinned + len(pinned) >= self._max_pinned_blocks:
                    self.num_dropped["pins"] += 1
                    continue
                self._in_progress.add((group_id, digest))
                pinned.append(block)
                order.blocks.append(SavedBlock(group_id, block.block_id, key))

    # -- orders ------------------------------------------------------------------------------------------------

    def send(self, ids: Iterable[int]) -> list[SaveOrder]:
        """Returns the orders to send, with ids from `ids`."""
        orders, self.unsent = self.unsent, []
        for order, save_id in zip(orders, ids, strict=False):
            order.save_id = save_id
            self.sent[save_id] = order
        return orders

    def end(self, result: SaveResult) -> None:
        """Takes in the end of a save. One that is not known has ended before."""
        order = self.sent.pop(result.save_id, None)
        if order is None:
            return
        self._given_up.discard(result.save_id)
        self._deadlines.pop(result.save_id, None)
        self._connector.on_save_finished(order, result)
        self.num_saved += result.num_saved
        if result.num_saved < len(order.blocks):
            reason = "pins" if result.outcome in ("cancelled", "unknown") else result.reason or "error"
            self.num_dropped[reason] += len(order.blocks) - result.num_saved
        self._let_go(order)

    def drop_unsent(self) -> bool:
        """Gives back the blocks of orders that were not sent. Returns whether there were any."""
        orders, self.unsent = self.unsent, []
        for order in orders:
            self.num_dropped["pins"] += len(order.blocks)
            self._let_go(order)
        return bool(orders)

    @property
    def num_expected(self) -> int:
        """Number of sent saves that are waited for."""
        return len(self.sent) - len(self._given_up)

    def cancel_sent(self, now: float) -> None:
        """Asks for the end of all sent saves. Those that have not ended some time later are given up."""
        for save_id in self.sent:
            if save_id not in self._given_up and save_id not in self._deadlines:
                self.cancels.append(save_id)
                self._deadlines[save_id] = now + QUARANTINE_S

    @property
    def next_deadline(self) -> float:
        """Returns the time at which `give_up` has something to do."""
        return min(self._deadlines.values(), default=NEVER)

    def give_up(self, now: float) -> None:
        """Waits no longer for cancelled saves whose time has come; their blocks stay held until they end."""
        for save_id in [i for i, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[save_id]
            self._given_up.add(save_id)
            self._manager.held.change(id(self.sent[save_id]), "quarantined")

    def _let_go(self, order: SaveOrder) -> None:
        self._manager.held.release(id(order))
        self._num_pinned -= len(order.blocks)
        self._in_progress.difference_update((block.group_id, block.key.digest) for block in order.blocks)
