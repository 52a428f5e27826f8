from __future__ import annotations

import pytest
from benchmarks import timed_executor
from benchmarks.timed_executor import TimedExecutor, time_beside_the_model

from quire.engine.executor.uniproc import UniProcExecutor
from quire.wire.execution import SchedulerOutput


class Clock:
    """CPU time that passes when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces the executor by one whose model computes for five seconds and samples for one."""
    clock = Clock()

    def execute_model(self: UniProcExecutor, *_: object) -> None:
        clock.now += 5

    def sample_tokens(self: UniProcExecutor, *_: object) -> None:
        clock.now += 1
        raise ValueError("broken")

    monkeypatch.setattr(UniProcExecutor, "execute_model", execute_model)
    monkeypatch.setattr(UniProcExecutor, "sample_tokens", sample_tokens)
    monkeypatch.setattr(timed_executor, "time", clock)
    monkeypatch.setattr(TimedExecutor, "model_s", 0.0)
    return clock


def test_what_the_model_takes_is_left_out_even_if_it_fails(clock: Clock) -> None:
    executor = object.__new__(TimedExecutor)
    clock.now = 10
    executor.execute_model(SchedulerOutput())
    clock.now += 2
    with pytest.raises(ValueError, match="broken"):
        executor.sample_tokens(None)
    assert time_beside_the_model() == 12
    assert TimedExecutor.model_s == 6
