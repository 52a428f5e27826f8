"""Outputs for clients: by client, events, prefill statistics, snapshots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.config.engine import SchedulerConfig
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.scheduler import Scheduler
from quire.pooling_params import PoolingParams
from quire.wire.engine_core import EngineCoreEventType, EngineCoreRequest, FinishReason
from quire.wire.execution import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from quire.wire.stats import PrefillStats

from ..harness import Engine, digest, make_kv_cache_config, make_request, make_scheduler

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def test_outputs_are_grouped_by_client_under_one_timestamp() -> None:
    engine = Engine(make_scheduler())
    engine.add(*(make_request(name, 4, client_index=i % 2) for i, name in enumerate("abc")))
    batches = engine.update(engine.schedule())
    assert {client: [o.request_id for o in batch.outputs] for client, batch in batches.items()} == {
        0: ["a", "c"],
        1: ["b"],
    }
    assert batches[0].timestamp == batches[1].timestamp
    assert [batch.scheduler_stats is not None for batch in batches.values()] == [True, False], "counted once"
    stats = batches[0].scheduler_stats
    assert stats is not None
    assert (stats.num_generation_tokens, stats.num_prefilled_tokens, stats.num_decoded_reqs) == (3, 12, 0), "of all"
    engine.add(make_request("d", 4, client_index=1), make_request("e", 6, client_index=2))
    batches = engine.update(engine.schedule())
    stats = batches[0].scheduler_stats
    assert stats is not None
    assert (stats.num_generation_tokens, stats.num_prefilled_tokens, stats.num_decoded_reqs) == (5, 10, 3)


def test_an_end_without_tokens_is_no_decoding_and_counts_for_its_step_only() -> None:
    engine = Engine(make_scheduler())
    engine.add(*(make_request(name, 4) for name in "abc"))
    engine.update(engine.schedule())
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED, report=True)
    for num_outputs in (3, 2):
        batch = engine.update(engine.schedule())[0]
        assert batch.scheduler_stats is not None
        assert (len(batch.outputs), batch.scheduler_stats.num_decoded_reqs) == (num_outputs, 2)


def test_stats_are_the_first_clients_whoever_has_outputs() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4, client_index=2))
    batches = engine.update(engine.schedule())
    assert {client: batch.scheduler_stats is not None for client, batch in batches.items()} == {2: False, 0: True}


def test_stats_find_a_client_even_when_there_is_nothing_to_say() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=4))
    engine.add(make_request("a", 10, client_index=1))
    batches = engine.update(engine.schedule())
    assert list(batches) == [0]
    assert batches[0].outputs == []
    assert batches[0].scheduler_stats is not None


def test_without_stats_silence_is_silent() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=4, log_stats=False))
    engine.add(make_request("a", 6, max_tokens=1))
    assert engine.update(engine.schedule()) == {}
    (output,) = engine.update(engine.schedule())[0].outputs
    assert output.events is None
    assert output.prefill_stats == PrefillStats(6, 6, 0)
    assert engine.scheduler.make_stats() is None


def test_events_travel_with_the_next_output() -> None:
    engine = Engine(make_scheduler(num_blocks=7))
    engine.add(*(make_request(name, 8, max_tokens=3) for name in "abc"))
    engine.run()
    events = {
        name: [[event.type for event in output.events or ()] for output in engine.outputs[name]] for name in "abc"
    }
    assert events == {
        "a": [[QUEUED, SCHEDULED], [], []],
        "b": [[QUEUED, SCHEDULED], [], []],
        "c": [[QUEUED, SCHEDULED], [PREEMPTED, SCHEDULED], []],
    }
    stamps = [event.timestamp for output in engine.outputs["c"] for event in output.events or ()]
    assert stamps == sorted(stamps)


def test_all_events_of_a_step_have_its_one_timestamp() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4), make_request("b", 4))
    engine.step()
    scheduled = [engine.outputs[name][0].events[1].timestamp for name in "ab"]  # type: ignore[index]
    assert scheduled[0] == scheduled[1]


def test_the_first_output_says_where_the_prompt_came_from() -> None:
    engine = Engine(make_scheduler(enable_caching=True, max_num_batched_tokens=8), digest)
    prompt = list(range(10))
    engine.add(make_request("a", prompt, max_tokens=2))
    engine.run()
    engine.add(make_request("b", [*prompt, 1, 2, 3], max_tokens=2))
    engine.run()
    assert [output.prefill_stats for output in engine.outputs["a"]] == [PrefillStats(10, 10, 0), None]
    assert [output.prefill_stats for output in engine.outputs["b"]] == [PrefillStats(13, 5, 8), None]


def test_a_prompt_computed_twice_is_reported_as_it_was_first_found() -> None:
    engine = Engine(
        make_scheduler(
            num_blocks=7,
            enable_caching=True,
            max_num_batched_tokens=12,
            long_prefill_token_threshold=8,
            scheduler_reserve_full_isl=False,
        ),
        digest,
    )
    engine.add(make_request("a", 20, max_tokens=1), make_request("b", 12, max_tokens=1))
    for expected in ({"a": 8, "b": 4}, {"a": 8, "b": 4}, {"a": 4}):
        output = engine.step()
        assert output.num_scheduled_tokens == expected
    assert output.preempted_req_ids == {"b"}
    assert engine.step().scheduled_new_reqs[0].num_computed_tokens == 4, "its own first block is found again"
    engine.run()
    assert engine.last("b").prefill_stats == PrefillStats(12, 12, 0)


def test_finished_ids_are_told_to_the_clients_that_want_them() -> None:
    engine = Engine(make_scheduler(include_finished_set=True))
    engine.add(make_request("a", 4, max_tokens=1), make_request("b", 4), make_request("c", 4, client_index=2))
    engine.scheduler.finish_requests("c", RequestStatus.FINISHED_ABORTED)
    batches = engine.update(engine.schedule())
    assert {client: batch.finished_requests for client, batch in batches.items()} == {0: {"a"}, 2: {"c"}}
    assert engine.update(engine.schedule())[0].finished_requests is None


def test_the_rest_of_a_result_reaches_its_request() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4, logprobs=1, prompt_logprobs=1), make_request("b", 4))
    output = engine.schedule()
    rows = LogprobsLists([[7, 8]], [[-0.1, -2.0]], [1])
    prompt_rows = LogprobsTensors(np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32), np.ones(3, np.int32))
    result = ModelRunnerOutput(
        ["b", "a"],
        [[5], [7]],
        logprobs={"a": rows},
        prompt_logprobs={"a": prompt_rows},
        num_nans_in_logits={"b": [2]},
    )
    batches = engine.update(output, result)
    a, b = batches[0].outputs
    assert (a.request_id, a.new_token_ids, a.new_logprobs, a.num_nans_in_logits) == ("a", [7], rows, 0)
    assert a.new_prompt_logprobs_tensors is prompt_rows
    assert (b.request_id, b.new_token_ids, b.new_logprobs, b.num_nans_in_logits) == ("b", [5], None, 2)
    assert b.new_prompt_logprobs_tensors is None


def test_tokens_after_a_stop_are_dropped_with_their_logprobs() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4, stop_token_ids=[6], logprobs=0))
    output = engine.schedule()
    rows = LogprobsLists([[5], [6], [7]], [[-1.0], [-2.0], [-3.0]], [1, 2, 3])
    (one,) = engine.update(output, ModelRunnerOutput(["a"], [[5, 6, 7]], logprobs={"a": rows}))[0].outputs
    assert one.new_token_ids == [5, 6]
    assert one.new_logprobs == LogprobsLists([[5], [6]], [[-1.0], [-2.0]], [1, 2])
    assert (one.finish_reason, one.stop_reason) == (FinishReason.STOP, 6)


def test_trace_headers_are_echoed() -> None:
    engine = Engine(make_scheduler())
    request = make_request("a", 4)
    request.origin.trace_headers = {"traceparent": "00-1"}
    engine.add(request)
    engine.step()
    assert engine.last("a").trace_headers == {"traceparent": "00-1"}


def test_pooling_requests_end_with_what_was_pooled() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=8))
    origin = EngineCoreRequest("a", list(range(12)), None, PoolingParams(task="embed"), 0.0)
    engine.add(Request(origin))
    engine.update(engine.schedule(), ModelRunnerOutput(["a"], [[]]))
    assert engine.outputs == {}, "its prompt is not complete"
    engine.update(engine.schedule(), ModelRunnerOutput(["a"], [[]], pooler_output={"a": [0.5, 0.25]}))
    one = engine.last("a")
    assert (one.pooling_output, one.new_token_ids, one.finish_reason) == ([0.5, 0.25], [], FinishReason.STOP)
    assert one.prefill_stats == PrefillStats(12, 12, 0)
    assert engine.scheduler.schedule().finished_req_ids == {"a"}


def test_a_request_the_worker_says_nothing_about_lives_on() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4))
    engine.update(engine.schedule(), ModelRunnerOutput())
    assert engine.outputs == {}
    assert engine.scheduler.get_num_unfinished_requests() == 1


# -- snapshots -------------------------------------------------------------------------------------------------


def snapshot(engine: Engine) -> dict[str, Any]:
    batches = engine.update(engine.schedule())
    stats = next(batch.scheduler_stats for batch in batches.values() if batch.scheduler_stats)
    return {name: getattr(stats, name) for name in stats.__struct_fields__}


def test_a_snapshot_of_each_step() -> None:
    engine = Engine(make_scheduler(num_blocks=11, max_num_batched_tokens=24, enable_caching=True), digest)
    engine.add(make_request("a", 20), make_request("b", 24), make_request("c", 4))
    stats = snapshot(engine)
    assert (stats["num_running_reqs"], stats["num_waiting_reqs"], stats["num_skipped_waiting_reqs"]) == (1, 2, 0)
    assert stats["num_scheduled_tokens"] == 20
    assert stats["kv_cache_usage"] == pytest.approx(0.5)
    assert stats["prefix_cache_stats"].requests == 1
    assert stats["prefix_cache_stats"].queries == 20
    stats = snapshot(engine)
    assert stats["prefix_cache_stats"].requests == 0, "b was looked up, but not admitted"
    assert stats["num_scheduled_tokens"] == 1


def test_a_snapshot_follows_the_ends_of_its_step() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request("a", 4, max_tokens=1))
    stats = snapshot(engine)
    assert (stats["num_running_reqs"], stats["kv_cache_usage"], stats["num_scheduled_tokens"]) == (0, 0.0, 4)


def test_eviction_events_are_sampled_on_request() -> None:
    scheduler = Scheduler(
        make_kv_cache_config(6),
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4),
        max_model_len=20,
        enable_caching=True,
        log_stats=True,
        kv_cache_metrics_sample=1.0,
    )
    engine = Engine(scheduler, digest)
    engine.add(make_request("a", 16, max_tokens=1))
    assert snapshot(engine)["kv_cache_eviction_events"] == []
    engine.add(make_request("b", 16, max_tokens=1))
    assert len(snapshot(engine)["kv_cache_eviction_events"]) == 3
