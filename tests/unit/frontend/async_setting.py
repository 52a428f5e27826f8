"""An AsyncLLM over a core that is run by hand, and readers that write down what they get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.testing.metrics_audit import MetricsAudit
from quire.wire.engine_core import FinishReason
from quire.wire.stats import SchedulerStats

from .async_fake_client import AsyncFakeClient
from .virtual_loop import run_virtually


class Recorder(StatLogger):
    """Keeps how requests ended."""

    def __init__(self) -> None:
        self.finished: list[FinishReason] = []
        self.num_logged = 0

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        if iteration_stats is not None:
            self.finished += [f.finish_reason for f in iteration_stats.finished_requests]

    def log(self) -> None:
        self.num_logged += 1


class Setting:
    """An engine over a fake core, for the loop that runs."""

    def __init__(self, model_dir: Path, **flags: Any) -> None:
        self.client = AsyncFakeClient()
        self.recorder = Recorder()
        config = EngineArgs(str(model_dir), **flags).create_engine_config("serving")
        self.llm = AsyncLLM(config, client=self.client)
        self.llm.pipeline.stat_loggers.add(self.recorder)
        self.audit = MetricsAudit(one_clock=False)
        self.read: dict[str, list[RequestOutput]] = {}

    def reader(
        self, request_id: str, params: SamplingParams, prompt: Any = (50, 51), **details: Any
    ) -> asyncio.Task[None]:
        """A task that reads all outputs of a new request into `read`."""
        outputs = self.read.setdefault(request_id, [])

        async def read() -> None:
            async for output in self.llm.generate(prompt, params, request_id, **details):
                outputs.append(output)

        return asyncio.create_task(read())

    def tokens(self, request_id: str) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in self.read[request_id]]

    @property
    def added(self) -> list[str]:
        return [request_id for call, request_id in self.client.calls if call == "add"]

    @property
    def aborted(self) -> list[str]:
        return [request_id for call, ids in self.client.calls if call == "abort" for request_id in ids]

    def check_metrics(self) -> MetricsSnapshot:
        """The conservation laws hold now."""
        metrics = self.llm.pipeline.stats.metrics
        assert metrics is not None
        snapshot = metrics.snapshot()
        self.audit.check(snapshot)
        return snapshot

    def assert_nothing_left(self) -> None:
        snapshot = self.check_metrics()
        assert snapshot.value("quire_requests_live") == snapshot.value("quire_requests_in_admission") == 0
        processor, admission = self.llm.pipeline.output_processor, self.llm.admission
        assert not processor.request_states
        assert not processor.parent_requests
        assert not processor.external_req_ids
        assert not self.client.core.live
        assert (admission.num_reqs, admission.num_tokens) == (0, 0)


Test = Callable[[Setting], Awaitable[None]]


def check(model_dir: Path, test: Test, **flags: Any) -> None:
    """Run `test` on a fresh engine; afterwards nothing is left of any request."""

    async def run() -> None:
        setting = Setting(model_dir, **flags)
        async with setting.llm:
            await test(setting)
            setting.assert_nothing_left()
        assert setting.client.core.is_shut_down

    asyncio.run(run(), debug=True)


def check_virtually(model_dir: Path, test: Test, **flags: Any) -> None:
    """The same where time passes only when nothing else can happen."""

    async def run() -> None:
        setting = Setting(model_dir, **flags)
        await test(setting)
        setting.assert_nothing_left()
        setting.llm.shutdown()

    run_virtually(run())


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str, **details: Any) -> RequestOutput:
    """The last output of a new request."""
    return [output async for output in llm.generate(prompt, params, request_id, **details)][-1]
