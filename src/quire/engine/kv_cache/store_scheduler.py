"""The scheduler half of the store: which blocks a directory has, and which are worth writing.

The index is in memory and follows the directory in a thread of its own. The namespaces come from the worker halves:
each worker of the engine writes and reads its part of a block, as a record of its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.kv_cache.audits import LoadAudits
from quire.engine.kv_cache.connector import (
    NO_MATCH,
    NONE_STORED,
    NOTHING_CHOSEN,
    BlockChoice,
    ExternalMatch,
    KVConnectorScheduler,
    find_longest_match,
)
from quire.engine.kv_cache.hashing import stored_hashes
from quire.engine.kv_cache.stored_blocks import StoredBlocks
from quire.engine.request import Request
from quire.errors import ConfigError
from quire.kv_store.access import REST_S
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.index import PartsIndex, StoreScanner
from quire.logger import init_logger
from quire.wire.block_hash import BlockHash
from quire.wire.execution import SchedulerOutput
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.kv_transfer import (
    REJECTIONS,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)

logger = init_logger(__name__)

MAX_WRITE_BYTES_PER_S = 200_000_000
SOURCE = "disk"
NO_PLACE = -1
SAVED_S = 5.0
"""Time for which a block is taken as written before a scan has found it."""


class WriteBudget:
    """A rate of bytes with a burst of one second."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._left, self._ts = float(bytes_per_s), clock()

    def count(self, num_bytes: int) -> int:
        """Returns how many times `num_bytes` may be taken: as long as there are any left. A debt is paid before the
        next."""
        return 0 if self.seconds_left() > 0 else math.ceil(self._left / max(1, num_bytes))

    def take(self, num_bytes: int) -> bool:
        """Takes `num_bytes` if there are any left."""
        if self.seconds_left() > 0:
            return False
        self._left -= num_bytes
        return True

    def seconds_left(self) -> float:
        """Returns the seconds until some bytes are left; 0: there are now."""
        if self._left > 0:
            return 0.0
        now = self._clock()
        self._left = min(float(self._rate), self._left + (now - self._ts) * self._rate)
        self._ts = now
        return 0.0 if self._left > 0 else max(1e-3, -self._left / self._rate)


class WriteLimits:
    """Limits what is ordered to be written: by a rate, by what was ordered lately, and by a rest after a failure."""

    def __init__(self, bytes_per_s: int) -> None:
        self._budget = WriteBudget(bytes_per_s)
        self._ordered: dict[int, set[bytes]] = {}
        """Digests of the blocks that were ordered lately, per group."""
        self._by_age: deque[tuple[float, int, Sequence[bytes]]] = deque()
        """The same in order: when they were ordered, group, digests."""
        self._rest_ts = float("-inf")

    def seconds_left(self) -> float:
        """Returns the seconds until anything may be written; 0: it may now."""
        return max(0.0, self._rest_ts - time.monotonic(), self._budget.seconds_left())

    def rest(self) -> None:
        """Orders nothing for a while: writing has failed."""
        self._rest_ts = time.monotonic() + REST_S / 10

    def take(self, group_id: int, digests: Sequence[bytes], num_bytes: int, index: PartsIndex) -> BlockChoice:
        """Returns which blocks, each of `num_bytes`, are to be written; these count as ordered then."""
        now = time.monotonic()
        most = 0 if now < self._rest_ts else self._budget.count(num_bytes)
        if not most:
            return NOTHING_CHOSEN
        while self._by_age and self._by_age[0][0] < now - SAVED_S:
            _, group, former = self._by_age.popleft()
            self._ordered[group].difference_update(former)
        ordered = self._ordered.setdefault(group_id, set())
        if ordered.isdisjoint(digests) and index.has_none(digests, group_id):  # nearly always
            num_decided = min(most, len(digests))
            wanted: Sequence[int] = range(num_decided)
        else:
            fresh = [i for i, d in enumerate(digests) if d not in ordered and not index.contains(d, group_id)]
            wanted, num_decided = fresh[:most], fresh[most] if most < len(fresh) else len(digests)
        names = digests if len(wanted) == len(digests) else [digests[i] for i in wanted]
        ordered.update(names)
        self._by_age.append((now, group_id, names))
        self._budget.take(num_bytes * len(wanted))
        return BlockChoice(wanted, num_decided)

    def forget(self, group_id: int, digest: bytes) -> None:
        """Lets a block be ordered again."""
        self._ordered.get(group_id, set()).discard(digest)

    def forget_all(self) -> None:
        """Lets all blocks be ordered again."""
        self._ordered.clear()
        self._by_age.clear()


class StoreScheduler(KVConnectorScheduler):
    """Looks blocks up in a directory, and orders those that it lacks to be written."""

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, kv_cache_config)
        transfer = config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        self._role = transfer.kv_role
        self._skips_salted = bool(extra.get("skip_salted"))
        self._directory = _open_directory(config)
        self._limits = WriteLimits(int(extra.get("max_write_bytes_per_s", MAX_WRITE_BYTES_PER_S)))
        self._payload_bytes: list[int] = []
        """Bytes of a block of all workers, per group."""
        self._num_workers = config.parallel_config.world_size
        self._identities: dict[int, dict[str, Any]] = {}
        """Reports of the workers' namespaces, by rank."""
        self._index: PartsIndex | None = None
        """None: the namespaces are not known yet."""
        self._scanner: StoreScanner | None = None
        self._generation = 0
        """Number of times that the weights were replaced."""
        self._had_namespace = False
        self._is_resetting = False
        self.stored = StoredBlocks(self._num_workers) if extra.get("publish_store") else None
        self.audits = LoadAudits(transfer.audit_share, SOURCE) if transfer.audit_share else None

    @classmethod
    def check_config(cls, config: EngineConfig) -> None:
        publishes = config.kv_transfer_config.kv_connector_extra_config.get("publish_store")
        if publishes and not config.observability_config.kv_events.is_enabled:
            raise ConfigError("publish_store adds a KV store to KV cache events; enable them with --kv-events-config")
        _open_directory(config).close()

    def may_transfer(self, request: Request) -> bool:
        return request.lora_request is None or bool(request.report.adapter_digest)

    # -- loads -------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalMatch | None:
        index = self._index
        if index is None or self._role == "kv_producer":
            return NO_MATCH
        num_tokens = find_longest_match(
            self.specs, request, num_computed_tokens, lambda group_id, digest: index.contains(digest, group_id)
        )
        if not num_tokens or not self._are_provable(request, index, num_computed_tokens, num_tokens):
            return NO_MATCH
        return ExternalMatch(num_tokens, SOURCE)

    def _are_provable(self, request: Request, index: PartsIndex, num_computed_tokens: int, num_tokens: int) -> bool:
        """Returns whether each block has a record of some group: its tokens are compared even where none is loaded."""
        if any(spec.reach is None for spec in self.specs):
            return True
        start, stop = num_computed_tokens // self.block_size, (num_computed_tokens + num_tokens) // self.block_size
        groups = range(len(self.specs))
        hashes = stored_hashes(request, self.block_size)[start:stop]
        return all(any(index.contains(digest, g) for g in groups) for digest in hashes)

    def update_state_after_alloc(self, request: Request, order: LoadOrder) -> None:
        groups = range(len(self.specs))
        order.params = self._locate([[(key.digest, group) for key in order.keys] for group in groups])

    def plan_audit(self, blocks: SavedBlocks) -> dict[str, Any]:
        return self._locate([list(zip(blocks.digests, blocks.group_ids, strict=True))])

    def on_difference(self, block: SavedBlock) -> None:
        if self._index is not None:
            self._index.forget(block.key.digest, block.group_id)

    def _locate(self, rows: Sequence[Sequence[tuple[bytes, int]]]) -> dict[str, Any]:
        """Returns where the records of blocks (digest, group) are, for each worker."""
        index, parts = self._index, []
        found = [[None if index is None else index.find(*block) for block in row] for row in rows]
        for rank in range(self._num_workers):
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
                self._limits.forget(group_id, key.digest)

    # -- saves -------------------------------------------------------------------------------------------------

    def wants_saves(self, request: Request) -> bool:
        if self._role == "kv_consumer":
            return False
        params = request.sampling_params
        is_kept_off = (
            params is not None and params.extra_args is not None and params.extra_args.get("kv_store") is False
        )
        return not is_kept_off and not (self._skips_salted and request.cache_salt is not None)

    def seconds_to_save(self) -> float:
        if self._index is None:
            return math.inf  # the worker half reports the namespace
        return self._limits.seconds_left()

    def choose_blocks(self, group_id: int, digests: Sequence[BlockHash]) -> BlockChoice:
        index = self._index
        if index is None:
            return NOTHING_CHOSEN
        return self._limits.take(group_id, digests, self._payload_bytes[group_id], index)

    def on_save_finished(self, order: SaveOrder, result: SaveResult) -> None:
        blocks = order.blocks
        for index in range(result.num_saved, len(blocks)):
            self._limits.forget(blocks.group_ids[index], blocks.digests[index])
        if result.reason in ("full", "error"):
            self._limits.rest()

    # -- the rest ----------------------------------------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        info = output.info
        if self.stored is not None and info and "watched" in info and info["generation"] == self._generation:
            self.stored.update(output.rank, *info["watched"])
        if not info or info.get("generation") != self._generation or "fingerprint" not in info:
            return
        self._identities[output.rank] = info
        if len(self._identities) < self._num_workers:
            return
        by_rank = [self._identities[rank] for rank in range(self._num_workers)]
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
        logger.info("KV store %s: %d blocks of this model", self._directory.path, index.num_blocks)

    def build_connector_meta(self, output: SchedulerOutput) -> dict[str, Any] | None:
        if not self._is_resetting:
            return None
        self._is_resetting = False
        return {"reset": True}

    def set_weights(self, path: str) -> None:
        self._generation += 1
        self._forget_namespace()
        if self.stored is not None:
            self.stored.clear()

    def count_stored(self) -> tuple[int, int]:
        index = self._index
        return NONE_STORED if index is None else index.counts

    def reset_cache(self) -> bool:
        """Drops the records of this namespace: from the index now, and from the directory with the next step."""
        if self._index is not None:
            self._index.forget_all()
        self._limits.forget_all()
        self._is_resetting = True
        return True

    def shutdown(self) -> None:
        self._forget_namespace()
        self._directory.close()

    def _forget_namespace(self) -> None:
        scanner, self._scanner, self._index = self._scanner, None, None
        self._identities.clear()
        self._limits.forget_all()
        if scanner is not None:
            scanner.stop()


def _open_directory(config: EngineConfig) -> StoreDirectory:
    extra = config.kv_transfer_config.kv_connector_extra_config
    return StoreDirectory.open(Path(extra["path"]).expanduser(), extra["max_bytes"])
