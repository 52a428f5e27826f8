"""The statistics of a process that owns a core and serves no requests."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from quire.config.engine_args import EngineArgs
from quire.errors import EngineDeadError
from quire.frontend.fleet.metrics import EngineWatch
from quire.frontend.metrics.server_metrics import ServerMetrics
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse
from quire.wire.stats import PrefixCacheStats, SchedulerStats


class Client:
    """Reports some steps, then the end of the core."""

    ready_response = EngineCoreReadyResponse(4096, 100, 16, 1584, 1.5, ("generate",))
    engine_responses: ClassVar = {0: ready_response}
    num_engines_up = 0
    counts: ClassVar = {"corrupt": 1}
    restarts: ClassVar = {"crash": 2}
    is_ready = False

    def __init__(self) -> None:
        cache = PrefixCacheStats(requests=1, queries=10, hits=4)
        self._outputs = [
            EngineCoreOutputs(scheduler_stats=SchedulerStats(3, 1, prefix_cache_stats=cache), timestamp=step)
            for step in (1.0, 2.0)
        ]

    async def get_output_async(self) -> EngineCoreOutputs:
        if not self._outputs:
            raise EngineDeadError("it is gone")
        return self._outputs.pop(0)


def test_the_core_is_known_by_its_statistics() -> None:
    config = EngineArgs("demo", skip_tokenizer_init=True).create_engine_config("serving")
    watch = EngineWatch(config, Client(), log_stats=True)  # type: ignore[arg-type]
    assert str(asyncio.run(watch.run())) == "it is gone"
    assert (watch.stats.get_load().num_running, watch.stats.get_load().num_waiting) == (3, 1)
    metrics = watch.stats.metrics
    assert metrics is not None
    seen = metrics.read(ServerMetrics(watch.stats, "0").take())
    assert seen.value("vllm:num_requests_running") == 3
    assert seen.value("vllm:prefix_cache_queries") == 20
    assert seen.value("quire_engine_restarts", "crash") == 2
    assert seen.value("quire_requests_received") == 0
