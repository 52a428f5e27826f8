"""Turns the changes of the prefix cache into batches of KV cache events, one for each step that changed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.changes import BlockChanges, Cleared, describe_cached_blocks
from quire.engine.kv_events.publisher import KVEventPublisher
from quire.engine.request import RequestStatus
from quire.engine.sched.interface import SchedulerInterface, SchedulerObserver
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreOutputs
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput

logger = init_logger(__name__)


class KVEventsObserver(SchedulerObserver):
    """Publishes what the pool records. The first event says that nothing is cached: the core before may have died.

    A batch that the publisher does not take is lost. In its place comes everything that is cached, as soon as there is
    room: what subscribers know is right again then.
    """

    def __init__(self, publisher: KVEventPublisher) -> None:
        self._publisher = publisher
        self._pool: BlockPool | None = None
        self._num_groups = 0
        self._has_lost = False

    def attach(self, scheduler: SchedulerInterface) -> None:
        """Lets the pool record its changes. Raises ConfigError for a scheduler without Quire's cache."""
        manager: Any = getattr(scheduler, "kv_cache_manager", None)
        if manager is None:
            raise ConfigError(
                "--kv-events-config needs a scheduler with a kv_cache_manager; --scheduler-cls names another"
            )
        self._pool, self._num_groups = manager.block_pool, len(manager.groups)
        self._pool.changes = BlockChanges()
        self._pool.changes.on_cleared()
        self._publish()

    def on_finish(
        self, request_ids: list[str] | None, status: RequestStatus, report: bool, ended: Sequence[str], now: float
    ) -> None:
        self._publish()

    def on_update(
        self,
        output: SchedulerOutput,
        model_output: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        start: float,
        end: float,
    ) -> None:
        self._publish()

    def on_abandon(self, now: float) -> None:
        self._publish()

    def on_reset(self, reset_running_requests: bool, done: bool, now: float) -> None:
        self._publish()

    def close(self) -> None:
        self._publisher.close()

    def _publish(self) -> None:
        assert self._pool is not None
        assert self._pool.changes is not None
        changes = self._pool.changes.take()
        if not changes and not self._has_lost:
            return
        if not self._publisher.has_room:
            self._pool.changes.num_dropped += 1
            if not self._has_lost:
                logger.warning("KV cache events are lost: subscribers get all that is cached once there is room")
            self._has_lost = True
            return
        if self._has_lost:
            changes = [Cleared.ALL, *describe_cached_blocks(self._pool.blocks, self._num_groups)]
            self._has_lost = False
        self._publisher.publish(changes)
