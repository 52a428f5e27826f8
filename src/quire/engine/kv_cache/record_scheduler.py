"""Parts of both scheduler halves that move records: what the workers have reported of their blocks, limits of what is
written, and audits of what is stored."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.kv_cache.connector import KVConnectorScheduler, LoadAudits
from quire.engine.kv_cache.stored_blocks import StoredBlocks
from quire.engine.request import Request
from quire.kv_store.write_limits import MAX_WRITE_BYTES_PER_S, WriteLimits
from quire.logger import init_logger
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.kv_peers import DROPPED
from quire.wire.kv_transfer import KVConnectorOutput

logger = init_logger(__name__)


class Drops:
    """Orders to drop the records of this engine that have not ended."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._last = 0
        self._open: dict[int, tuple[Future[bool], dict[int, dict[str, str]]]] = {}
        """Ends of orders, and outcomes by rank and place, by number of the order."""

    def begin(self) -> tuple[int, Future[bool]]:
        """Begins an order. Returns its number, and its end: True if all is dropped."""
        self._last += 1
        self._open[self._last] = Future(), {}
        return self._last, self._open[self._last][0]

    def add(self, rank: int, number: int, outcomes: dict[str, str]) -> None:
        """Takes in a worker's report."""
        if number not in self._open:
            return
        end, by_rank = self._open[number]
        by_rank[rank] = outcomes
        if len(by_rank) < self._num_workers:
            return
        del self._open[number]
        failures = {
            (place, outcome) for one in by_rank.values() for place, outcome in one.items() if outcome != DROPPED
        }
        for place, outcome in sorted(failures):
            logger.warning("records of this model are not dropped at %s: %s", place, outcome)
        end.set_result(not failures)

    def end(self) -> None:
        """Ends all orders: nothing will be reported."""
        for end, _ in self._open.values():
            end.set_result(False)
        self._open.clear()


class RecordScheduler(KVConnectorScheduler):
    """Follows the namespaces of one engine, of which each worker has one (`worker/kv_transfer/record_worker.py`)."""

    def __init__(self, config: EngineConfig, kv_cache_config: KVCacheConfig, source: str, locality: str) -> None:
        """`source`: the label of loads that may be audited; `locality`: of the blocks in KV cache events."""
        super().__init__(config, kv_cache_config)
        transfer = config.kv_transfer_config
        self.role, self.extra = transfer.kv_role, transfer.kv_connector_extra_config
        self.num_workers = config.parallel_config.world_size
        self.identities: dict[int, dict[str, Any]] = {}
        """Reports of the workers' namespaces, by rank."""
        self.limits = WriteLimits(int(self.extra.get("max_write_bytes_per_s", MAX_WRITE_BYTES_PER_S)))
        self.message: dict[str, Any] = {}
        """Next message to the worker half."""
        self._drops = Drops(self.num_workers)
        self._generation = 0
        """Number of times that the weights were replaced."""
        if self.extra.get("publish_store"):
            self.stored = [StoredBlocks(self.num_workers, locality)]
        if transfer.audit_share:
            self.audits = LoadAudits(transfer.audit_share, source)

    @property
    def is_known(self) -> bool:
        """Returns whether all workers have reported what their blocks are made of."""
        return len(self.identities) == self.num_workers

    def may_transfer(self, request: Request) -> bool:
        return request.lora_request is None or bool(request.report.adapter_digest)

    def is_kept_off(self, request: Request) -> bool:
        """Returns whether the blocks of a request must not be stored: it says so, or has a salt and those are
        skipped."""
        params = request.sampling_params
        extra_args = None if params is None else params.extra_args
        says_so = extra_args is not None and extra_args.get("kv_store") is False
        return says_so or (bool(self.extra.get("skip_salted")) and request.cache_salt is not None)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        info = output.info or {}
        if "dropped" in info:
            self._drops.add(output.rank, *info["dropped"])
        if info.get("generation") != self._generation:
            return  # of other weights, or of no namespace
        if "fingerprint" in info:
            self.identities[output.rank] = info
            if self.is_known:
                self.on_identified()
        if "watched" in info:
            for stored in self.stored:
                stored.update(output.rank, *info["watched"])

    def on_identified(self) -> None:
        """Notes that all workers have reported their namespaces, or one of them again."""
        return

    def order_drop(self) -> Future[bool]:
        """Orders the workers to drop all records of their namespaces. Returns the end: True if all is dropped."""
        self.message["drop"], end = self._drops.begin()
        return end

    def take_message(self) -> dict[str, Any] | None:
        message, self.message = self.message, {}
        return message or None

    def set_weights(self, path: str) -> None:
        self._generation += 1
        self.identities.clear()
        self.limits.forget_all()
        for stored in self.stored:
            stored.clear()

    def shutdown(self) -> None:
        self._drops.end()
