from __future__ import annotations

from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.publish.reader import Counter, Gauge, Histogram, Vector, read_metrics
from quire.wire.stats import SchedulerStats, SpecDecodingStats


def test_every_kind() -> None:
    logger = PrometheusStatLogger(MetricsSetup(model_name="m"))
    spec = SpecDecodingStats(2)
    spec.record(2, 1)
    logger.record(
        SchedulerStats(num_running_reqs=2, spec_decoding_stats=spec),
        IterationStats(num_generation_tokens=5, inter_token_latencies={0.02: 1, 0.7: 1}),
    )
    labels = {"model_name": "m", "engine": "0"}
    metrics = {metric.name: metric for metric in read_metrics(logger.snapshot())}
    assert metrics["vllm:num_requests_running"] == Gauge("vllm:num_requests_running", labels, 2.0)
    tokens = metrics["vllm:generation_tokens"]
    assert tokens == Counter("vllm:generation_tokens", labels, 5)
    assert isinstance(tokens.value, int)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert metrics[name] == Vector(name, labels, [1, 0])
    latency = metrics["vllm:inter_token_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert (latency.count, latency.sum) == (2, 0.72)
    assert (latency.buckets["0.01"], latency.buckets["0.025"], latency.buckets["+Inf"]) == (0, 1, 2)


def test_ours_have_a_prefix_of_their_own() -> None:
    snapshot = PrometheusStatLogger(MetricsSetup(model_name="m")).snapshot()
    assert all(metric.name.startswith("vllm:") for metric in read_metrics(snapshot))
    assert any(metric.name == "quire_saturation" for metric in read_metrics(snapshot, "quire_"))
