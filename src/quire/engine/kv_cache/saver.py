"""Chooses computed blocks to be saved, and pins them until they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

from quire.engine.kv_cache.block import KVCacheBlock
from quire.engine.kv_cache.connector import ExternalMatch, KVConnectorScheduler
from quire.engine.kv_cache.hashing import stored_extra_keys, stored_hashes
from quire.engine.kv_cache.held import add_count
from quire.engine.kv_cache.leases import SaveOrders
from quire.engine.kv_cache.load_cost import NEVER, QUARANTINE_S
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request
from quire.wire.block_hash import BlockHash
from quire.wire.kv_transfer import AWAY, SavedBlocks, SaveOrder, SaveResult

MIN_RETRY_S = 0.001
"""Least time after which a store is asked again that has taken a part of what was offered."""
MAX_POSTPONED = 1 << 16
"""Most blocks that wait to be offered to the store again."""


class _Candidates:
    """Blocks of one group that are to be offered to the store once they are computed, in order: a list per field."""

    __slots__ = ("adapters", "blocks", "digests", "noted_at", "parents")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.digests: list[BlockHash] = []
        """Hashes by which a store knows them."""
        self.parents: list[BlockHash | None] = []
        self.adapters: list[str] = []
        """Digests of their adapters."""
        self.noted_at: list[int] = []
        """Number of changes of the cache when they were noted: a block that was forgotten later has not this content
        any more, or has it from a later step."""

    def add(
        self, table: list[KVCacheBlock], hashes: list[BlockHash], start: int, stop: int, adapter: str, noted_at: int
    ) -> None:
        """Adds the blocks of a request from index `start` on."""
        number = stop - start
        self.blocks += table[start:stop]
        self.digests += hashes[start:stop]
        self.parents += hashes[start - 1 : stop - 1] if start else [None, *hashes[: stop - 1]]
        self.adapters += [adapter] * number
        self.noted_at += [noted_at] * number

    def add_one(
        self, block: KVCacheBlock, digest: BlockHash, parent: BlockHash | None, adapter: str, noted_at: int
    ) -> None:
        """Adds a block, in half the time that slices of one take."""
        self.blocks.append(block)
        self.digests.append(digest)
        self.parents.append(parent)
        self.adapters.append(adapter)
        self.noted_at.append(noted_at)

    def take_unchanged(self) -> _Candidates:
        """Returns those that still have the content that they were noted with. Null blocks are left out."""
        pairs = enumerate(zip(self.blocks, self.noted_at, strict=True))
        return self.take([i for i, (block, noted_at) in pairs if block.forgotten_at <= noted_at])

    def take(self, indices: Sequence[int]) -> _Candidates:
        """Returns those at `indices`, which are in order."""
        if len(indices) == len(self.blocks):
            return self
        taken = _Candidates()
        taken.blocks = [self.blocks[i] for i in indices]
        taken.digests = [self.digests[i] for i in indices]
        taken.parents = [self.parents[i] for i in indices]
        taken.adapters = [self.adapters[i] for i in indices]
        taken.noted_at = [self.noted_at[i] for i in indices]
        return taken


class _FilledBlocks:
    """Blocks that a step fills."""

    __slots__ = ("audited", "kept_off", "saved")

    def __init__(self, num_groups: int) -> None:
        self.saved = _make_candidates(num_groups)
        """Blocks to be saved, per group."""
        self.audited: dict[str, tuple[ExternalMatch, list[_Candidates]]] = {}
        """Blocks to be compared, by source, with a match of it."""
        self.kept_off = _make_candidates(num_groups)
        """Blocks that are neither."""

    def list_blocks(self) -> Iterator[KVCacheBlock]:
        """Yields the saved, the audited and the other blocks."""
        for groups in (self.saved, self.kept_off, *(compared for _, compared in self.audited.values())):
            for group in groups:
                yield from group.blocks


def _make_candidates(num_groups: int) -> list[_Candidates]:
    return [_Candidates() for _ in range(num_groups)]


class _Draft:
    """An order that is being made, and what is known of its blocks until it ends."""

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.adapters: list[str] = []
        """Digests of their adapters."""
        self.columns = SavedBlocks()
        self.computed_at = 0.0
        """Time at which the oldest of them was computed."""
        self.noted_at = 0
        """Number of changes of the cache when they were ordered."""

    def add(self, group_id: int, more: _Candidates) -> None:
        """Adds blocks of a group, none of which has lost its content."""
        contents = [block.content for block in more.blocks]
        keys = [content.extra_keys for content in contents if content is not None]
        columns = self.columns
        if columns.extra_keys is not None or any(keys):
            if columns.extra_keys is None:
                columns.extra_keys = [None] * len(columns)
            columns.extra_keys += [
                key and stored_extra_keys(key, adapter) for key, adapter in zip(keys, more.adapters, strict=True)
            ]
        columns.group_ids += [group_id] * len(contents)
        columns.block_ids += [block.block_id for block in more.blocks]
        columns.digests += more.digests
        columns.parents += more.parents
        columns.token_ids += [content.token_ids for content in contents if content is not None]
        self.blocks += more.blocks
        self.adapters += more.adapters


class _Postponed(NamedTuple):
    """A computed block that could not be saved when it was."""

    group_id: int
    digest: BlockHash
    parent: BlockHash | None
    adapter: str
    noted_at: int
    """Number of changes of the cache then."""
    computed_at: float


class BlockSaver(SaveOrders):
    """Owns the saves of one engine. Blocks are noted when their step is scheduled, and saved when its result is in: all
    of a step at once, list by list, because a call for each block costs more than the rest of its save here.

    A block may be freed, and even given to others, before the result of its step is known: only one that still has the
    content that this step has computed is saved.

    A block for which there is no pin, that the store cannot take yet, or whose store has failed meanwhile (AWAY), is
    *postponed*: it is offered again as long as it can be hit. It holds no reference, so it may be evicted meanwhile.
    """

    def __init__(self, connector: KVConnectorScheduler, manager: KVCacheManager, max_pinned_blocks: int) -> None:
        super().__init__()
        self._connector, self._manager, self._held = connector, manager, manager.held
        self._max_pinned_blocks = max_pinned_blocks
        manager.on_full_blocks = self.note_full
        self.noted: _FilledBlocks | None = None
        """Blocks that the next step fills; None: there are none."""
        self.steps: deque[tuple[int, _FilledBlocks]] = deque()
        """Steps without a result that fill blocks: number and blocks."""
        self._deadlines: dict[int, float] = {}
        """Times at which cancelled saves are given up, by id; never: they were."""
        self._num_pinned = 0
        self.postponed: dict[int, _Postponed] = {}
        """Blocks to be offered again, by block id, the oldest first. The result of their step is in."""
        self._retry_at = NEVER
        """Time at which the store can take postponed blocks."""
        self.next_deadline = NEVER
        """Time at which `give_up` or `offer_postponed` has something to do."""
        self._drafts: dict[int, _Draft] = {}
        """Drafts of the orders that have not ended, by `id` of the order."""

    def note_full(self, request: Request, start: int, stop: int, tables: Sequence[list[KVCacheBlock]]) -> None:
        """Notes that the next step fills the blocks `start` to `stop` of a request, whose `tables` are one per group.
        Called for each block in decoding."""
        noted, connector = self.noted, self._connector
        if noted is None:
            noted = self.noted = _FilledBlocks(len(tables))
        groups = noted.saved if connector.wants_saves(request) else noted.kept_off
        hashes, adapter, noted_at = request.block_hashes, "", self._manager.block_pool.cached_blocks.num_changes
        if request.adapter is not None:
            if connector.may_transfer(request):
                hashes, adapter = stored_hashes(request, self._manager.block_size), request.report.adapter_digest
            else:
                groups = noted.kept_off
        if stop == start + 1 and connector.audits is None:  # nearly always
            parent = hashes[start - 1] if start else None
            for group, table in zip(groups, tables, strict=True):
                group.add_one(table[start], hashes[start], parent, adapter, noted_at)
            return
        for first, end, part in self._split(request, start, stop, groups, noted):
            for group, table in zip(part, tables, strict=True):
                group.add(table, hashes, first, end, adapter, noted_at)

    def _split(
        self, request: Request, start: int, stop: int, saved: list[_Candidates], noted: _FilledBlocks
    ) -> list[tuple[int, int, list[_Candidates]]]:
        """Returns where the blocks of a request belong if there are audits, by first and last: those that are audited
        are not saved."""
        audits = self._connector.audits
        audited = None if audits is None else audits.find(request)
        if audited is None:
            return [(start, stop, saved)]
        positions, match = audited
        compared = noted.audited.setdefault(match.source, (match, _make_candidates(len(saved))))[1]
        bounds = [start, *(bound for bound in (positions.start, positions.stop) if start < bound < stop), stop]
        return [(first, end, compared if first in positions else saved) for first, end in pairwise(bounds)]

    def note_scheduled(self, step: int) -> None:
        """Takes what was noted as filled by a step."""
        if self.noted is not None:
            self.steps.append((step, self.noted))
            self.noted = None

    def note_computed(self, step: int, now: float) -> None:
        """Orders saves of the blocks that a step has filled: its result is in."""
        while self.steps and self.steps[0][0] <= step:
            self._save(self.steps.popleft()[1], now)

    def find_filled(self) -> set[int]:
        """Returns the ids of the blocks that steps without a result fill: others may hit them, but they cannot be read
        yet."""
        return {block.block_id for _, filled in self.steps for block in filled.list_blocks() if not block.is_null}

    def forget_steps(self) -> None:
        """Forgets the blocks of steps that were given up."""
        self.steps.clear()
        self.noted = None

    def _save(self, filled: _FilledBlocks, now: float) -> None:
        """Orders the save of computed blocks, and postpones those that cannot be saved now. Those that were forgotten
        since are left out."""
        draft = _Draft()
        for group_id, noted in enumerate(filled.saved):
            candidates = noted.take_unchanged()
            if candidates.blocks:
                num_decided, num_taken = self._offer(group_id, candidates, draft)
                self._held.stats.num_saves_begun += num_taken
                if num_decided < len(candidates.blocks):
                    self._postpone(group_id, candidates, num_decided, now)
        self._order(draft, now)
        for match, compared in filled.audited.values():
            self._audit(match, [noted.take_unchanged() for noted in compared], now)

    def _offer(self, group_id: int, candidates: _Candidates, draft: _Draft) -> tuple[int, int]:
        """Adds blocks to a new order if the store wants them, as far as there are pins. Returns the number of leading
        ones that were decided on, and of those that were added."""
        room = self._max_pinned_blocks - self._num_pinned - len(draft.blocks)
        if room <= 0 or self._connector.seconds_to_save() > 0:
            return 0, 0
        wanted, num_decided = self._connector.choose_blocks(group_id, candidates.digests[:room])
        if wanted:
            draft.add(group_id, candidates.take(wanted))
        return num_decided, len(wanted)

    def _audit(self, match: ExternalMatch, audited: list[_Candidates], now: float) -> None:
        """Orders the audit of computed blocks, which `match` would have loaded, as far as there are pins."""
        draft = _Draft()
        for group_id, of_group in enumerate(audited):
            room = max(0, self._max_pinned_blocks - self._num_pinned - len(draft.blocks))
            if len(of_group.blocks) > room:
                add_count(self._held.stats.num_audited_blocks, "skipped", len(of_group.blocks) - room)
                self._held.has_changed = True
            draft.add(group_id, of_group.take(range(min(room, len(of_group.blocks)))))
        self._order(draft, now, match)

    def _order(self, draft: _Draft, computed_at: float, audited: ExternalMatch | None = None) -> None:
        """Pins blocks, and orders their save, or their audit if `audited` would have loaded them."""
        if draft.blocks:
            audit = None if audited is None else self._connector.plan_audit(draft.columns, audited)
            order = SaveOrder(0, draft.columns, audit=audit)
            self._held.pin(id(order), draft.blocks)
            self._num_pinned += len(draft.blocks)
            draft.computed_at, draft.noted_at = computed_at, self._manager.block_pool.cached_blocks.num_changes
            self._drafts[id(order)] = draft
            self.unsent.append(order)

    # -- postponed blocks --------------------------------------------------------------------------------------

    def _postpone(self, group_id: int, candidates: _Candidates, start: int, now: float) -> None:
        """Postpones the candidates from `start` on."""
        noted_at, num_begun = self._manager.block_pool.cached_blocks.num_changes, len(candidates.blocks) - start
        rest = candidates.take(range(start, len(candidates.blocks)))
        for block, digest, parent, adapter in zip(rest.blocks, rest.digests, rest.parents, rest.adapters, strict=True):
            former = self.postponed.pop(block.block_id, None)  # what it had before
            if former is None and len(self.postponed) >= MAX_POSTPONED:
                former = self.postponed.pop(next(iter(self.postponed)))
            self._drop("evicted", former is not None)
            self.postponed[block.block_id] = _Postponed(group_id, digest, parent, adapter, noted_at, now)
        self._held.stats.num_saves_begun += num_begun
        self._held.has_changed = True

    def _postpone_unsaved(self, order: SaveOrder, num_saved: int) -> None:
        """Postpones the blocks of an order behind the first `num_saved`: they come before the others, as older ones."""
        pool, found = self._manager.block_pool.blocks, dict[int, _Postponed]()
        draft, columns = self._drafts[id(order)], order.blocks
        for i in range(num_saved, len(columns)):
            block_id = columns.block_ids[i]
            if pool[block_id].forgotten_at <= draft.noted_at:
                names = columns.group_ids[i], columns.digests[i], columns.parents[i], draft.adapters[i]
                found[block_id] = _Postponed(*names, draft.noted_at, draft.computed_at)
        num_dropped = len(columns) - num_saved - len(found)
        num_dropped += sum(self.postponed.pop(block_id, None) is not None for block_id in found)  # what they had before
        self.postponed = found | self.postponed
        for block_id in list(islice(self.postponed, max(0, len(self.postponed) - MAX_POSTPONED))):
            del self.postponed[block_id]
            num_dropped += 1
        self._drop("evicted", num_dropped)
        self._held.has_changed = True

    def offer_postponed(self, now: float) -> None:
        """Orders saves of postponed blocks, as far as there are pins."""
        self._retry_at, draft, computed_at = NEVER, _Draft(), now
        while self.postponed and (room := self._max_pinned_blocks - self._num_pinned - len(draft.blocks)) > 0:
            seconds = self._connector.seconds_to_save()
            if seconds > 0:
                self._retry_at = now + seconds
                break  # without pins, the end of a save is news
            group_id, found = self._take_postponed(room)
            if not found:
                continue
            candidates = _Candidates()
            for block_id, one in found:
                block = self._manager.block_pool.blocks[block_id]
                candidates.add_one(block, one.digest, one.parent, one.adapter, one.noted_at)
            num_decided, num_taken = self._offer(group_id, candidates, draft)
            self._drop("present", num_decided - num_taken)
            computed_at = min([computed_at, *[one.computed_at for _, one in found[:num_decided]]])
            if num_decided < len(found):  # the store has taken all that it can
                self.postponed = dict(found[num_decided:]) | self.postponed
                self._retry_at = now + max(MIN_RETRY_S, self._connector.seconds_to_save())
                break
        self._order(draft, computed_at)
        self._set_deadline()

    def _take_postponed(self, most: int) -> tuple[int, list[tuple[int, _Postponed]]]:
        """Removes the first postponed blocks, of one group and at most so many. Returns those that were not evicted
        since, and their group."""
        items = self.postponed.items()
        group_id = next(iter(items))[1].group_id
        taken = list(takewhile(lambda item: item[1].group_id == group_id, islice(items, most)))
        for block_id, _ in taken:
            del self.postponed[block_id]
        blocks = self._manager.block_pool.blocks
        found = [(block_id, one) for block_id, one in taken if blocks[block_id].forgotten_at <= one.noted_at]
        self._drop("evicted", len(taken) - len(found))
        return group_id, found

    def forget_postponed(self) -> None:
        """Forgets postponed blocks: nothing can be hit any more."""
        self._drop("evicted", len(self.postponed))
        self.postponed.clear()
        self._retry_at = NEVER
        self._set_deadline()

    def _drop(self, reason: str, number: int) -> None:
        """Counts blocks that are not saved, if there are any."""
        if number:
            add_count(self._held.stats.num_dropped_blocks, reason, number)
            self._held.has_changed = True

    def count_waiting(self) -> dict[str, int]:
        """Returns the number of blocks that are to be saved, by state: pinned for an order, or postponed. Among the
        latter are some that were evicted since."""
        orders = [*self.unsent, *self.sent.values()]
        num_audited = sum(len(order.blocks) for order in orders if order.audit is not None)
        return {"pinned": self._num_pinned - num_audited, "postponed": len(self.postponed)}

    # -- orders ------------------------------------------------------------------------------------------------

    def end(self, result: SaveResult, ended_at: float) -> None:
        """Takes in the end of a save. One that is not known has ended before."""
        order = self.sent.pop(result.save_id, None)
        if order is None:
            return
        if self._deadlines.pop(result.save_id, None) is not None:
            self._set_deadline()
        if order.audit is not None:
            self._end_audit(order, result)
            return
        self._connector.on_save_finished(order, result)
        self._held.stats.num_saved_blocks += result.num_saved - result.num_present
        self._drop("present", result.num_present)
        if result.num_saved > result.num_present:
            self._held.stats.save_lags.append(ended_at - self._drafts[id(order)].computed_at)
        if result.reason == AWAY:
            self._postpone_unsaved(order, result.num_saved)
        elif result.num_saved < len(order.blocks):
            reason = "pins" if result.outcome in ("cancelled", "unknown") else result.reason or "error"
            self._drop(reason, len(order.blocks) - result.num_saved)
        self._let_go(order)

    def _end_audit(self, order: SaveOrder, result: SaveResult) -> None:
        num_differing = len(result.differing)
        num_skipped = max(0, len(order.blocks) - result.num_saved - num_differing)
        for outcome, number in ("same", result.num_saved), ("differs", num_differing), ("skipped", num_skipped):
            if number:
                add_count(self._held.stats.num_audited_blocks, outcome, number)
        for index in result.differing:
            self._connector.on_difference(order.blocks[index], order.audit or {})
        self._let_go(order)

    def drop_unsent(self) -> bool:
        """Gives back the blocks of orders that were not sent. Returns whether there were any."""
        orders, self.unsent = self.unsent, []
        for order in orders:
            if order.audit is not None:
                self._end_audit(order, SaveResult(0, 0, "cancelled"))
                continue
            self._drop("pins", len(order.blocks))
            self._connector.on_save_finished(order, SaveResult(0, 0, "cancelled"))
            self._let_go(order)
        return bool(orders)

    @property
    def num_expected(self) -> int:
        """Number of sent saves that are waited for."""
        return len(self.sent) - sum(deadline == NEVER for deadline in self._deadlines.values())

    def cancel_sent(self, now: float) -> None:
        """Asks for the end of all sent saves. Those that have not ended some time later are given up."""
        for save_id in self.sent:
            if save_id not in self._deadlines:
                self.cancels.append(save_id)
                self._deadlines[save_id] = now + QUARANTINE_S
        self._set_deadline()

    def _set_deadline(self) -> None:
        self.next_deadline = min(self._retry_at, *self._deadlines.values()) if self._deadlines else self._retry_at

    def give_up(self, now: float) -> None:
        """Waits no longer for cancelled saves whose time has come; their blocks stay held until they end."""
        for save_id in [i for i, deadline in self._deadlines.items() if deadline <= now]:
            self._deadlines[save_id] = NEVER
            self._held.change(id(self.sent[save_id]), "quarantined")
        self._set_deadline()

    def _let_go(self, order: SaveOrder) -> None:
        self._held.release(id(order))
        del self._drafts[id(order)]
        self._num_pinned -= len(order.blocks)
