"""Reports that come on other threads, and the alarm."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.engine.transfers import TransferLink
from quire.errors import ConfigError
from quire.wire.kv_transfer import KVConnectorOutput, LoadResult, SaveResult, TransferAggregator
from tests.seeds import seeds


class Transferring:
    """The part of an executor that a link uses."""

    def send_transfers(self, orders: Any) -> None: ...

    def register_transfer_callback(self, callback: Any) -> None:
        self.report = callback


def make_link(woken: threading.Event) -> tuple[TransferLink, Transferring]:
    executor: Any = Transferring()
    return TransferLink(executor, woken.set), executor


def test_a_report_of_another_thread_ends_the_wait_and_wakes_the_loop() -> None:
    woken = threading.Event()
    link, executor = make_link(woken)
    link.clock = lambda: 7.5
    assert not link.has_reports
    report = KVConnectorOutput(loads=[LoadResult(1, 2)])
    thread = threading.Thread(target=executor.report, args=(report,))
    thread.start()
    link.wait(60.0)
    thread.join()
    assert woken.is_set()
    assert link.has_reports
    assert link.take() == [(7.5, report)]
    assert link.take() == []
    link.close()


def test_the_alarm_wakes_the_loop_once() -> None:
    woken = threading.Event()
    link, _ = make_link(woken)
    link.set_alarm(3600.0)
    assert not woken.is_set()
    link.set_alarm(0.0)
    assert woken.wait(60.0)
    woken.clear()
    link.set_alarm(float("inf"))
    link.close()
    link.close()
    assert not woken.is_set()


def test_workers_that_cannot_transfer_are_refused() -> None:
    executor: Any = type("Plain", (Executor,), dict.fromkeys(Executor.__abstractmethods__))(EngineConfig())
    with pytest.raises(ConfigError, match="Plain cannot transfer blocks"):
        TransferLink(executor, lambda: None)


def test_reports_of_a_step_are_taken_in_together() -> None:
    aggregator = TransferAggregator(2)
    first, other = KVConnectorOutput([LoadResult(1, 5)], info={"x": 1}, step=1), KVConnectorOutput(step=1)
    assert not aggregator.add(1, first)
    assert aggregator.add(0, other) == KVConnectorOutput(step=1, infos=[(1, {"x": 1})]), "one has yet to end its load"
    lost, later = KVConnectorOutput(info={"x": 2}, step=2), KVConnectorOutput(info={"x": 3}, step=4)
    ended = KVConnectorOutput([LoadResult(1, 3, "partial")], step=3)
    assert not any(aggregator.add(0, report) for report in (lost, ended, later))
    joined = aggregator.add(1, KVConnectorOutput(step=3))
    assert joined == KVConnectorOutput([LoadResult(1, 3, "partial")], step=3, infos=[(0, {"x": 2})]), "steps in order"
    assert aggregator.add(1, later).infos == [(0, {"x": 3}), (1, {"x": 3})]


def test_a_transfer_has_ended_when_all_workers_have_reported_it() -> None:
    aggregator = TransferAggregator(3)
    first = aggregator.add(
        1, KVConnectorOutput([LoadResult(1, 5, "ok", 10, 1.0)], [SaveResult(2, 4)], {7: 1}, {"x": 1})
    )
    assert first == KVConnectorOutput(info={"x": 1}, rank=1), "a message is passed on"
    assert not aggregator.add(0, KVConnectorOutput([LoadResult(1, 3, "partial", 6, 3.0, "mac")]))
    last = aggregator.add(2, KVConnectorOutput([LoadResult(1, 4, "cancelled", 8, 2.0)], [SaveResult(2, 4)]))
    assert last.loads == [LoadResult(1, 3, "partial", 24, 3.0, "mac")]
    assert last.saves == []
    assert aggregator.add(0, KVConnectorOutput(saves=[SaveResult(2, 1, "failed", 1, 0.5, "io")])).saves == [
        SaveResult(2, 1, "failed", 1, 0.5, "io")
    ]


def test_the_worker_that_has_done_least_gives_the_reason() -> None:
    aggregator = TransferAggregator(2)
    aggregator.add(0, KVConnectorOutput([LoadResult(1, 5, "partial", reason="mac"), LoadResult(2, 0, "cancelled")]))
    joined = aggregator.add(
        1, KVConnectorOutput([LoadResult(1, 2, "cancelled"), LoadResult(2, 0, "failed", reason="io")])
    )
    assert joined.loads == [LoadResult(1, 2, "cancelled"), LoadResult(2, 0, "failed", reason="io")]


def test_one_worker_that_reports_twice_is_not_two() -> None:
    aggregator = TransferAggregator(2)
    result = KVConnectorOutput([LoadResult(1, 5)], [SaveResult(2, 4)])
    assert not aggregator.add(0, result)
    assert not aggregator.add(0, result)
    assert aggregator.add(1, result) == KVConnectorOutput([LoadResult(1, 5)], [SaveResult(2, 4)], rank=1)
    assert not aggregator.add(0, result), "it has ended"
    assert not aggregator.add(0, KVConnectorOutput(progress={1: 3}))


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(30))
def test_loads_of_several_workers_that_end_early_late_and_never(seed: int) -> None:
    """Each worker verifies a block at a time, fails at one, is cancelled or hangs; what is joined is compared with a
    model after every report."""
    rng = random.Random(seed)
    num_workers, num_loads = rng.randint(1, 4), rng.randint(1, 8)
    aggregator, ranks = TransferAggregator(num_workers), range(num_workers)
    verified = {load: dict.fromkeys(ranks, 0) for load in range(num_loads)}
    last = {load: {rank: rng.choice(["ok", "partial", "cancelled", "never"]) for rank in ranks} for load in verified}
    stops = {load: {rank: 9 if last[load][rank] == "ok" else rng.randint(0, 8) for rank in ranks} for load in verified}
    reported: dict[int, dict[int, LoadResult]] = {load: {} for load in verified}
    ended: dict[int, LoadResult] = {}
    going = [(load, rank) for load in verified for rank in ranks]
    while going:
        load, rank = rng.choice(going)
        if verified[load][rank] < stops[load][rank]:
            verified[load][rank] += 1
            report = KVConnectorOutput(progress={load: verified[load][rank]})
        else:
            going.remove((load, rank))
            if last[load][rank] == "never":
                continue
            outcome: Any = last[load][rank]
            reported[load][rank] = LoadResult(load, verified[load][rank], outcome, 7, 1.0, f"{rank}")
            report = KVConnectorOutput([reported[load][rank]])
        joined = aggregator.add(rank, report)
        for result in joined.loads:
            assert result.load_id not in ended, "it ends once"
            ended[result.load_id] = result
        for other, number in joined.progress.items():
            assert number == min(verified[other].values()), "no worker has more than it says"
            assert other not in ended
        assert (load in ended) == (len(reported[load]) == num_workers)
    for load, result in ended.items():
        least = min(part.num_verified for part in reported[load].values())
        assert (result.num_verified, result.num_bytes) == (least, 7 * num_workers)
        assert reported[load][int(result.reason)].num_verified == least
    assert set(ended) == {load for load in verified if "never" not in last[load].values()}
