"""Who watches the scheduler of an engine core: what its configuration asks for, and nobody by default."""

from __future__ import annotations

import dataclasses

from quire.config.engine import EngineConfig
from quire.engine.kv_cache_init import KVCacheSizes
from quire.engine.recording.file import FileRecorder
from quire.engine.sched.observed import SchedulerObserver


def make_observers(config: EngineConfig, sizes: KVCacheSizes) -> list[SchedulerObserver]:
    """Raises ConfigError if one cannot do what it is asked for."""
    observers: list[SchedulerObserver] = []
    if config.observability_config.record is not None:
        observers.append(FileRecorder(config, sizes))
    return observers


def of_incarnation(config: EngineConfig, incarnation: int) -> EngineConfig:
    """The configuration of a core that had been started `incarnation` times before: it writes files of its own, FILE.1,
    FILE.2, ..., and leaves alone what the ones before it wrote."""
    observability = config.observability_config
    if not incarnation or observability.record is None:
        return config
    observability = dataclasses.replace(observability, record=f"{observability.record}.{incarnation}")
    return dataclasses.replace(config, observability_config=observability)
