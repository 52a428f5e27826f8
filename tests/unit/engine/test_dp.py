"""A core of a group that shares experts, on a thread; the test is the other engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from quire.config.parallel import ParallelConfig
from quire.engine.dp import DPEngineCoreProc
from quire.engine.dp_group import Agreement, DPGroup
from quire.engine.waves import Verdict, Vote
from quire.errors import ServerError
from quire.wire.engine_core import FinishReason
from quire.wire.execution import SchedulerOutput
from quire.wire.shared_memory import end_epoch, make_experts_file, make_group_file

from .test_proc import DEADLINE_S, Loop

WORK, NONE = Vote(True, False), Vote(False, False)


class Pair:
    """The core, which is engine 0, and engine 1."""

    def __init__(self, path: Path, **fields: float) -> None:
        page, self.fd = path / "group", make_experts_file()
        make_group_file(page)
        parallel = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True, experts_file=self.fd)
        make = partial(DPEngineCoreProc, group_file=page)
        self.loop = Loop(make=make, parallel=parallel, **fields)
        assert isinstance(self.loop.core, DPEngineCoreProc)
        self.core = self.loop.core
        self.other = DPGroup(page, 1, 2, experts_file=self.fd)
        self.other.join(int(self.core._group._words[self.core._group._place(0) + 4]))

    @property
    def epochs(self) -> list[int]:
        return [args[0] for name, _, args, *_ in self.loop.executor.rpcs if name == "join_engines"]

    def admit(self) -> None:
        """Begins a wave, for which engine 1 has requests, too."""
        deadline = time.monotonic() + DEADLINE_S
        self.other.enter(WORK)
        while (agreement := self.other.poll()) is None:
            assert time.monotonic() < deadline
        assert agreement == Agreement(Verdict.GO, 0)

    def follow(self, is_done: Callable[[], bool]) -> None:
        """Steps as engine 1 without requests, until `is_done`."""
        deadline = time.monotonic() + DEADLINE_S
        self.other.enter(NONE)
        while not is_done():
            assert time.monotonic() < deadline
            if self.other.is_lost:
                self.other.rejoin()
                self.other.enter(NONE)
            elif self.other.poll() is not None:
                self.other.enter(NONE)

    def has_finished(self, request_id: str) -> bool:
        while not self.core.output_queue.empty():
            self.loop.receive()
        return self.loop.finish_reason(request_id) is not None


def test_a_step_that_is_lost_is_computed_again_with_the_engine_that_is_back(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    executor, calls = pair.loop.executor, count()

    def lose_the_third(output: SchedulerOutput) -> None:
        if next(calls) == 2:
            end_epoch(pair.fd, 1)
            executor.failures.append(ServerError("another worker of the step has failed"))

    executor.on_execute = lose_the_third
    pair.loop.start()
    pair.loop.add("a", 4, max_tokens=6)
    pair.admit()
    pair.follow(lambda: pair.has_finished("a"))
    assert next(calls) >= 7
    assert len(pair.loop.tokens("a")) == 6
    assert pair.epochs == [1, 2]
    pair.core.request_shutdown()
    pair.loop.wait_end()
    assert pair.loop.error is None


def test_a_failure_of_its_own_ends_the_core(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.loop.executor.failures.append(ServerError("out of memory"))
    pair.loop.start()
    pair.loop.add("a")
    pair.admit()
    pair.loop.thread.join(DEADLINE_S)
    assert "out of memory" in str(pair.loop.error)
    assert pair.other.is_lost, "the other does not wait for it"


@pytest.mark.parametrize("timeout", [0.0, 0.2])
def test_a_core_that_waits_for_another_ends_when_it_is_asked_to(tmp_path: Path, timeout: float) -> None:
    """Also with requests that have ended, and a wave that goes on: no step will come."""
    pair = Pair(tmp_path, shutdown_timeout=timeout)
    pair.loop.start()
    pair.loop.add("a", max_tokens=1000)
    pair.admit()
    while not pair.loop.executor.calls.count("sample_tokens"):
        time.sleep(0.0005)
    pair.other.leave()
    while not pair.core._group.is_joining:
        time.sleep(0.0005)
    pair.core.request_shutdown()
    pair.loop.wait_end()
    assert pair.loop.finish_reason("a") is FinishReason.ABORT
