"""The configuration of KV transfer, and the table of connectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.errors import ConfigError, nearest


class ConnectorSpec(NamedTuple):
    """A row of `CONNECTORS`. Each half is named as "package.module:Class"."""

    scheduler: str
    """A `engine/kv_cache/connector.py: KVConnectorScheduler`; called with the EngineConfig and the KVCacheConfig."""
    worker: str
    """A `worker/kv_transfer/worker.py: KVConnectorWorker`; called with the EngineConfig and the worker's rank."""


CONNECTORS: dict[str, ConnectorSpec] = {}
"""Connectors by the name in `KVTransferConfig.kv_connector`."""


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """Where blocks of the KV cache are stored outside the engine. No flag sets it yet."""

    kv_connector: str | None = None
    """A name of `CONNECTORS`; None: nothing is stored, nothing loaded."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """The connector's own keys."""
    min_load_tokens: int = 32
    """Fewer tokens are computed, not loaded."""
    load_bias: float = 1.0
    """A load may be predicted to take so many times as long as computing."""
    max_pinned_share: float = 0.05
    """Largest share of the blocks that may wait to be saved."""

    def __post_init__(self) -> None:
        name = self.kv_connector
        if name is not None and name not in CONNECTORS:
            hint = nearest(name, CONNECTORS, f"there are {', '.join(CONNECTORS) or 'none'}")
            raise ConfigError(f"kv_connector {name!r} is not known; {hint}")

    @property
    def connector(self) -> ConnectorSpec | None:
        """The row of the connector; None: there is none."""
        return None if self.kv_connector is None else CONNECTORS[self.kv_connector]
