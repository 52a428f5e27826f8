"""Planted bugs in loads from a store outside the engine, and in saves to it."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.engine.kv_cache.connector import KVConnectorScheduler
from quire.engine.kv_cache.held import HeldBlocks
from quire.engine.kv_cache.loader import BlockLoader, JointStart, Load
from quire.engine.kv_cache.manager import KVCacheManager, LoadingBlocks
from quire.engine.kv_cache.saver import BlockSaver
from quire.engine.request import Request
from quire.engine.sched.exchange import KVExchange
from quire.engine.transfers import TransferLink
from quire.testing.fake_tier import FakeTierWorker
from quire.wire.kv_transfer import KVConnectorOutput, LoadResult, SaveOrder, TransferAggregator, _Parts
from tests.simulation.mutants.registry import Patch, tier_mutant, wrap


@tier_mutant
def registered_before_verified(patch: Patch) -> None:
    """Blocks can be hit as soon as their load is ordered."""
    accept = KVCacheManager.accept_loaded

    def begin(original: Any, self: BlockLoader, request: Request, *args: Any, **kwargs: Any) -> Load | None:
        load: Load | None = original(self, request, *args, **kwargs)
        if load is not None:
            accept(self._manager, id(load.order), request, load.blocks, len(load.order.keys))
        return load

    wrap(patch, BlockLoader, "begin", begin)
    patch.setattr(KVCacheManager, "accept_loaded", lambda *args: None)


@tier_mutant
def accepted_past_a_failure(patch: Patch) -> None:
    """All blocks of a load are accepted, those that could not be read with them."""
    wrap(patch, BlockLoader, "_count_acceptable", lambda original, self, load, _: len(load.order.keys))


@tier_mutant
def accepted_from_the_first_worker(patch: Patch) -> None:
    """Counts the blocks that one of several workers has verified, whatever the others have."""

    def add(original: Any, self: Any, transfer_id: int, rank: int, part: Any) -> Any:
        done = original(self, transfer_id, rank, part)
        firsts = self.__dict__.setdefault("firsts", {})
        first = firsts.setdefault(transfer_id, part)
        return first if done and isinstance(done, LoadResult) else done

    wrap(patch, _Parts, "add", add)


@tier_mutant
def ended_with_the_first_worker(patch: Patch) -> None:
    """A transfer of several workers has ended when the first of them reports it."""

    def add(original: Any, self: TransferAggregator, rank: int, report: KVConnectorOutput) -> KVConnectorOutput:
        return report

    wrap(patch, TransferAggregator, "add", add)


@tier_mutant
def accepted_for_other_tokens(patch: Patch) -> None:
    """A record is not compared with the block that was asked for."""

    def find_fault(original: Any, *args: Any) -> str:
        fault: str = original(*args)
        return "" if fault == "tokens" else fault

    original = FakeTierWorker.find_fault
    patch.setattr(FakeTierWorker, "find_fault", staticmethod(lambda *args: find_fault(original, *args)))


@tier_mutant
def freed_while_written(patch: Patch) -> None:
    """The blocks of a load that was given up are free at once."""

    def abandon(original: Any, self: BlockLoader, load: Load, now: float) -> None:
        original(self, load, now)
        self._manager.held.release(id(load.order))
        patch.setattr(HeldBlocks, "change", lambda self, holder, state: None)

    wrap(patch, BlockLoader, "abandon", abandon)


@tier_mutant
def loaded_beside_a_step(patch: Patch) -> None:
    """A load begins though a step in flight may still write its blocks."""
    wrap(patch, BlockLoader, "begin", lambda original, *args, **kwargs: original(*args, **{**kwargs, "fence": 0}))


@tier_mutant
def fails_instead_of_waiting(patch: Patch) -> None:
    """A request that nothing runs beside, and that does not fit, fails, though transfers will give blocks back."""
    patch.setattr(KVExchange, "await_room", lambda self, request: False)


@tier_mutant
def counted_before_it_has_ended(patch: Patch) -> None:
    """External tokens are those that were ordered, not those that came."""

    def count_external(original: Any, self: KVExchange, request: Request, num_hits: int) -> int:
        loaded = self._loaded.get(request)
        return 0 if loaded is None else loaded[0][0].num_tokens

    wrap(patch, KVExchange, "count_external", count_external)


@tier_mutant
def pin_leaked(patch: Patch) -> None:
    """A block stays pinned after it was saved."""

    def let_go(original: Any, self: BlockSaver, order: SaveOrder) -> None:
        with patch.context() as meanwhile:
            meanwhile.setattr(HeldBlocks, "release", lambda self, holder: False)
            original(self, order)

    wrap(patch, BlockSaver, "_let_go", let_go)


@tier_mutant
def not_pinned(patch: Patch) -> None:
    """A block that is being saved may be given to another request."""
    patch.setattr(HeldBlocks, "pin", lambda self, holder, blocks: None)


@tier_mutant
def saved_before_it_is_computed(patch: Patch) -> None:
    """Blocks are saved when their step is scheduled."""

    def note_scheduled(original: Any, self: BlockSaver, step: int) -> None:
        original(self, step)
        self.note_computed(step, 0.0)

    wrap(patch, BlockSaver, "note_scheduled", note_scheduled)


@tier_mutant
def loaded_though_all_is_to_be_computed(patch: Patch) -> None:
    """A request that must compute all its tokens loads some."""

    def begins_load(original: Any, self: KVExchange, request: Request, *args: Any) -> bool:
        with patch.context() as meanwhile:
            meanwhile.setattr(Request, "skip_reading_prefix_cache", False)
            begins: bool = original(self, request, *args)
        return begins

    wrap(patch, KVExchange, "begins_load", begins_load)


@tier_mutant
def held_blocks_count_as_used(patch: Patch) -> None:
    """Blocks that transfers alone hold are said to be in tables."""
    patch.setattr(HeldBlocks, "count_alone", lambda self: 0)


@tier_mutant
def shared_blocks_count_as_held(patch: Patch) -> None:
    """A block of a transfer counts as held though a request has it, too."""
    patch.setattr(HeldBlocks, "count_alone", HeldBlocks.count_blocks)


@tier_mutant
def one_rejection_per_load(patch: Patch) -> None:
    """Rejected records are not counted if a part of their load was used."""

    def add(original: Any, self: BlockLoader, result: LoadResult) -> None:
        original(self, msgspec.structs.replace(result, num_rejected={} if result.num_verified else result.num_rejected))

    wrap(patch, BlockLoader, "_count_records", add)


@tier_mutant
def end_unnoticed(patch: Patch) -> None:
    """The end of a transfer does not wake the core."""
    patch.setattr(TransferLink, "has_reports", False)


@tier_mutant
def load_survives_its_request(patch: Patch) -> None:
    """An abort does not end the load of its request."""

    def note_left(original: Any, self: KVExchange, request: Request) -> None:
        load = self.loader.active.pop(request, None)
        original(self, request)
        if load is not None:
            self.loader.active[request] = load

    wrap(patch, KVExchange, "note_left", note_left)


@tier_mutant
def store_of_the_old_weights(patch: Patch) -> None:
    """Blocks of the weights before an update are looked up after it."""
    patch.setattr(KVConnectorScheduler, "set_weights", lambda self, path: None)
    patch.setattr(KVExchange, "set_weights", lambda self, path: None)
    patch.setattr(FakeTierWorker, "set_weights", lambda self, path: None)


@tier_mutant
def late_end_is_accepted(patch: Patch) -> None:
    """A load that was given up is accepted when it ends."""

    def end(original: Any, self: BlockLoader, result: LoadResult, now: float) -> Any:
        load = self.sent.get(result.load_id)
        if load is not None and load.stage in ("zombie", "quarantined"):
            self.active[load.request], load.stage = load, "cancelled"
        return original(self, result, now)

    wrap(patch, BlockLoader, "end", end)


@tier_mutant
def loaded_blocks_are_not_kept(patch: Patch) -> None:
    """The blocks of a load are free while they are written."""

    def allocate(original: Any, self: KVCacheManager, holder: Any, *args: Any) -> LoadingBlocks | None:
        loading: LoadingBlocks | None = original(self, holder, *args)
        if loading is not None:
            self.held.release(holder)
            self.held.hold(holder, "loading", [])
        return loading

    wrap(patch, KVCacheManager, "allocate_loading", allocate)


@tier_mutant
def postponed_block_is_not_looked_at(patch: Patch) -> None:
    """A block that could not be saved at once is saved later, whatever it holds then."""

    def offer(original: Any, self: BlockSaver, now: float) -> None:
        with patch.context() as meanwhile:
            for block in self._manager.block_pool.blocks:
                meanwhile.setattr(block, "forgotten_at", 0)
            original(self, now)

    wrap(patch, BlockSaver, "offer_postponed", offer)


@tier_mutant
def computed_block_is_not_looked_at(patch: Patch) -> None:
    """A block is saved when the result of its step is in, whatever it holds then."""

    def note_computed(original: Any, self: BlockSaver, step: int, now: float) -> None:
        with patch.context() as meanwhile:
            for block in self._manager.block_pool.blocks:
                meanwhile.setattr(block, "forgotten_at", 0)
            original(self, step, now)

    wrap(patch, BlockSaver, "note_computed", note_computed)


@tier_mutant
def postponed_block_leaks_a_pin(patch: Patch) -> None:
    """A block that was postponed stays pinned after it was saved."""

    def offer(original: Any, self: BlockSaver, now: float) -> None:
        num_orders = len(self.unsent)
        original(self, now)
        for order in self.unsent[num_orders:]:
            self._manager.held.pin(f"{id(order)} again", [self._manager.block_pool.blocks[order.blocks[0].block_id]])

    wrap(patch, BlockSaver, "offer_postponed", offer)


@tier_mutant
def leased_blocks_are_given_away(patch: Patch) -> None:
    """Blocks that another engine was promised are free."""

    patch.setattr(HeldBlocks, "lease", lambda self, holder, tables: self.hold(holder, "leased", []))


@tier_mutant
def waits_for_loads_beside_steps(patch: Patch) -> None:
    """A request that has loaded waits for the loads of others though another request has started."""

    def note_started(original: Any, self: JointStart, request: Request) -> None:
        with patch.context() as meanwhile:
            meanwhile.setattr(JointStart, "release", lambda self: None)
            original(self, request)

    wrap(patch, JointStart, "note_started", note_started)


@tier_mutant
def waits_for_loads_that_were_given_up(patch: Patch) -> None:
    """A request that has loaded waits for the loads of others though these were given up."""

    def note_end(original: Any, self: JointStart, load: Load, now: float, *, may_hold: bool) -> None:
        if load.stage == "ended":
            original(self, load, now, may_hold=may_hold)

    wrap(patch, JointStart, "note_end", note_end)
