"""The exporter: what steps, requests and answers bring ends up in the right series."""

from __future__ import annotations

import sys
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.sched.drafts import Unused
from quire.errors import ServerError
from quire.frontend.metrics.catalog.quire_rows import UNUSED_REASONS
from quire.frontend.metrics.catalog.spec import SPEC_DECODE
from quire.frontend.metrics.collect.events import (
    ControlOperation,
    ControlOperations,
    FinishedRequestStats,
    FirstToken,
    HttpExchange,
    IterationStats,
    RequestOwner,
)
from quire.frontend.metrics.collect.facts import OTHER_ADAPTERS, AdapterLabels, AdapterLoad, FrontendFacts
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.collect.saturation import Saturation
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.frontend.metrics.publish.stat_loggers import MAX_REPORTS_KEPT, StatLoggerManager
from quire.wire.engine_core import FinishReason
from quire.wire.stats import (
    AdapterStats,
    KVCacheEvictionEvent,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
)

FINISHED = FinishedRequestStats(
    request_id="x",
    finish_reason=FinishReason.LENGTH,
    e2e_latency=2.0,
    num_prompt_tokens=5,
    num_generation_tokens=3,
    max_tokens_param=4,
    queued_time=0.25,
    prefill_time=0.5,
    decode_time=1.0,
    inference_time=1.5,
    mean_time_per_output_token=0.5,
    num_cached_tokens=2,
    num_preemptions=1,
    is_corrupted=False,
)


def make(*conditions: str, **fields: Any) -> PrometheusStatLogger:
    setup = MetricsSetup(model_name="m", conditions=frozenset(conditions))
    return PrometheusStatLogger(setup, **fields)


def test_a_step_is_counted() -> None:
    logger = make()
    for _ in range(2):
        logger.record(
            SchedulerStats(
                num_running_reqs=3,
                num_waiting_reqs=1,
                num_skipped_waiting_reqs=4,
                kv_cache_usage=0.25,
                prefix_cache_stats=PrefixCacheStats(requests=1, queries=10, hits=4),
                num_recomputed_tokens=7,
                num_used_blocks=1,
                num_cached_blocks=2,
                num_free_blocks=3,
                num_generation_tokens=5,
                num_prefilled_tokens=3,
            ),
            IterationStats(
                num_generation_tokens=3,
                prompt_tokens=PrefillStats(num_prompt_tokens=5, num_computed_tokens=3, num_local_cached_tokens=2),
                num_preempted_reqs=1,
                first_tokens=[FirstToken(0.5)],
                inter_token_latencies={0.02: 1, 0.2: 1},
                finished_requests=[FINISHED],
                max_num_generation_tokens=[3],
                n_params=[1],
            ),
        )
    seen = logger.snapshot()
    gauges = {
        "vllm:num_requests_running": 3, "vllm:num_requests_waiting": 5, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
    }  # fmt: skip
    counters = {
        "vllm:prefix_cache_queries": 20, "vllm:prefix_cache_hits": 8, "vllm:prompt_tokens": 10,
        "vllm:prompt_tokens_cached": 4, "vllm:generation_tokens": 6, "vllm:num_preemptions": 2,
        "quire_preemption_recomputed_tokens": 14,
    }  # fmt: skip
    sums = {
        "vllm:time_to_first_token_seconds": 1.0, "vllm:e2e_request_latency_seconds": 4.0,
        "vllm:request_queue_time_seconds": 0.5, "vllm:request_prefill_time_seconds": 1.0,
        "vllm:request_decode_time_seconds": 2.0, "vllm:request_inference_time_seconds": 3.0,
        "vllm:request_time_per_output_token_seconds": 1.0, "vllm:iteration_tokens_total": 16,
        "vllm:request_prompt_tokens": 10, "vllm:request_generation_tokens": 6, "vllm:request_params_max_tokens": 8,
        "vllm:request_prefill_kv_computed_tokens": 6, "vllm:request_max_num_generation_tokens": 6,
        "vllm:request_params_n": 2, "vllm:request_num_preemptions": 2,
    }  # fmt: skip
    for name, value in {**gauges, **counters, **sums}.items():
        assert seen.value(name) == value, name
    assert {name: seen.count(name) for name in sums} == dict.fromkeys(sums, 2)
    assert seen.count("vllm:inter_token_latency_seconds") == 4
    labelled = {
        ("vllm:num_requests_waiting_by_reason", "capacity"): 1,
        ("vllm:num_requests_waiting_by_reason", "deferred"): 4,
        ("vllm:prompt_tokens_by_source", "local_compute"): 6,
        ("vllm:prompt_tokens_by_source", "local_cache_hit"): 4,
        ("vllm:prompt_tokens_cached_by_source", "device"): 4,
        ("vllm:request_success", "length"): 2,
        ("vllm:request_success", "abort"): 0,
        ("quire_kv_blocks", "cached"): 2,
    }
    assert {(name, label): seen.value(name, label) for name, label in labelled} == labelled


def test_a_value_on_a_bound_is_within_it() -> None:
    logger = make()
    logger.record(None, IterationStats(first_tokens=[FirstToken(t) for t in (0.001, 0.0010001, 9999.0)]))
    counts = logger.snapshot().find("vllm:time_to_first_token_seconds").series[0].counts
    assert (counts[0], counts[1], counts[-1]) == (1, 1, 1)


def test_a_stage_that_was_not_reached_is_not_observed() -> None:
    logger = make()
    stages = ("queued_time", "prefill_time", "decode_time", "inference_time", "max_tokens_param")
    never_ran = msgspec.structs.replace(FINISHED, **dict.fromkeys(stages))
    logger.record(None, IterationStats(finished_requests=[never_ran]))
    seen = logger.snapshot()
    for stage in ("queue", "prefill", "decode", "inference"):
        assert seen.count(f"vllm:request_{stage}_time_seconds") == 0
    assert seen.count("vllm:request_params_max_tokens") == 0
    assert seen.count("vllm:e2e_request_latency_seconds") == 1


def test_an_abort_is_no_step() -> None:
    logger = make()
    logger.record(None, IterationStats(finished_requests=[FINISHED]))
    assert logger.snapshot().count("vllm:iteration_tokens_total") == 0


def test_engines_have_series_of_their_own() -> None:
    logger = PrometheusStatLogger(
        MetricsSetup(model_name="m", engines=(0, 1), cache_configs={0: {"block_size": "16"}, 1: {"block_size": "16"}})
    )
    info = logger.snapshot().find("vllm:cache_config_info")
    assert [series.labels for series in info.series] == [("0", "16"), ("1", "16")]
    logger.record(SchedulerStats(num_running_reqs=2), IterationStats(num_generation_tokens=5), 1)
    logger.record(SchedulerStats(num_running_reqs=3), None, 7)  # one that was not announced
    running = {s.labels[1]: s.value for s in logger.snapshot().find("vllm:num_requests_running").series}
    assert running == {"0": 0, "1": 2, "7": 3}
    tokens = {s.labels[1]: s.value for s in logger.snapshot().find("vllm:generation_tokens").series}
    assert tokens == {"0": 0, "1": 5}


def test_lifetimes_of_sampled_blocks_are_observed() -> None:
    logger = make("--kv-cache-metrics")
    events = [KVCacheEvictionEvent(4.0, 1.0, (0.5, 0.25)), KVCacheEvictionEvent(2.0, 2.0)]
    logger.record(SchedulerStats(kv_cache_eviction_events=events), None)
    seen = logger.snapshot()
    found = {
        name: (seen.count(f"vllm:kv_block_{name}_seconds"), seen.value(f"vllm:kv_block_{name}_seconds"))
        for name in ("lifetime", "idle_before_evict", "reuse_gap")
    }
    assert found == {"lifetime": (2, 6.0), "idle_before_evict": (2, 3.0), "reuse_gap": (2, 0.75)}


def test_drafts_show_themselves_when_there_are_any() -> None:
    logger = make()
    assert "spec_decode" not in logger.exposition()
    spec = SpecDecodingStats(3)
    spec.record(3, 2)
    spec.record(3, 0)
    logger.record(SchedulerStats(spec_decoding_stats=spec), None)
    seen = logger.snapshot()
    assert seen.value("vllm:spec_decode_num_drafts") == 2
    assert seen.value("vllm:spec_decode_num_draft_tokens") == 6
    assert seen.value("vllm:spec_decode_num_accepted_tokens") == 2
    assert seen.value("vllm:spec_decode_num_accepted_tokens_per_pos", "1") == 1


def test_drafts_of_requests_are_hidden_without_speculation() -> None:
    logger = make()
    logger.record(None, IterationStats(1.0, finished_requests=[FINISHED]))
    assert "draft_tokens" not in logger.exposition()
    drafted = msgspec.structs.replace(FINISHED, num_draft_tokens=6, num_accepted_draft_tokens=4)
    logger.record(None, IterationStats(1.0, finished_requests=[FINISHED, drafted]))
    seen = logger.snapshot()
    assert (seen.count("quire_request_draft_tokens"), seen.value("quire_request_draft_tokens")) == (1, 6)
    assert seen.value("quire_request_accepted_draft_tokens") == 4


def test_with_speculation_its_series_are_there_from_the_start() -> None:
    setup = MetricsSetup(model_name="m", conditions=frozenset({SPEC_DECODE}), num_spec_tokens=3)
    logger = PrometheusStatLogger(setup)
    seen = logger.snapshot()
    for position in "012":
        assert seen.value("vllm:spec_decode_num_accepted_tokens_per_pos", position) == 0
    for name in ("rejected_tokens", "cut_tokens", "proposed_tokens", "draft_seconds"):
        assert seen.value(f"quire_spec_decode_{name}") == 0
    for reason in UNUSED_REASONS:
        assert seen.value("quire_spec_decode_unused_tokens", reason) == 0
    spec = SpecDecodingStats(3, num_rejected_tokens=2, num_cut_tokens=1, num_proposed_tokens=9)
    spec.num_unused_tokens, spec.draft_seconds = {"budget": 4}, 0.5
    logger.record(SchedulerStats(spec_decoding_stats=spec), None)
    seen = logger.snapshot()
    assert seen.value("quire_spec_decode_unused_tokens", "budget") == 4
    assert seen.value("quire_spec_decode_draft_seconds") == 0.5


# -- counted together ------------------------------------------------------------------------------------------------

SUBSTANCE = st.builds(
    lambda tokens, waits, running: (
        SchedulerStats(num_running_reqs=running, num_generation_tokens=tokens) if running else None,
        IterationStats(1.0, num_generation_tokens=tokens, inter_token_latencies=waits, finished_requests=[FINISHED])
        if tokens
        else None,
    ),
    st.integers(0, 3),
    st.dictionaries(st.sampled_from([0.25, 0.5, 4.0]), st.integers(1, 3)),
    st.integers(0, 3),
)


@given(st.lists(st.tuples(SUBSTANCE, st.integers(0, 1), st.booleans()), max_size=12))
def test_it_makes_no_difference_who_looks_when(
    reports: list[tuple[tuple[SchedulerStats | None, IterationStats | None], int, bool]],
) -> None:
    watched, alone = make(clock=lambda: 1.0), make(clock=lambda: 1.0)
    managers = [StatLoggerManager([logger], lambda: 1.0) for logger in (watched, alone)]
    for (step, batch), engine_index, somebody_looks in reports:
        for manager in managers:
            manager.record(step, batch, engine_index)
        if somebody_looks:
            watched.snapshot()
    assert alone.snapshot() == watched.snapshot()
    assert alone.exposition() == watched.exposition()


def test_what_nobody_looks_at_is_counted_in_the_end() -> None:
    logger = make()
    manager = StatLoggerManager([logger])
    batches = [IterationStats(num_generation_tokens=1) for _ in range(MAX_REPORTS_KEPT)]
    before = sys.getrefcount(batches[0])
    for batch in batches:
        manager.record(None, batch)
    after = sys.getrefcount(batches[0])
    assert after == before, "nothing is kept of it"
    assert logger.snapshot().value("vllm:generation_tokens") == MAX_REPORTS_KEPT


def test_a_gauge_is_of_the_time_it_was_told() -> None:
    times = iter([1.0, 2.0])
    logger = make(clock=lambda: next(times, 99.0))
    logger.record(SchedulerStats(num_running_reqs=3), None)
    logger.record(SchedulerStats(num_running_reqs=4), None)
    (series,) = logger.snapshot().find("vllm:num_requests_running").series
    assert (series.value, series.stamp) == (4.0, 2.0)


def test_what_cannot_be_counted_is_a_failure() -> None:
    logger = make()
    manager = StatLoggerManager([logger])
    nonsense: Any = IterationStats(num_generation_tokens="a few")  # type: ignore[arg-type]
    manager.record(None, nonsense)
    with pytest.raises(ServerError, match="has failed"):
        logger.exposition()
    assert logger.has_failed
    assert manager.loggers == []


def test_a_slow_bucket_leads_to_its_request() -> None:
    logger = make(clock=lambda: 1700000000.25)
    owner = RequestOwner("chat-1", {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"})
    logger.record(None, IterationStats(first_tokens=[FirstToken(3.0, owner)]))
    logger.record(
        None, IterationStats(finished_requests=[msgspec.structs.replace(FINISHED, owner=RequestOwner("y" * 500))])
    )
    text = logger.exposition("openmetrics")
    expected = f'le="5.0"}} 1.0 # {{trace_id="{"ab" * 16}",request_id="chat-1"}} 3.0 1700000000.250'
    assert expected in text
    assert f'# {{request_id="{"y" * 118}"}} 2.0 1700000000.250' in text  # 128 characters, names included
    assert "trace_id" not in logger.exposition()  # Prometheus' own format has no exemplars


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "junk"}, {"traceparent": "00-short-1-1"}])
def test_a_request_without_a_trace(headers: dict[str, str] | None) -> None:
    owner = RequestOwner("a", headers)
    assert (owner.trace_id, owner.labels) == (None, {"request_id": "a"})


# -- what is true now ------------------------------------------------------------------------------------------------


def facts(**fields: Any) -> FrontendFacts:
    defaults: dict[str, Any] = {
        "time": 1000.0,
        "ledger": RequestLedger(),
        "num_live": {"waiting": 0, "running": 0, "resting": 0},
    }
    return FrontendFacts(**{**defaults, **fields})


def snapshot(*conditions: str, **fields: Any) -> MetricsSnapshot:
    return make(*conditions, get_facts=lambda: facts(**fields)).snapshot()


def test_facts_are_read_for_each_snapshot() -> None:
    seen = snapshot(
        num_live={"waiting": 1, "running": 2, "resting": 3},
        num_queued_tokens=40,
        admission_rejections={"max_num_queued_reqs": 6},
        core_counts={"resumed_requests": 5, "recomputed_tokens": 70, "corrupt": 1, "worker_deaths.killed": 2},
        core_restarts={"hang": 2},
        is_core_ready=False,
        oldest_arrival=998.5,
        saturation=Saturation({"compute": 0.5, "seats": 0.25, "kv_cache": 0.75, "queue": 0.0}, 123.0),
        sleep_level=2,
        operations_in_flight={"wake": 1},
    )
    expected = {
        ("quire_requests_live", "running"): 2,
        ("quire_queue_tokens",): 40,
        ("vllm:admission_rejections", "max_num_queued_reqs"): 6,
        ("quire_requests_resumed",): 5,
        ("quire_restart_recomputed_tokens",): 70,
        ("quire_dropped_messages", "corrupt"): 1,
        ("quire_worker_deaths", "killed"): 2,
        ("quire_worker_deaths", "exited"): 0,
        ("quire_engine_restarts", "hang"): 2,
        ("quire_engine_restarts", "crash"): 0,
        ("quire_engine_ready",): 0,
        ("quire_engine_step_age_seconds",): 1.5,
        ("quire_saturation",): 0.75,
        ("quire_saturation_by_resource", "seats"): 0.25,
        ("quire_saturation_limit_tokens_per_second",): 123,
        ("vllm:engine_sleep_state", "discard_all"): 1,
        ("vllm:engine_sleep_state", "awake"): 0,
        ("vllm:sleep_mode_operations_in_flight", "wake"): 1,
    }
    assert {key: seen.value(*key) for key in expected} == expected


def test_adapters_are_counted_by_name_and_state() -> None:
    load = AdapterLoad.count([("b", True), ("a", False), ("b", False), ("b", True)])
    seen = snapshot("--enable-lora", adapters=load, max_lora=4)
    (series,) = seen.find("vllm:lora_requests_info").series
    assert (series.labels, series.value) == (("4", "a,b", "b"), 1000.0)
    assert seen.value("quire_lora_requests", "b", "running") == 2
    assert seen.value("quire_lora_requests", "a", "waiting") == 1


def test_many_adapters_share_a_series() -> None:
    load = AdapterLoad.count([(f"a{i}", True) for i in range(200)] + [("busy", True), ("busy", False)])
    rows = load.capped()
    assert len(rows) == 2 * 51
    assert rows[0] == ("busy", "running", 1)
    assert (OTHER_ADAPTERS, "running", 151) in rows
    assert sum(count for _, state, count in rows if state == "running") == 201


def test_an_adapter_that_has_left_has_no_series() -> None:
    now = facts(adapters=AdapterLoad({"a": 1}), max_lora=1)
    logger = make("--enable-lora", get_facts=lambda: now)
    assert logger.snapshot().value("quire_lora_requests", "a", "running") == 1
    now = facts(max_lora=1)
    assert logger.snapshot().find("quire_lora_requests").series == []


def test_tokens_of_adapters_add_up_and_their_labels_stay() -> None:
    labels = AdapterLabels(limit=2)
    logger = make("--enable-lora")
    for tokens in ({"a": (5, 1), "b": (0, 2)}, {"c": (7, 3), "a": (0, 1)}, {"d": (1, 1), "b": (0, 4), "c": (0, 2)}):
        stats = IterationStats(num_generation_tokens=20, prompt_tokens=PrefillStats(9, 9))
        stats.tokens_of_adapters = labels.relabel(tokens)
        logger.record(None, stats)
    seen = logger.snapshot()
    generated = {series.labels[-1]: series.value for series in seen.find("quire_lora_generation_tokens").series}
    assert generated == {"": 60 - 14, "a": 2, "b": 6, OTHER_ADAPTERS: 6}
    prompts = {series.labels[-1]: series.value for series in seen.find("quire_lora_prompt_tokens").series}
    assert prompts == {"": 27 - 13, "a": 5, "b": 0, OTHER_ADAPTERS: 8}
    assert "quire_lora_prompt_tokens" not in [family.name for family in make().snapshot().families]


def test_loads_of_adapters() -> None:
    logger = make("--enable-lora")
    for stats in (
        AdapterStats({"loaded": 2}, [0.03, 0.2], [0.5], 1, 1000, {"ready": 2}),
        AdapterStats({"failed": 1}, [], [], 0, 500, {"ready": 1, "cold": 3}),
    ):
        logger.record(SchedulerStats(adapters=stats), None)
    seen = logger.snapshot()
    assert (seen.value("quire_lora_loads", "loaded"), seen.value("quire_lora_loads", "failed")) == (2, 1)
    assert (seen.count("quire_lora_load_seconds"), seen.value("quire_lora_load_seconds")) == (2, pytest.approx(0.23))
    assert (seen.count("quire_lora_wait_seconds"), seen.value("quire_lora_evictions")) == (1, 1)
    assert seen.value("quire_lora_resident_bytes") == 500
    assert (seen.value("quire_lora_adapters", "ready"), seen.value("quire_lora_adapters", "cold")) == (1, 3)


def test_operations_and_answers() -> None:
    logger = make()
    operations = ControlOperations(logger.record_operation)
    with operations.timed("sleep"):
        assert operations.in_flight["sleep"] == 1
    with pytest.raises(RuntimeError), operations.timed("update"):
        raise RuntimeError
    assert operations.in_flight.total() == 0
    logger.record_operation(ControlOperation("wake", 20.0))
    logger.record_exchange(HttpExchange("POST", "/v1/completions", 200, 0.3, 10, 500))
    logger.record_exchange(HttpExchange("POST", "/v1/completions", 422, 0.1, 20, 50))
    seen = logger.snapshot()
    assert seen.count("vllm:sleep_mode_operation_duration_seconds") == 2
    assert seen.count("vllm:rl_weight_update_operation_duration_seconds") == 1
    assert seen.value("http_requests", "2xx", "/v1/completions") == 1
    assert seen.value("http_requests", "4xx") == 1
    assert seen.value("http_request_size_bytes") == 30
    assert 'http_response_size_bytes_count{handler="/v1/completions"} 2.0' in logger.exposition()


def test_custom_bounds_replace_those_of_their_metric() -> None:
    setup = MetricsSetup(model_name="m", custom_buckets={"time_to_first_token": [1, 2]})
    seen = PrometheusStatLogger(setup).snapshot()
    assert seen.find("vllm:time_to_first_token_seconds").bounds == (1.0, 2.0)
    assert len(seen.find("vllm:request_queue_time_seconds").bounds) == 21


def test_the_reasons_are_those_of_the_scheduler() -> None:
    """Two lists, because the frontend does not import the engine."""
    assert set(UNUSED_REASONS) == set(get_args(Unused))
