from __future__ import annotations

import pytest
from benchmarks.switched_scheduler import BLOCK, STATISTICS, Order, SwitchedScheduler

from quire.config.engine import SchedulerConfig
from quire.engine.request import RequestStatus
from tests.unit.engine.harness import make_kv_cache_config, make_request


def make_scheduler() -> SwitchedScheduler:
    return SwitchedScheduler(
        make_kv_cache_config(101),
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16),
        max_model_len=200,
        enable_caching=False,
        log_stats=True,
        include_finished_set=False,
    )


def test_there_are_statistics_if_the_last_request_that_cares_says_so() -> None:
    scheduler = make_scheduler()
    assert scheduler.make_stats() is not None
    scheduler.add_request(make_request("a", extra_args={STATISTICS: False}))
    assert scheduler.make_stats() is None
    scheduler.add_request(make_request("b"))
    assert scheduler.make_stats() is None
    scheduler.add_request(make_request("c", extra_args={STATISTICS: True}))
    assert scheduler.make_stats() is not None
    assert set(scheduler.requests) == {"a", "b", "c"}


@pytest.mark.parametrize("turns", Order)
def test_statistics_in_turns_begin_anew_when_nothing_ran(turns: Order) -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, extra_args={STATISTICS: str(turns)}))
        scheduler.add_request(make_request(f"{name}, too", extra_args={STATISTICS: str(turns)}))
        scheduler.schedule()
        has_statistics = [scheduler.make_stats() is not None for _ in range(4 * BLOCK + 1)]
        expected = [turns is Order.ON_FIRST] * BLOCK + [turns is Order.OFF_FIRST] * BLOCK
        assert has_statistics == [*expected, *expected, expected[0]]
        scheduler.finish_requests([name, f"{name}, too"], RequestStatus.FINISHED_ABORTED)


def test_over_both_turns_every_step_has_statistics_once() -> None:
    first, second = Order
    assert all(first.are_on(number) != second.are_on(number) for number in range(4 * BLOCK))


def test_when_nothing_runs_any_more_there_are_always_statistics() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", extra_args={STATISTICS: Order.OFF_FIRST}))
    scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert all(scheduler.make_stats() is not None for _ in range(2 * BLOCK))
