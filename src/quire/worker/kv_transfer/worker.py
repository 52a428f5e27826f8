"""The worker half of a connector: moves the bytes of blocks, beside the steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from quire.config.engine import EngineConfig
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput, LoadResult, SaveResult, TransferOutcome

Report = Callable[[KVConnectorOutput], None]
"""Takes reports, on any thread, and returns at once."""


class KVConnectorWorker(ABC):
    """The worker half. The worker calls it on its own thread, and reports come on any: `wire/kv_transfer.py` has the
    protocol.

    Call order: register_kv_caches, then any number of `start`, and `end_step` after each step; register_kv_caches again
    when the cache is released (with a cache of one block) and when it is allocated again; close.
    """

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.report: Report = lambda output: None
        """Set before the first `start`."""
        self.arrivals = Arrivals()
        """Orders that have arrived. The parts of a worker half share them."""

    @abstractmethod
    def register_kv_caches(self, memory: Any) -> None:
        """Sets the memory of the KV cache: `worker/kv_cache.py: KVCacheMemory`; what the fake executor has, there.

        Transfers that are still under way keep the memory they began with.
        """

    @abstractmethod
    def start(self, orders: KVConnectorMetadata) -> None:
        """Begins transfers, and returns at once. Called before the forward pass of the step that carries the orders,
        after all earlier steps."""

    def end_step(self) -> None:  # noqa: B027  most transfers have nothing to do with steps
        """Notes that the forward pass of a step is done, or that there was nothing to compute. What it has computed is
        in the cache, and is not overwritten before this method returns."""

    def set_weights(self, path: str) -> None:
        """Notes that the weights in memory are those of `path` now. No transfer is under way, but some may be that the
        engine has given up."""
        return

    def undo_weights(self) -> None:
        """Notes that the weights are those of before the last `set_weights` again: an update has failed elsewhere. The
        scheduler half is not called."""
        return

    def answer_if_lost(self, transfer_id: int) -> bool:
        """Answers the cancel of an order that has not arrived. Returns whether it has not."""
        is_lost = not self.arrivals.has(transfer_id)
        if is_lost:
            # which of the two it would have been is not known here: the engine looks for its id in both
            load, save = LoadResult(transfer_id, 0, "unknown"), SaveResult(transfer_id, 0, "unknown")
            self.report(KVConnectorOutput(loads=[load], saves=[save]))
        return is_lost

    @abstractmethod
    def close(self) -> None:
        """Ends all transfers, without reports, and releases everything. May be called twice."""


def outcome_of(num_done: int, num_ordered: int, reason: str) -> TransferOutcome:
    """Returns the outcome of a transfer; `reason`: of the error that has ended it, or ""."""
    if reason:
        return "partial" if num_done else "failed"
    return "ok" if num_done == num_ordered else "cancelled"


class Arrivals:
    """The ids of orders that have arrived. Those passed over were lost with a step that failed."""

    def __init__(self) -> None:
        self._last_id = 0
        self._lost_ids: set[int] = set()

    def add(self, transfer_id: int) -> None:
        """Notes an order that has arrived."""
        self._lost_ids.update(range(self._last_id + 1, transfer_id))
        self._lost_ids.discard(transfer_id)  # loads of a message come before its saves
        self._last_id = max(self._last_id, transfer_id)

    def has(self, transfer_id: int) -> bool:
        """Returns whether an order has arrived, be it answered or not."""
        return transfer_id <= self._last_id and transfer_id not in self._lost_ids
