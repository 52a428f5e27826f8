"""The worker half of a connector: moves the bytes of blocks, beside the steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from quire.config.engine import EngineConfig
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput

Report = Callable[[KVConnectorOutput], None]
"""Takes reports, on any thread, and returns at once."""


class KVConnectorWorker(ABC):
    """The worker half. The worker calls it on its own thread, and reports come on any: `wire/kv_transfer.py` has the
    protocol.

    Call order: register_kv_caches, then any number of `start`; register_kv_caches again when the cache is released
    (with a cache of one block) and when it is allocated again; close.
    """

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.report: Report = lambda output: None
        """Set before the first `start`."""

    @abstractmethod
    def register_kv_caches(self, memory: Any) -> None:
        """Sets the memory of the KV cache: `worker/kv_cache.py: KVCacheMemory`; what the fake executor has, there.

        Transfers that are still under way keep the memory they began with.
        """

    @abstractmethod
    def start(self, orders: KVConnectorMetadata) -> None:
        """Begins transfers, and returns at once. Called before the forward pass of the step that carries the orders,
        after all earlier steps."""

    def set_weights(self, path: str) -> None:
        """Notes that the weights in memory are those of `path` now. No transfer is under way, but some may be that the
        engine has given up."""
        return

    @abstractmethod
    def close(self) -> None:
        """Ends all transfers, without reports, and releases everything. May be called twice."""
