from __future__ import annotations

from itertools import groupby

from benchmarks.switched_scheduler import BLOCK, IN_TURNS, STATISTICS, SwitchedScheduler

from quire.config.scheduler import SchedulerConfig
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


def test_statistics_in_turns_come_for_some_steps_and_not_for_the_next() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", extra_args={STATISTICS: IN_TURNS}))
    scheduler.schedule()
    has_statistics = [scheduler.make_stats() is not None for _ in range(6 * BLOCK)]
    lengths = [len(list(group)) for _, group in groupby(has_statistics)]
    assert lengths[1:-1] == [BLOCK] * (len(lengths) - 2)
    assert sum(has_statistics) == 3 * BLOCK


def test_when_nothing_runs_any_more_there_are_always_statistics() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", extra_args={STATISTICS: IN_TURNS}))
    scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert all(scheduler.make_stats() is not None for _ in range(2 * BLOCK))
