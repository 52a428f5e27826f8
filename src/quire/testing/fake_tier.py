"""A store outside engines, for `FakeExecutor`. Its blocks are kept in memory, its transfers move when a test says so.

    tier = FakeTier("name")
    transfer = KVTransferConfig(kv_connector="FakeTier", kv_connector_extra_config={"tier": "name"})
    config = EngineConfig(kv_transfer_config=transfer)

Engines of one tier share what they save; a tier outlives them. Transfers move a block per `FakeTierWorker.advance`,
with bytes first and the comparison after, as a real one does, so that a block that is used too early, or given away too
early, has wrong slots: the tokens show it.

`kv_connector_extra_config={"tier": "name", "workers": 2}`: the bytes of each slot belong to workers in turn, whose
transfers move one by one, and whose reports are joined.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from quire.config.engine import EngineConfig
from quire.config.kv_transfer import CONNECTORS, ConnectorSpec
from quire.engine.kv_cache.connector import BlockChoice, ExternalMatch, KVConnectorScheduler, find_longest_match
from quire.engine.request import Request, RequestStatus
from quire.testing.fake_hardware import KVMemory, ProtocolError
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.kv_transfer import (
    AWAY,
    BlockKey,
    KVConnectorMetadata,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SaveOrder,
    SaveResult,
    TransferAggregator,
    TransferOutcome,
)
from quire.worker.kv_transfer.worker import KVConnectorWorker, Report

SOURCE = "disk"
PEER = "p2p:peer"
Manner = Literal["good", "hung", "twice", "wedged", "away"]
"""hung: ends by a cancel only. twice: is reported twice. wedged: writes nonsense, and does not end until freed. away:
the store fails in the middle of a save; a load is good."""
GARBAGE = 0xEE

CONNECTORS["FakeTier"] = ConnectorSpec(f"{__name__}:FakeTierScheduler", f"{__name__}:make_worker")


@dataclass(frozen=True)
class StoredBlock:
    """A record: what it says of itself, and its bytes."""

    namespace: str
    """Name of the weights, and of the worker."""
    group_id: int
    key: BlockKey
    slots: bytes


Place = tuple[str, int, bytes]
"""Namespace, group, digest."""


class FakeTier:
    """The store. `index` is what can be found by its places, `records` what is there: faults make them differ."""

    by_name: ClassVar[dict[str, FakeTier]] = {}

    def __init__(self, name: str) -> None:
        self.index: set[Place] = set()
        self.records: dict[Place, StoredBlock] = {}
        self.asks_again = False
        """True: the scheduler half answers "later"."""
        self.takes_saves = True
        """False: blocks cannot be saved yet."""
        self.most_at_once = 1 << 30
        """Most blocks that are decided on at once; the rest is to be offered again."""
        self.has_peer = False
        """True: a peer has the same blocks, and is another source."""
        self.lease_interval = 0
        """The blocks of each so many-th request that ends are leased; 0: of none."""
        self.by_name[name] = self

    def do_harm(self, rng: random.Random) -> str:
        """Loses, swaps or damages a record, or puts another one in its place. Returns what it did."""
        places = sorted(self.records)
        if not places:
            return "nothing"
        place, other = rng.choice(places), rng.choice(places)
        kind = rng.choice(("lost", "swapped", "foreign", "damaged", "token"))
        record = self.records[place]
        match kind:
            case "lost":
                del self.records[place]
            case "swapped":
                self.records[place], self.records[other] = self.records[other], record
            case "foreign":
                self.records[place] = replace(record, namespace=record.namespace + "?")
            case "damaged":
                self.records[place] = replace(record, slots=b"")
            case _:  # a collision of hashes
                token_ids = (record.key.token_ids[0] + 1, *record.key.token_ids[1:])
                key = BlockKey(record.key.digest, record.key.parent, token_ids, record.key.extra_keys)
                self.records[place] = replace(record, key=key, slots=bytes([GARBAGE]) * len(record.slots))
        return kind


def _tier_of(config: EngineConfig) -> FakeTier:
    return FakeTier.by_name[config.kv_transfer_config.kv_connector_extra_config["tier"]]


class FakeTierScheduler(KVConnectorScheduler):
    """The scheduler half."""

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, kv_cache_config)
        self.tier = _tier_of(config)
        self.has_several_sources = self.tier.has_peer
        self.namespace = ""
        self._ordered: set[tuple[int, bytes]] = set()
        """Groups and digests of the blocks that are being saved."""
        self._num_ended = 0

    def may_transfer(self, request: Request) -> bool:
        return request.lora_request is None or bool(request.report.adapter_digest)

    def find_matches(self, request: Request, num_computed_tokens: int) -> list[ExternalMatch] | None:
        if self.tier.asks_again:
            return None
        num_tokens = find_longest_match(self.specs, request, num_computed_tokens, self._has)
        sources = ([PEER] if self.tier.has_peer else []) + [SOURCE]
        return [ExternalMatch(num_tokens, source) for source in sources] if num_tokens else []

    def _has(self, group_id: int, digest: bytes) -> bool:
        return (self.namespace, group_id, digest) in self.tier.index

    def on_load_finished(self, order: LoadOrder, result: LoadResult) -> None:
        if result.outcome in ("partial", "failed") and order.source != PEER:
            digest = order.keys[result.num_verified].digest
            for group_id in range(len(order.block_ids)):
                self.tier.index.discard((self.namespace, group_id, digest))

    def seconds_to_save(self) -> float:
        return 0.0 if self.tier.takes_saves else math.inf

    def choose_blocks(self, group_id: int, digests: Sequence[bytes]) -> BlockChoice:
        wanted, num_decided = list[int](), min(self.tier.most_at_once, len(digests))
        for index, digest in enumerate(digests[:num_decided]):
            if not self._has(group_id, digest) and (group_id, digest) not in self._ordered:
                self._ordered.add((group_id, digest))
                wanted.append(index)
        return BlockChoice(wanted, num_decided)

    def on_save_finished(self, order: SaveOrder, result: SaveResult) -> None:
        self._ordered.difference_update((block.group_id, block.key.digest) for block in order.blocks)
        saved = list(order.blocks)[: result.num_saved]
        self.tier.index.update((self.namespace, block.group_id, block.key.digest) for block in saved)

    def name_lease(self, request: Request) -> str | None:
        if request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            return None
        self._num_ended += 1
        is_leased = self.tier.lease_interval and self._num_ended % self.tier.lease_interval == 0
        return f"lease {self._num_ended}" if is_leased else None

    def make_transfer_params(self, request: Request, lease: str, num_tokens: int) -> dict[str, Any] | None:
        return {"lease": lease, "num_tokens": num_tokens}

    def set_weights(self, path: str) -> None:
        self.namespace = path

    def reset_cache(self) -> bool:
        self.tier.index = {place for place in self.tier.index if place[0] != self.namespace}
        return True


class _Transfer:
    """A load or a save under way, with the memory and the weights that it began with."""

    def __init__(
        self, order: LoadOrder | SaveOrder, memory: KVMemory, part: tuple[int, int], namespace: str, manner: Manner
    ) -> None:
        self.order, self.memory, self.part, self.manner = order, memory, part, manner
        self.namespace = f"{namespace}#{part[0]}"
        self.id = order.load_id if isinstance(order, LoadOrder) else order.save_id
        self.block_ids = (
            [block_id for table in order.block_ids for block_id in table if block_id]
            if isinstance(order, LoadOrder)
            else [block.block_id for block in order.blocks]
        )
        self.num_done = 0
        self.is_cancelled = False
        self.failure = ""
        self.num_records = self.num_accepted = 0
        self.num_rejected: Counter[str] = Counter()
        self.leased: list[bytes] = []
        """Contents of leased blocks at the beginning, which may not change."""
        if isinstance(order, SaveOrder) and order.lease:
            self.leased = [self.read(block_id) for block_id in self.block_ids]
            self.manner = "hung" if manner == "wedged" else manner  # a lease ends at once when it is cancelled

    def read(self, block_id: int) -> bytes:
        """Returns the worker's part of a block."""
        return self.memory.read_block(block_id, *self.part)

    def write(self, block_id: int, slots: bytes) -> None:
        """Writes the worker's part of a block."""
        self.memory.load_block(block_id, slots, *self.part)


class FakeTierWorker(KVConnectorWorker):
    """The worker half. Nothing moves but by `advance`, which a test calls, or by itself if `is_prompt`."""

    is_prompt: ClassVar[bool] = False
    """True: orders are carried out at once."""

    def __init__(self, config: EngineConfig, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(config, rank)
        self.tier = _tier_of(config)
        self.namespace = ""
        self._part = rank, num_ranks
        self.rng = random.Random(0)
        self.manners: list[Manner] = ["good"]
        """Manners of transfers, of which each gets one at random."""
        self.num_at_once = 0
        """Most moves of saves at once when orders come, before the step that has carried them. Loads move later: in the
        fake, tables give back what has left their window only in the step."""
        self.active: dict[int, _Transfer] = {}
        self._last_id = 0

    def register_kv_caches(self, memory: KVMemory) -> None:
        self._memory = memory

    def set_weights(self, path: str) -> None:
        self.namespace = path

    def start(self, orders: KVConnectorMetadata) -> None:
        for transfer_id in orders.cancels:
            if transfer_id in self.active:
                self.active[transfer_id].is_cancelled = True
            else:
                self.answer_if_lost(transfer_id)
        started: list[LoadOrder | SaveOrder] = [*orders.loads, *orders.saves]
        for order in started:
            manner = self.rng.choice(self.manners)
            transfer = _Transfer(order, self._memory, self._part, self.namespace, manner)
            if transfer.id <= self._last_id:
                raise ProtocolError(f"transfer {transfer.id} comes after {self._last_id}")
            self.arrivals.add(transfer.id)
            self.active[transfer.id], self._last_id = transfer, transfer.id
        while self.is_prompt and self.active:
            self.advance()
        for _ in range(self.rng.randint(0, self.num_at_once) if self.num_at_once else 0):
            self.advance((SaveOrder,))

    def advance(self, kinds: tuple[type, ...] = (LoadOrder, SaveOrder)) -> bool:
        """Moves a block of one transfer, or ends it. Returns whether there was any that could move."""
        broken = [one for one in self.active.values() if one.leased and one.is_cancelled]
        if broken and SaveOrder in kinds:  # leases end at once, all of them
            for one in broken:
                self._end(one, "cancelled")
            return True
        able = [one for one in self.active.values() if isinstance(one.order, kinds) and self._may_move(one)]
        if not able:
            return False
        transfer = self.rng.choice(able)
        if transfer.manner == "wedged":
            self._scribble(transfer)
        elif transfer.is_cancelled and self.rng.random() < 0.5:
            self._end(transfer, "cancelled")
        elif transfer.num_done == self._size(transfer):
            self._end(transfer, "ok")
        elif isinstance(transfer.order, LoadOrder):
            self._load(transfer, transfer.order)
        elif transfer.leased:
            self._check_lease(transfer)
            transfer.num_done += 1
        elif transfer.manner == "away" and 2 * transfer.num_done >= self._size(transfer):
            self._end(transfer, "partial" if transfer.num_done else "failed", AWAY)
        else:
            self._save(transfer, transfer.order)
        return True

    def free(self) -> None:
        """Lets wedged and hung transfers go on."""
        for transfer in self.active.values():
            if transfer.manner in ("hung", "wedged"):
                transfer.manner = "good"

    def _may_move(self, transfer: _Transfer) -> bool:
        match transfer.manner:
            case "hung":
                return transfer.is_cancelled
            case "wedged":
                return isinstance(transfer.order, LoadOrder)
            case _:
                return True

    def _size(self, transfer: _Transfer) -> int:
        order = transfer.order
        return len(order.keys) if isinstance(order, LoadOrder) else len(order.blocks)

    def _destinations(self, order: LoadOrder, index: int) -> Iterator[tuple[int, int]]:
        """Yields group and block."""
        for group_id, block_ids in enumerate(order.block_ids):
            if block_ids[index]:
                yield group_id, block_ids[index]

    def _load(self, transfer: _Transfer, order: LoadOrder) -> None:
        key = order.keys[transfer.num_done]
        for group_id, block_id in self._destinations(order, transfer.num_done):
            record = self.tier.records.get((transfer.namespace, group_id, key.digest))
            slots = bytes([GARBAGE]) * 4 if record is None else record.slots
            transfer.write(block_id, slots)
            fault = self.find_fault(record, (transfer.namespace, group_id), key)
            transfer.failure = transfer.failure or fault
            transfer.num_records += 1
            transfer.num_accepted += not fault
            transfer.num_rejected.update([fault] if fault else ())
        if transfer.failure:
            for index in range(transfer.num_done, len(order.keys)):
                for _, block_id in self._destinations(order, index):
                    transfer.write(block_id, bytes([GARBAGE]) * 4)
            self._end(transfer, "partial" if transfer.num_done else "failed")
            return
        transfer.num_done += 1
        self.report(KVConnectorOutput(progress={transfer.id: transfer.num_done}))

    @staticmethod
    def find_fault(record: StoredBlock | None, place: tuple[str, int], key: BlockKey) -> str:
        """Returns why a record is not the block `key` at a place; empty: it is."""
        if record is None:
            return "io"
        if not record.slots:
            return "mac"
        if (record.namespace, record.group_id) != place:
            return "key"
        return "" if record.key == key else "tokens"

    def _scribble(self, transfer: _Transfer) -> None:
        """Writes into the blocks of a load, as a read that cannot be stopped does."""
        assert isinstance(transfer.order, LoadOrder)
        for index in range(transfer.num_done, len(transfer.order.keys)):
            for _, block_id in self._destinations(transfer.order, index):
                transfer.write(block_id, bytes([GARBAGE]) * 4)

    def _save(self, transfer: _Transfer, order: SaveOrder) -> None:
        block = order.blocks[transfer.num_done]
        place = transfer.namespace, block.group_id, block.key.digest
        slots = transfer.read(block.block_id)
        self.tier.records[place] = StoredBlock(transfer.namespace, block.group_id, block.key, slots)
        transfer.num_done += 1

    def _check_lease(self, transfer: _Transfer) -> None:
        """Compares leased blocks with what they were, as another engine would that reads them now."""
        for block_id, slots in zip(transfer.block_ids, transfer.leased, strict=True):
            if transfer.read(block_id) != slots:
                raise ProtocolError(f"block {block_id} has changed while it was leased")

    def _end(self, transfer: _Transfer, outcome: TransferOutcome, reason: str = "") -> None:
        del self.active[transfer.id]
        num_bytes = 1000 * transfer.num_done
        if transfer.leased:
            self._check_lease(transfer)
            reason = "released" if outcome == "ok" else "broken"
        if isinstance(transfer.order, LoadOrder):
            result = LoadResult(transfer.id, transfer.num_done, outcome, num_bytes, 0.001, transfer.failure)
            result.num_records, result.num_accepted = transfer.num_records, transfer.num_accepted
            result.num_rejected = dict(transfer.num_rejected)
            report = KVConnectorOutput(loads=[result])
        else:
            saved = SaveResult(
                transfer.id, 0 if transfer.leased else transfer.num_done, outcome, num_bytes, 0.001, reason
            )
            report = KVConnectorOutput(saves=[saved])
        for _ in range(2 if transfer.manner == "twice" else 1):
            self.report(report)

    def kill(self) -> None:
        """Ends all transfers without a report, as the death of the process does."""
        self.active.clear()

    def close(self) -> None:
        self.kill()


class FakeTierWorkers(FakeTierWorker):
    """The worker halves of several workers as one. Each transfer ends with the last of its parts."""

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        super().__init__(config)
        self.ranks = [FakeTierWorker(config, rank, num_ranks) for rank in range(num_ranks)]
        aggregator = TransferAggregator(num_ranks)

        def make_report(rank: int) -> Report:
            def report(output: KVConnectorOutput) -> None:
                if joined := aggregator.add(rank, output):
                    self.report(joined)

            return report

        for rank, worker in enumerate(self.ranks):
            worker.report = make_report(rank)

    def register_kv_caches(self, memory: KVMemory) -> None:
        super().register_kv_caches(memory)
        for worker in self.ranks:
            worker.register_kv_caches(memory)

    def set_weights(self, path: str) -> None:
        for worker in self.ranks:
            worker.set_weights(path)

    def start(self, orders: KVConnectorMetadata) -> None:
        for worker in self.ranks:
            worker.rng, worker.manners, worker.num_at_once = self.rng, self.manners, self.num_at_once
            worker.start(orders)
        self._note_active()

    def advance(self, kinds: tuple[type, ...] = (LoadOrder, SaveOrder)) -> bool:
        has_moved = any(worker.advance(kinds) for worker in self.rng.sample(self.ranks, len(self.ranks)))
        self._note_active()
        return has_moved

    def _note_active(self) -> None:
        parts = [transfer for worker in self.ranks for transfer in worker.active.values()]
        self.active = dict(enumerate(parts))

    def free(self) -> None:
        for worker in self.ranks:
            worker.free()

    def kill(self) -> None:
        for worker in self.ranks:
            worker.kill()
        self._note_active()


def make_worker(config: EngineConfig, rank: int = 0) -> FakeTierWorker:
    """Returns the worker half of a tier."""
    num_ranks = config.kv_transfer_config.kv_connector_extra_config.get("workers", 1)
    return FakeTierWorker(config, rank) if num_ranks == 1 else FakeTierWorkers(config, num_ranks)
