"""The engine core's statistics, for a process that owns a core and serves no requests itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.config.engine import EngineConfig
from quire.errors import EngineDeadError
from quire.frontend.client.base import AsyncEngineCoreClient
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.frontend_stats import FrontendStats, LiveRequest


class EngineWatch:
    """Takes what the core tells its client 0 while others make the requests: statistics, never outputs.

    `stats` are what a `ServerMetrics` is made of. Belongs to one event loop.
    """

    def __init__(self, config: EngineConfig, client: AsyncEngineCoreClient, *, log_stats: bool) -> None:
        self._client = client
        self.stats = FrontendStats(
            config, client.ready_response, _NoRequests(), ledger=RequestLedger(), log_stats=log_stats
        )
        self.stats.attach(client)

    async def run(self) -> EngineDeadError:
        """Until the core is gone for good, and why; its restarts are none of our business."""
        while True:
            try:
                outputs = await self._client.get_output_async()
            except EngineDeadError as e:
                return e
            step = self.stats.open_step(outputs)
            step.close_batch(step.open_batch())


class _NoRequests:
    """Nobody asks this process for anything."""

    @property
    def request_states(self) -> Mapping[str, LiveRequest]:
        return {}

    @property
    def resting_sessions(self) -> Iterable[str]:
        return ()
