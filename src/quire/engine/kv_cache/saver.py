"""Chooses computed blocks to be saved, and pins them until they are."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.kv_cache.audits import NONE
from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.connector import KVConnectorScheduler
from quire.engine.kv_cache.hashing import stored_extra_keys, stored_hashes
from quire.engine.kv_cache.load_cost import NEVER, QUARANTINE_S
from quire.engine.kv_cache.manager import FullBlocks, KVCacheManager
from quire.wire.kv_transfer import BlockKey, SavedBlock, SaveOrder, SaveResult

MAX_POSTPONED = 1 << 16
"""Most blocks that wait to be offered to the store again."""


class _Postponed(NamedTuple):
    """A computed block that could not be saved when it was."""

    group_id: int
    block_hash: bytes
    """Its hash in the cache."""
    key: BlockKey
    computed_at: float


@dataclass
class SaveCounts:
    """Counts of blocks to be saved. Those that began were saved or dropped since, or wait."""

    num_begun: int = 0
    num_saved: int = 0
    num_dropped: Counter[str] = field(default_factory=Counter)
    """Counts by reason."""
    num_audited: Counter[str] = field(default_factory=Counter)
    """Counts by outcome: same, differs, skipped."""
    save_lags: list[float] = field(default_factory=list)
    """Per save that has stored blocks: time since its oldest block was computed."""


class BlockSaver:
    """Owns the saves of one engine. Blocks are noted when their step is scheduled, and saved when its result is in.

    A block may be freed, and even given to others, before the result of its step is known: only one that still has the
    content that this step has computed is saved.

    A block for which there is no pin, or that the store cannot take yet, is *postponed*: it is offered again as long as
    it can be hit. It holds no reference, so it may be evicted meanwhile.
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
        self._postponed: dict[int, _Postponed] = {}
        """Blocks to be offered again, by block id, the oldest first. Each is a full one whose step's result is in; one
        that is filled again leaves when that step is scheduled, which offers it itself."""
        self._retry_at = NEVER
        """Time at which the store can take postponed blocks."""
        self._in_progress: set[tuple[int, bytes]] = set()
        """Group and digest of the blocks in orders."""
        self.counts = SaveCounts()
        """Counts since the last statistics; they are replaced by new ones then."""
        self._computed_at: dict[int, float] = {}
        """The time at which the oldest block of an order was computed, by `id` of the order."""

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
                        if self._postponed.pop(block.block_id, None) is not None:
                            self.counts.num_dropped["evicted"] += 1

    def note_computed(self, step: int, now: float) -> None:
        """Orders saves of the blocks that a step has filled: its result is in."""
        while self._steps and self._steps[0][0] <= step:
            number, full = self._steps.popleft()
            blocks: list[SavedBlock] = []
            audited: list[SavedBlock] = []
            for part in full:
                self._add(part, number, blocks, audited, now)
            self._order(blocks, now)
            if audited:
                self._order(audited, now, self._connector.plan_audit(audited))

    def is_being_filled(self, block_id: int) -> bool:
        """Returns whether a step without a result fills a block: others may hit it, but it cannot be read yet."""
        return block_id in self._filled_by

    def forget_steps(self) -> None:
        """Forgets the blocks of steps that were given up."""
        self._steps.clear()
        self._filled_by.clear()
        self._manager.full_blocks = []

    def _add(
        self, part: FullBlocks, step: int, blocks: list[SavedBlock], audited: list[SavedBlock], now: float
    ) -> None:
        request = part.request
        connector, filled_by = self._connector, self._filled_by
        to_audit = NONE if connector.audits is None else connector.audits.positions_of(request)
        is_wanted = connector.may_transfer(request) and connector.wants_saves(request)
        hashes, stored = request.block_hashes, stored_hashes(request, self._manager.block_size)
        adapter = request.report.adapter_digest
        for group_id, table in enumerate(part.tables):
            for index, block in enumerate(table, start=part.start):
                if filled_by.get(block.block_id) != step:
                    continue  # it was given to another request, and filled again by a later step
                del filled_by[block.block_id]
                content, block_hash = block.content, hashes[index] if index < len(hashes) else None
                if content is None or block_hash is None or not _has_content(block, block_hash):
                    continue
                is_audited = index in to_audit
                if not is_wanted and not is_audited:
                    continue
                keys = content.extra_keys and stored_extra_keys(content.extra_keys, adapter)
                key = BlockKey(stored[index], stored[index - 1] if index else None, content.token_ids, keys)
                if is_audited and self._has_pin([*blocks, *audited]):
                    audited.append(SavedBlock(group_id, block.block_id, key))
                elif is_audited:
                    self.counts.num_audited["skipped"] += 1
                elif not self._has_pin([*blocks, *audited]) or connector.seconds_to_save() > 0:
                    self._postpone(block, _Postponed(group_id, block_hash, key, now))
                elif self._offer(SavedBlock(group_id, block.block_id, key), blocks):
                    self.counts.num_begun += 1

    def _has_pin(self, blocks: Sequence[SavedBlock]) -> bool:
        """Returns whether another block may be pinned beside `blocks` of a new order."""
        return self._num_pinned + len(blocks) < self._max_pinned_blocks

    def _offer(self, block: SavedBlock, blocks: list[SavedBlock]) -> bool:
        """Adds a block to those of a new order if the store wants it. Returns whether it does."""
        name = block.group_id, block.key.digest
        if name in self._in_progress or not self._connector.wants_block(block.group_id, block.key):
            return False
        self._in_progress.add(name)
        blocks.append(block)
        return True

    def _order(self, blocks: list[SavedBlock], computed_at: float, audit: dict[str, Any] | None = None) -> None:
        """Pins blocks, and orders their save, or their `audit`."""
        if blocks:
            order, all_blocks = SaveOrder(0, blocks, audit=audit), self._manager.block_pool.blocks
            self._manager.held.pin(id(order), [all_blocks[block.block_id] for block in blocks])
            self._num_pinned += len(blocks)
            self._computed_at[id(order)] = computed_at
            self.unsent.append(order)

    # -- postponed blocks --------------------------------------------------------------------------------------

    def _postpone(self, block: KVCacheBlock, postponed: _Postponed) -> None:
        if len(self._postponed) >= MAX_POSTPONED:
            del self._postponed[next(iter(self._postponed))]
            self.counts.num_dropped["evicted"] += 1
        self._postponed[block.block_id] = postponed
        self.counts.num_begun += 1

    def offer_postponed(self, now: float) -> None:
        """Orders saves of postponed blocks, as far as there are pins. All blocks that steps in flight fill must have
        been noted: what such a step fills again is not computed yet."""
        self._retry_at = NEVER
        blocks: list[SavedBlock] = []
        if not self._postponed or not self._has_pin(blocks):
            return  # the end of a save is news
        computed_at = now
        while self._postponed and self._has_pin(blocks):
            seconds = self._connector.seconds_to_save()
            if seconds > 0:
                self._retry_at = now + seconds
                break
            block_id = next(iter(self._postponed))
            group_id, block_hash, key, block_computed_at = self._postponed.pop(block_id)
            if not _has_content(self._manager.block_pool.blocks[block_id], block_hash):
                self.counts.num_dropped["evicted"] += 1
                continue
            if self._offer(SavedBlock(group_id, block_id, key), blocks):
                computed_at = min(computed_at, block_computed_at)
            else:
                self.counts.num_dropped["present"] += 1
        self._order(blocks, computed_at)

    def forget_postponed(self) -> None:
        """Forgets postponed blocks: nothing can be hit any more."""
        self.counts.num_dropped["evicted"] += len(self._postponed)
        self._postponed.clear()
        self._retry_at = NEVER

    def count_waiting(self) -> dict[str, int]:
        """Returns the number of blocks that are to be saved, by state: pinned for an order, or postponed. Among the
        latter are some that were evicted since."""
        orders = [*self.unsent, *self.sent.values()]
        num_audited = sum(len(order.blocks) for order in orders if order.audit is not None)
        return {"pinned": self._num_pinned - num_audited, "postponed": len(self._postponed)}

    # -- orders ------------------------------------------------------------------------------------------------

    def send(self, ids: Iterable[int]) -> list[SaveOrder]:
        """Returns the orders to send, with ids from `ids`."""
        orders, self.unsent = self.unsent, []
        for order, save_id in zip(orders, ids, strict=False):
            order.save_id = save_id
            self.sent[save_id] = order
        return orders

    def end(self, result: SaveResult, ended_at: float) -> None:
        """Takes in the end of a save. One that is not known has ended before."""
        order = self.sent.pop(result.save_id, None)
        if order is None:
            return
        self._given_up.discard(result.save_id)
        self._deadlines.pop(result.save_id, None)
        if order.audit is not None:
            self._end_audit(order, result)
            return
        self._connector.on_save_finished(order, result)
        self.counts.num_saved += result.num_saved - result.num_present
        if result.num_present:
            self.counts.num_dropped["present"] += result.num_present
        if result.num_saved > result.num_present:
            self.counts.save_lags.append(ended_at - self._computed_at[id(order)])
        if result.num_saved < len(order.blocks):
            reason = "pins" if result.outcome in ("cancelled", "unknown") else result.reason or "error"
            self.counts.num_dropped[reason] += len(order.blocks) - result.num_saved
        self._let_go(order)

    def _end_audit(self, order: SaveOrder, result: SaveResult) -> None:
        num_differing = len(result.differing)
        num_skipped = max(0, len(order.blocks) - result.num_saved - num_differing)
        self.counts.num_audited.update(same=result.num_saved, differs=num_differing, skipped=num_skipped)
        for index in result.differing:
            self._connector.on_difference(order.blocks[index])
        self._let_go(order)

    def drop_unsent(self) -> bool:
        """Gives back the blocks of orders that were not sent. Returns whether there were any."""
        orders, self.unsent = self.unsent, []
        for order in orders:
            if order.audit is not None:
                self._end_audit(order, SaveResult(0, 0, "cancelled"))
                continue
            self.counts.num_dropped["pins"] += len(order.blocks)
            self._connector.on_save_finished(order, SaveResult(0, 0, "cancelled"))
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
        """Returns the time at which `give_up` or `offer_postponed` has something to do."""
        return min(self._retry_at, *self._deadlines.values()) if self._deadlines else self._retry_at

    def give_up(self, now: float) -> None:
        """Waits no longer for cancelled saves whose time has come; their blocks stay held until they end."""
        for save_id in [i for i, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[save_id]
            self._given_up.add(save_id)
            self._manager.held.change(id(self.sent[save_id]), "quarantined")

    def _let_go(self, order: SaveOrder) -> None:
        self._manager.held.release(id(order))
        del self._computed_at[id(order)]
        self._num_pinned -= len(order.blocks)
        if order.audit is None:
            self._in_progress.difference_update((block.group_id, block.key.digest) for block in order.blocks)


def _has_content(block: KVCacheBlock, digest: bytes) -> bool:
    """Returns whether a block can be hit as the one with this digest, in its group."""
    return block.block_hash is not None and block.block_hash.startswith(digest)  # the group's number follows
