"""A core of a group that shares experts, on a thread; the test is the other engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.config.parallel import ParallelConfig
from quire.engine.dp import DPEngineCoreProc
from quire.engine.dp_group import Agreement, DPGroup
from quire.errors import ClientError, ConfigError, ServerError
from quire.wire.elastic import (
    EEP_NOTIFICATION_CALL_ID,
    EEPNotificationType,
    ReconfigureDistributedRequest,
    ReconfigureRankType,
)
from quire.wire.engine_core import FinishReason
from quire.wire.execution import SchedulerOutput
from quire.wire.group import Verdict, Vote
from quire.wire.shared_memory import end_epoch, make_experts_file, make_group_file

from .harness import ScriptedExecutor
from .test_proc import DEADLINE_S, Loop

WORK, NONE = Vote(True, False), Vote(False, False)


class Elastic(ScriptedExecutor):
    """Its next experts are there when the test says so."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.experts = Future[None]()

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        answers = super().collective_rpc(method, *args, **kwargs)
        return [self.experts] if method == "prepare_experts" else answers


class Pair:
    """The core, which is engine 0, and engine 1."""

    def __init__(self, path: Path, **fields: float) -> None:
        page, self.fd = path / "group", make_experts_file()
        make_group_file(page)
        parallel = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True, experts_file=self.fd)
        make = partial(DPEngineCoreProc, group_file=page)
        self.loop = Loop(Elastic, make=make, parallel=parallel, **fields)
        assert isinstance(self.loop.core, DPEngineCoreProc)
        self.core = self.loop.core
        self.other = DPGroup(page, 1, 2, experts_file=self.fd)
        self.other.join(self.core._group.fingerprint, weights=self.core._group.weights)

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

    def resize(self, request: ReconfigureDistributedRequest) -> Elastic:
        """Asks the core to prepare. Returns its executor."""
        make_group_file(Path(request.group_file))
        self.loop.call(1, "reinitialize_distributed", msgspec.to_builtins(request))
        assert isinstance(self.loop.executor, Elastic)
        return self.loop.executor

    def has_answered(self, call_id: int) -> bool:
        while not self.core.output_queue.empty():
            self.loop.receive()
        return call_id in self.loop.answers

    @property
    def rpcs(self) -> list[tuple[Any, ...]]:
        """Calls of the worker that concern its experts."""
        return [(name, *args) for name, _, args, *_ in self.loop.executor.rpcs if name.endswith("_experts")]

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


def test_an_engine_goes_over_to_a_larger_group_with_its_requests(tmp_path: Path) -> None:
    """The core prepares beside its steps and switches when both have paused; its request goes on in the new group."""
    pair = Pair(tmp_path)
    request = ReconfigureDistributedRequest(3, generation=1, group_file=str(tmp_path / "group.1"))
    pair.loop.start()
    pair.loop.add("a", 4, max_tokens=100)
    pair.admit()
    executor, calls = pair.resize(request), count()
    pair.follow(lambda: bool(pair.rpcs) and next(calls) > 2)
    assert pair.rpcs == [("prepare_experts", 3, 1)]
    assert not pair.has_answered(1)
    executor.experts.set_result(None)
    pair.loop.wait_for(lambda: 1 in pair.loop.answers)
    assert pair.loop.answers[1].result == "eep_ready/0"
    pair.loop.call(2, "commit_prepared_elastic_ep")
    others = [DPGroup(Path(request.group_file), rank, 3, experts_file=pair.fd, generation=1) for rank in (1, 2)]
    fingerprint, weights = pair.core._group.fingerprint, pair.core._group.weights
    num_tokens = len(pair.loop.tokens("a"))
    pausing = Vote(False, True)
    pair.other.enter(pausing)
    agreement = None
    while not pair.has_answered(2):
        if (agreement := pair.other.poll()) is not None and agreement.verdict is not Verdict.PAUSE:
            pair.other.enter(pausing)
    assert pair.rpcs[1:] == [("install_experts",)]
    assert pair.loop.answers[EEP_NOTIFICATION_CALL_ID].result == ["RECONFIGURE_FINISHED", 0]
    assert len(pair.loop.tokens("a")) < 100
    waves = [group.join(fingerprint, weights=weights) for group in others]
    assert waves == [1, 1], "the wave goes on from that of the former group"
    pair.other = others[0]
    others[1].enter(NONE)

    def step() -> bool:
        if others[1].poll() is not None:
            others[1].enter(NONE)
        return pair.has_finished("a")

    pair.follow(step)
    assert len(pair.loop.tokens("a")) == 100 > num_tokens
    assert pair.epochs == [1, 1], "the first epoch of either group"
    pair.core.request_shutdown()
    pair.loop.wait_end()
    assert pair.loop.error is None


def test_an_engine_that_is_removed_ends_by_itself(tmp_path: Path) -> None:
    """The other has died: there will be no joint pause, and none is waited for."""
    pair = Pair(tmp_path)
    rank = ReconfigureRankType.SHUTDOWN_CURRENT_RANK
    pair.loop.start()
    pair.loop.add("a", 4, max_tokens=1000)
    pair.admit()
    pair.resize(ReconfigureDistributedRequest(1, rank, generation=1, group_file=str(tmp_path / "group.1")))
    pair.loop.wait_for(lambda: 1 in pair.loop.answers)
    pair.loop.call(2, "commit_prepared_elastic_ep")
    pair.other.leave()
    pair.loop.wait_end()
    assert pair.rpcs == []
    assert pair.has_answered(2)
    assert pair.loop.answers[EEP_NOTIFICATION_CALL_ID].result == ["SHUTDOWN_COMPLETE", 0]
    assert pair.loop.finish_reason("a") is FinishReason.ABORT
    assert pair.loop.error is None


def test_what_was_prepared_is_discarded_and_nothing_has_changed(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    request = ReconfigureDistributedRequest(3, generation=1, group_file=str(tmp_path / "group.1"))
    pair.loop.start()
    pair.loop.call(9, "commit_prepared_elastic_ep")
    executor = pair.resize(request)
    pair.loop.call(3, "discard_prepared_elastic_ep")
    pair.loop.wait_for(lambda: 3 in pair.loop.answers)
    assert "no other number of engines has been prepared" in str(pair.loop.answers[9].failure_message)
    assert "was given up" in str(pair.loop.answers[1].failure_message)
    assert pair.rpcs == [("prepare_experts", 3, 1), ("discard_experts",)]
    executor.experts.set_result(None)
    pair.loop.add("a", 4, max_tokens=6)
    pair.admit()
    pair.follow(lambda: pair.has_finished("a"))
    assert pair.epochs == [1]
    pair.core.request_shutdown()
    pair.loop.wait_end()


def test_a_new_engine_has_the_number_of_blocks_of_the_others(tmp_path: Path) -> None:
    make_group_file(tmp_path / "group.1")
    parallel = ParallelConfig(
        data_parallel_size=3,
        enable_expert_parallel=True,
        experts_file=make_experts_file(),
        experts_generation=1,
        is_scale_up_launch=True,
        engine_index=2,
    )
    make = partial(DPEngineCoreProc, group_file=tmp_path / "group.1")
    core = Loop(make=make, parallel=parallel).core
    assert isinstance(core, DPEngineCoreProc)
    assert core._newcomer is not None
    assert core._newcomer.is_complete
    assert core.ready_response.experts_generation == 1
    with pytest.raises(ConfigError, match="has their number of blocks"):
        Loop(make=make, parallel=parallel, num_blocks=None)


def test_engines_that_share_no_experts_have_nothing_to_change(tmp_path: Path) -> None:
    independent = Loop().core
    with pytest.raises(NotImplementedError):
        independent._eep_send_engine_core_notification(EEPNotificationType.SHUTDOWN_COMPLETE)
    with pytest.raises(NotImplementedError):
        Loop(parallel=ParallelConfig(is_scale_up_launch=True))
    make_group_file(tmp_path / "group")
    parallel = ParallelConfig(data_parallel_size=2, dp_coordinator="always")
    core = Loop(make=partial(DPEngineCoreProc, group_file=tmp_path / "group"), parallel=parallel).core
    assert isinstance(core, DPEngineCoreProc)
    with pytest.raises(ClientError, match="shares no experts with others"):
        core.reinitialize_distributed(ReconfigureDistributedRequest(3))
