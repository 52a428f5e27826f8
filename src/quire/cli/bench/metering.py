"""CPU time by phase and by thread: where an engine's time goes when the model costs nothing.

Phases are measured by wrapping the functions that are them, in the process they run in; nothing is wrapped unless a
benchmark asks for it. Times are CPU times of threads, so a busy machine does not change what is measured, only how long
it takes.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from quire.config.engine import EngineConfig
from quire.resolve import resolve
from quire.testing.fake_executor import FakeExecutor
from quire.wire.execution import ModelRunnerOutput

Figures = dict[str, dict[str, int]]
"""ns by phase ("phases"), ns by thread ("threads"), and counts ("counts")."""

CORE_PHASES = {
    "schedule": ("quire.engine.sched.scheduler:Scheduler", "schedule"),
    "update": ("quire.engine.sched.scheduler:Scheduler", "update_from_output"),
    "encode": ("quire.wire.serial:MsgpackEncoder", "encode_into"),
}
FRONTEND_PHASES = {
    "decode": ("quire.wire.serial:MsgpackDecoder", "decode"),
    "journal": ("quire.frontend.client.link:EngineLink", "on_outputs"),
    "process": ("quire.frontend.output_processor:OutputProcessor", "process_outputs"),
}
PROCESS_PARTS = {
    "statistics": ("quire.frontend.metrics.collect.events:IterationStats", "update_from_output"),
    "detokenize": ("quire.frontend.text.detokenizer:TextDetokenizer", "update"),
    "make output": ("quire.frontend.request_state:RequestState", "make_request_output"),
    "hand over": ("quire.frontend.output_collector:RequestOutputCollector", "put"),
}
"""What `process` is made of: called once per token, so they are timed in a run of their own, by a cheaper clock."""


class PhaseMeter:
    """Sums the time spent in wrapped functions. Each phase is assumed to run on one thread."""

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock = clock
        self.spent_ns: dict[str, int] = {}

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed as `phase`."""
        spent, clock = self.spent_ns, self._clock
        spent[phase] = 0

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[phase] += clock() - start

        return timed

    @contextmanager
    def installed(self, phases: Mapping[str, tuple[str, str]]) -> Iterator[None]:
        """Wrap the methods named, in this process, for a while."""
        originals = [(resolve(owner), method, phase) for phase, (owner, method) in phases.items()]
        saved = [(owner, method, getattr(owner, method)) for owner, method, _ in originals]
        try:
            for owner, method, phase in originals:
                setattr(owner, method, self.wrap(phase, getattr(owner, method)))
            yield
        finally:
            for owner, method, function in saved:
                setattr(owner, method, function)


def thread_times() -> dict[str, int]:
    """CPU time so far in ns by thread name, and of the whole process ("process")."""
    times = {
        thread.name: time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }
    return {**times, "process": time.process_time_ns()}


class MeteredExecutor(FakeExecutor):
    """A model that costs its own time only, and a meter of the engine core it is in.

    Tokens are drawn from the whole vocabulary, so that they have texts of ordinary length.
    """

    available_bytes: ClassVar[int] = 1 << 24

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        vars(self)["vocab_size"] = config.model_config.hf_config.vocab_size
        self._meter = PhaseMeter()
        self._counts = {"tokens": 0, "steps": 0}
        self._installed = self._meter.installed(CORE_PHASES)
        self._installed.__enter__()
        for method in ("execute_model", "sample_tokens"):
            setattr(self, method, self._meter.wrap(method, getattr(self, method)))

    def _finish(self, future: Any, num_tokens: int) -> None:
        """The end of a step."""
        if num_tokens:
            output: ModelRunnerOutput = future._output
            self._counts["steps"] += 1
            self._counts["tokens"] += sum(map(len, output.sampled_token_ids))
        super()._finish(future, num_tokens)

    def set_step_time(self, step_time_s: float) -> None:
        """How long a step takes from now on, asleep."""
        vars(self)["step_time_s"] = step_time_s

    def take_figures(self) -> Figures:
        """All that was measured so far."""
        return {"phases": dict(self._meter.spent_ns), "threads": thread_times(), "counts": dict(self._counts)}

    def shutdown(self) -> None:
        self._installed.__exit__(None, None, None)
        super().shutdown()


def difference(after: Figures, before: Figures) -> Figures:
    """What was spent in between. A thread that was not there before began at 0."""
    return {
        part: {name: value - before[part].get(name, 0) for name, value in values.items()}
        for part, values in after.items()
    }
