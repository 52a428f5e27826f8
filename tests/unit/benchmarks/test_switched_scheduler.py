from __future__ import annotations

from benchmarks.switched_scheduler import STATISTICS, SwitchedScheduler

from quire.config.scheduler import SchedulerConfig
from tests.unit.engine.harness import make_kv_cache_config, make_request


def test_there_are_statistics_if_the_last_request_that_cares_says_so() -> None:
    scheduler = SwitchedScheduler(
        make_kv_cache_config(101),
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16),
        max_model_len=200,
        enable_caching=False,
        log_stats=True,
        include_finished_set=False,
    )
    assert scheduler.make_stats() is not None
    scheduler.add_request(make_request("a", extra_args={STATISTICS: False}))
    assert scheduler.make_stats() is None
    scheduler.add_request(make_request("b"))
    assert scheduler.make_stats() is None
    scheduler.add_request(make_request("c", extra_args={STATISTICS: True}))
    assert scheduler.make_stats() is not None
    assert set(scheduler.requests) == {"a", "b", "c"}
