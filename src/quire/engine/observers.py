"""Who watches the scheduler of an engine core: what its configuration asks for, and nobody by default."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from quire.config.engine import EngineConfig
from quire.engine.kv_cache_init import KVCacheSizes
from quire.engine.recording.file import FileRecorder
from quire.engine.sched.observed import SchedulerObserver
from quire.engine.step_tracer import TraceBuffer
from quire.engine.trace_file import TraceFile


class Observers(NamedTuple):
    """All of them, and the one whose traces can be asked for."""

    observers: list[SchedulerObserver]
    traces: TraceBuffer | None


def make_observers(config: EngineConfig, sizes: KVCacheSizes) -> Observers:
    """Raises ConfigError if one cannot do what it is asked for."""
    observability = config.observability_config
    observers: list[SchedulerObserver] = []
    traces = TraceBuffer(observability.trace_events) if observability.trace_events else None
    if traces is not None:
        observers.append(traces.tracer)
    if observability.record is not None:
        observers.append(FileRecorder(config, sizes))
    if observability.trace_file is not None:
        observers.append(TraceFile(Path(observability.trace_file)))
    return Observers(observers, traces)


def of_incarnation(config: EngineConfig, incarnation: int) -> EngineConfig:
    """The configuration of a core that had been started `incarnation` times before: it writes files of its own, FILE.1,
    FILE.2, ..., and leaves alone what the ones before it wrote."""
    observability = config.observability_config
    if not incarnation or (observability.record is None and observability.trace_file is None):
        return config
    observability = dataclasses.replace(
        observability,
        record=_add_number(observability.record, incarnation),
        trace_file=_add_number(observability.trace_file, incarnation),
    )
    return dataclasses.replace(config, observability_config=observability)


def _add_number(path: str | None, number: int) -> str | None:
    return None if path is None else f"{path}.{number}"
