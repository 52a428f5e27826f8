"""The exporter: every row has a series from the start, and takes what steps bring."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from quire.frontend.metrics.catalog import METRICS, PREFIX
from quire.frontend.metrics.prometheus import PrometheusStatLogger
from quire.frontend.metrics.stats import FinishedRequestStats, IterationStats
from quire.wire.engine_core import FinishReason
from quire.wire.stats import PrefillStats, PrefixCacheStats, SchedulerStats


def samples(logger: PrometheusStatLogger) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(logger.exposition().decode())
    found = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "m" for sample in found)
    return {(s.name, s.labels.get("finished_reason", "")): s.value for s in found if "_bucket" not in s.name}


def test_steps_are_counted() -> None:
    logger = PrometheusStatLogger("m")
    names = {name for name, _ in samples(logger)}
    for spec in METRICS:
        if not spec.labels:
            assert {PREFIX + spec.name, f"{PREFIX}{spec.name}_total", f"{PREFIX}{spec.name}_count"} & names
    finished = FinishedRequestStats(
        request_id="x", finish_reason=FinishReason.LENGTH, e2e_latency=2.0, num_prompt_tokens=5,
        num_generation_tokens=3, max_tokens_param=3, queued_time=0.0, prefill_time=0.0,
        decode_time=0.0, inference_time=0.0,
        mean_time_per_output_token=0.0, num_cached_tokens=0, num_preemptions=0, is_corrupted=False,
    )  # fmt: skip
    for _ in range(2):
        logger.record(
            SchedulerStats(
                num_running_reqs=3,
                num_waiting_reqs=1,
                num_skipped_waiting_reqs=1,
                kv_cache_usage=0.25,
                prefix_cache_stats=PrefixCacheStats(requests=1, queries=10, hits=4),
            ),
            IterationStats(
                num_generation_tokens=3,
                prompt_tokens=PrefillStats(num_prompt_tokens=5, num_computed_tokens=5),
                time_to_first_tokens=[0.5],
                finished_requests=[finished],
            ),
        )
    got = samples(logger)
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 20, "prefix_cache_hits_total": 8, "prompt_tokens_total": 10,
        "generation_tokens_total": 6, "time_to_first_token_seconds_sum": 1.0, "e2e_request_latency_seconds_count": 2,
        "e2e_request_latency_seconds_sum": 4.0,
    }  # fmt: skip
    assert {name: got[PREFIX + name, ""] for name in expected} == expected
    assert got[PREFIX + "request_success_total", "length"] == 2
