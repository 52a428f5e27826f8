"""The scheduler half of the store: which blocks a directory has, and which are worth writing.

The index is in memory and follows the directory in a thread of its own. The namespaces come from the worker halves:
each worker of the engine writes and reads its part of a block, as a record of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.kv_cache.connector import (
    NONE_STORED,
    NOTHING_CHOSEN,
    BlockChoice,
    BlockTables,
    ExternalMatch,
    find_longest_match,
)
from quire.engine.kv_cache.hashing import stored_hashes
from quire.engine.kv_cache.record_scheduler import RecordScheduler
from quire.engine.request import Request
from quire.errors import ConfigError
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.index import PartsIndex, StoreScanner
from quire.logger import init_logger
from quire.wire.block_hash import BlockHash
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.kv_events import LOCAL
from quire.wire.kv_transfer import (
    REJECTIONS,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)

logger = init_logger(__name__)

SOURCE = "disk"
NO_PLACE = -1


class StoreScheduler(RecordScheduler):
    """Looks blocks up in a directory, and orders those that it lacks to be written."""

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, kv_cache_config, SOURCE, LOCAL)
        self._directory = _open_directory(config)
        self._payload_bytes: list[int] = []
        """Bytes of a block of all workers, per group."""
        self._index: PartsIndex | None = None
        """None: the namespaces are not known yet."""
        self._scanner: StoreScanner | None = None
        self._had_namespace = False

    @classmethod
    def check_config(cls, config: EngineConfig) -> None:
        publishes = config.kv_transfer_config.kv_connector_extra_config.get("publish_store")
        if publishes and not config.observability_config.kv_events.is_enabled:
            raise ConfigError("publish_store adds a KV store to KV cache events; enable them with --kv-events-config")
        _open_directory(config).close()

    # -- loads -------------------------------------------------------------------------------------------------

    def find_matches(self, request: Request, num_computed_tokens: int) -> list[ExternalMatch]:
        index = self._index
        if index is None or self.role == "kv_producer":
            return []
        num_tokens = find_longest_match(
            self.specs, request, num_computed_tokens, lambda group_id, digest: index.contains(digest, group_id)
        )
        if not num_tokens or not self._are_provable(request, index, num_computed_tokens, num_tokens):
            return []
        return [ExternalMatch(num_tokens, SOURCE)]

    def _are_provable(self, request: Request, index: PartsIndex, num_computed_tokens: int, num_tokens: int) -> bool:
        """Returns whether each block has a record of some group: its tokens are compared even where none is loaded."""
        if any(spec.reach is None for spec in self.specs):
            return True
        start, stop = num_computed_tokens // self.block_size, (num_computed_tokens + num_tokens) // self.block_size
        groups = range(len(self.specs))
        hashes = stored_hashes(request, self.block_size)[start:stop]
        return all(any(index.contains(digest, g) for g in groups) for digest in hashes)

    def update_state_after_alloc(self, request: Request, order: LoadOrder, tables: BlockTables) -> None:
        groups = range(len(self.specs))
        order.params = self._locate([[(key.digest, group) for key in order.keys] for group in groups])

    def plan_audit(self, blocks: SavedBlocks, match: ExternalMatch) -> dict[str, Any]:
        return self._locate([list(zip(blocks.digests, blocks.group_ids, strict=True))])

    def on_difference(self, block: SavedBlock, audit: dict[str, Any]) -> None:
        if self._index is not None:
            self._index.forget(block.key.digest, block.group_id)

    def _locate(self, rows: Sequence[Sequence[tuple[bytes, int]]]) -> dict[str, Any]:
        """Returns where the records of blocks (digest, group) are, for each worker."""
        index, parts = self._index, []
        found = [[None if index is None else index.find(*block) for block in row] for row in rows]
        for rank in range(self.num_workers):
            numbers: dict[str, int] = {}
            places = [
                [
                    NO_PLACE
                    if of_block is None
                    else numbers.setdefault(of_block[rank].extent, len(numbers)) << 32 | of_block[rank].offset
                    for of_block in row
                ]
                for row in found
            ]
            parts.append({"extents": list(numbers), "places": places})
        return {"parts": parts}

    def on_load_finished(self, order: LoadOrder, result: LoadResult) -> None:
        if self._index is None:
            return
        for key in order.keys[: result.num_verified]:
            self._index.note_use(key.digest, 0)
        if result.num_verified < len(order.keys) and (result.reason in REJECTIONS or result.reason == "gone"):
            key = order.keys[result.num_verified]
            for group_id in range(len(self.specs)):
                self._index.forget(key.digest, group_id)
                self.limits.forget(group_id, key.digest)

    # -- saves -------------------------------------------------------------------------------------------------

    def wants_saves(self, request: Request) -> bool:
        return self.role != "kv_consumer" and not self.is_kept_off(request)

    def seconds_to_save(self) -> float:
        if self._index is None:
            return math.inf  # the worker half reports the namespace
        return self.limits.seconds_left()

    def choose_blocks(self, group_id: int, digests: Sequence[BlockHash]) -> BlockChoice:
        index = self._index
        if index is None:
            return NOTHING_CHOSEN
        return BlockChoice(*self.limits.take(group_id, digests, self._payload_bytes[group_id], index))

    def on_save_finished(self, order: SaveOrder, result: SaveResult) -> None:
        self.limits.forget_unsaved(order.blocks, result.num_saved)
        if result.reason in ("full", "error"):
            self.limits.rest()

    # -- the rest ----------------------------------------------------------------------------------------------

    def on_identified(self) -> None:
        by_rank = [self.identities[rank] for rank in range(self.num_workers)]
        self._payload_bytes = [sum(sizes) for sizes in zip(*(one["payload_bytes"] for one in by_rank), strict=True)]
        fingerprints = [one["fingerprint"] for one in by_rank]
        if self._index is not None and fingerprints == [part.fingerprint for part in self._index.parts]:
            return  # an update was taken back
        if self._scanner is not None:
            self._scanner.stop()
        index = PartsIndex(self._directory, fingerprints)
        if not self._had_namespace:  # once, at the start: the first request is to find what there is
            try:
                index.scan()
            except OSError as e:
                logger.warning("the KV store %s cannot be read: %s", self._directory.path, e.strerror)
        self._had_namespace = True
        self._index, self._scanner = index, StoreScanner(index)
        logger.info("KV store %s: %d blocks of this model", self._directory.path, index.counts[0])

    def set_weights(self, path: str) -> None:
        super().set_weights(path)
        self._close_index()

    def count_stored(self) -> tuple[int, int]:
        index = self._index
        return NONE_STORED if index is None else index.counts

    def reset_cache(self) -> bool | Future[bool]:
        """Drops the records of this namespace: from the index now, and orders the workers to delete them."""
        if self._index is None:
            logger.warning("the KV store %s is not reset: its namespace is not known yet", self._directory.path)
            return False
        self._index.forget_all()
        self.limits.forget_all()
        return self.order_drop()

    def shutdown(self) -> None:
        super().shutdown()
        self._close_index()
        self._directory.close()

    def _close_index(self) -> None:
        scanner, self._scanner, self._index = self._scanner, None, None
        if scanner is not None:
            scanner.stop()


def _open_directory(config: EngineConfig) -> StoreDirectory:
    extra = config.kv_transfer_config.kv_connector_extra_config
    return StoreDirectory.open(Path(extra["path"]).expanduser(), extra["max_bytes"])
