from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from quire.cli.server_watch import Metrics, growth, quantile, quantile_between


def test_it_reads_what_the_library_writes() -> None:
    registry = CollectorRegistry()
    counter = Counter("vllm:things", "Of a\nkind.", ["who"], registry=registry)
    histogram = Histogram("vllm:x_seconds", "Time.", ["who"], registry=registry, buckets=(0.1, 1.0, 10.0))
    counter.labels('a"b\\c, le="7"').inc(3)
    counter.labels("two").inc(0.5)
    before = Metrics(generate_latest(registry).decode())
    for value in (0.05, 0.5, 0.6, 20.0):
        histogram.labels('x",le="0.1').observe(value)
    histogram.labels("two").observe(0.01)
    after = Metrics(generate_latest(registry).decode())
    assert after.total("vllm:things_total") == 3.5
    assert after.total("vllm:nothing") is None
    assert [count for _, count in after.buckets("vllm:x_seconds")] == [2, 4, 4, 5]
    assert after.buckets("vllm:nothing") == []
    assert quantile_between(before, after, "vllm:x_seconds", 0.4) == pytest.approx(0.1)
    assert growth(before, after, "vllm:x_seconds_count") == 5
    assert growth(after, before, "vllm:things_total") == 0
    assert growth(after, Metrics("vllm:things_total 2"), "vllm:things_total") == 2
    assert growth(before, after, "vllm:nothing") is None
    assert quantile_between(after, before, "vllm:x_seconds", 0.5) is None


@pytest.mark.parametrize("text", ["", "#\n", "a b c d", "{} 1", "x nope", "x{le=} 1", "\x00 1"])
def test_nonsense_is_passed_over(text: str) -> None:
    Metrics(text).total("x")


def test_quantiles_lie_in_the_bucket_of_the_true_one() -> None:
    rng = random.Random(1)
    bounds = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    for _ in range(200):
        values = sorted(rng.uniform(0, 5) for _ in range(rng.randint(1, 40)))
        buckets = [(bound, float(sum(value <= bound for value in values))) for bound in bounds]
        share = rng.random()
        found = quantile(buckets, share)
        assert found is not None
        true = values[max(0, -int(-share * len(values) // 1) - 1)]
        upper = next(bound for bound in bounds if bound >= true)
        lower = max([0.0, *(bound for bound in bounds if bound < true)])
        assert lower <= found <= upper
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0.0), (float("inf"), 2.0)], 0.5) == 1.0
