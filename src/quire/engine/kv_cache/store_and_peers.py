"""The scheduler half of a store and peers in one engine: a request loads from the quicker of the two.

What the first cannot bring after all the other may have: a request whose load has failed is looked up again. Messages
have a part for each (`PARTS`). Blocks are saved to the store, and leased to peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.kv_transfer import PART, PARTS
from quire.engine.kv_cache.connector import BlockChoice, BlockTables, ExternalMatch, KVConnectorScheduler, LoadAudits
from quire.engine.kv_cache.peer_scheduler import TIER, PeerScheduler
from quire.engine.kv_cache.store_scheduler import SOURCE as DISK
from quire.engine.kv_cache.store_scheduler import StoreScheduler
from quire.engine.request import Request
from quire.wire.block_hash import BlockHash
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.kv_transfer import (
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)


class StoreAndPeersScheduler(KVConnectorScheduler):
    """Passes calls on to the two schedulers, which do not know of one another."""

    asks_again = False
    """Only peers postpone an answer."""
    has_several_sources = True

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, kv_cache_config)
        of_store, of_peers = config.transfer_parts.values()
        self._store = StoreScheduler(of_store, kv_cache_config)
        self._peers = PeerScheduler(of_peers, kv_cache_config)
        share = config.kv_transfer_config.audit_share
        self.audits = LoadAudits(share, DISK, TIER) if share else None
        self.stored = [*self._store.stored, *self._peers.stored]
        self.remote_saves = self._peers.remote_saves
        self._parts: dict[str, KVConnectorScheduler] = dict(zip(PARTS, (self._store, self._peers), strict=True))

    @classmethod
    def check_config(cls, config: EngineConfig) -> None:
        of_store, of_peers = config.transfer_parts.values()
        PeerScheduler.check_config(of_peers)  # the store makes a key, which a block server would not know
        StoreScheduler.check_config(of_store)

    def may_transfer(self, request: Request) -> bool:
        return self._store.may_transfer(request)  # peers refuse what they cannot take when they are asked

    # -- loads -------------------------------------------------------------------------------------------------

    def find_matches(self, request: Request, num_computed_tokens: int) -> list[ExternalMatch] | None:
        """Does not wait for what peers have if the store has all that can be loaded."""
        all_tokens = (request.num_tokens - 1) // self.block_size * self.block_size - num_computed_tokens
        matches: list[ExternalMatch] = []
        for name, part in self._parts.items():
            found = part.find_matches(request, num_computed_tokens)
            if found is None and all(match.num_tokens < all_tokens for match in matches):
                return None
            matches += [match._replace(params={**(match.params or {}), PART: name}) for match in found or ()]
        return matches

    def update_state_after_alloc(self, request: Request, order: LoadOrder, tables: BlockTables) -> None:
        name = _part_of(order)
        self._parts[name].update_state_after_alloc(request, order, tables)
        order.params = {**(order.params or {}), PART: name}

    def on_load_finished(self, order: LoadOrder, result: LoadResult) -> None:
        self._parts[_part_of(order)].on_load_finished(order, result)

    # -- saves and leases --------------------------------------------------------------------------------------

    def wants_saves(self, request: Request) -> bool:
        return self._store.wants_saves(request)

    def seconds_to_save(self) -> float:
        return self._store.seconds_to_save()

    def choose_blocks(self, group_id: int, digests: Sequence[BlockHash]) -> BlockChoice:
        return self._store.choose_blocks(group_id, digests)

    def on_save_finished(self, order: SaveOrder, result: SaveResult) -> None:
        self._store.on_save_finished(order, result)

    def plan_audit(self, blocks: SavedBlocks, match: ExternalMatch) -> dict[str, Any]:
        name = (match.params or {})[PART]
        return {PART: name, **self._parts[name].plan_audit(blocks, match)}

    def on_difference(self, block: SavedBlock, audit: dict[str, Any]) -> None:
        self._parts[audit[PART]].on_difference(block, audit)

    def name_lease(self, request: Request) -> str | None:
        return self._peers.name_lease(request)

    def make_transfer_params(self, request: Request, lease: str, num_tokens: int) -> dict[str, Any] | None:
        return self._peers.make_transfer_params(request, lease, num_tokens)

    # -- requests ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        for part in self._parts.values():
            part.on_new_request(request)

    def request_started(self, request: Request, tables: BlockTables) -> None:
        for part in self._parts.values():
            part.request_started(request, tables)

    def request_finished(self, request: Request) -> None:
        for part in self._parts.values():
            part.request_finished(request)

    # -- messages ----------------------------------------------------------------------------------------------

    def take_message(self) -> dict[str, Any] | None:
        messages = {name: part.take_message() for name, part in self._parts.items()}
        return {name: message for name, message in messages.items() if message} or None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        info = output.info or {}
        if PART in info:
            self._parts[info[PART]].update_connector_output(KVConnectorOutput(info=info["info"], rank=output.rank))

    # -- the rest ----------------------------------------------------------------------------------------------

    def set_weights(self, path: str) -> None:
        for part in self._parts.values():
            part.set_weights(path)

    def count_stored(self) -> tuple[int, int]:
        return self._store.count_stored()

    def reset_cache(self) -> bool | Future[bool]:
        ends = [part.reset_cache() for part in self._parts.values()]
        if False in ends:
            return False
        return _join([end for end in ends if isinstance(end, Future)])

    def shutdown(self) -> None:
        for part in self._parts.values():
            part.shutdown()


def _part_of(order: LoadOrder) -> str:
    name: str = (order.params or {})[PART]
    return name


def _join(ends: Sequence[Future[bool]]) -> Future[bool]:
    """Returns a Future that ends with the last of `ends`, and is True if all of them are. They must end on one
    thread."""
    joined: Future[bool] = Future()

    def note(end: Future[bool]) -> None:
        if all(end.done() for end in ends) and not joined.done():
            joined.set_result(all(end.result() for end in ends))

    for end in ends:
        end.add_done_callback(note)
    return joined
