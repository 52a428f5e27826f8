"""An executor that measures the time of the model, for `metrics_cost`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar, TypeVar

from quire.engine.executor.uniproc import UniProcExecutor
from quire.wire.execution import GrammarOutput, ModelRunnerOutput, SchedulerOutput

T = TypeVar("T")


class TimedExecutor(UniProcExecutor):
    """An executor on the engine's thread; the rest of that thread's time is the engine's own."""

    model_s: ClassVar[float] = 0.0
    """CPU time of the engine's thread in the worker, of all executors so far."""

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        return _timed(lambda: super(TimedExecutor, self).execute_model(scheduler_output, non_block))

    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        return _timed(lambda: super(TimedExecutor, self).sample_tokens(grammar_output, non_block))


def _timed(call: Callable[[], T]) -> T:
    start = time.thread_time()
    try:
        return call()
    finally:
        TimedExecutor.model_s += time.thread_time() - start


def time_beside_the_model() -> float:
    """Returns the CPU seconds of this thread without those in the worker."""
    return time.thread_time() - TimedExecutor.model_s
