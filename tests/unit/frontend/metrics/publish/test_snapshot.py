"""Merging: several processes in front of one engine, as one."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.publish.snapshot import Exemplar, Family, MetricsSnapshot, Series, merge_snapshots
from quire.wire.stats import SchedulerStats


def snapshot(tokens: int, latencies: list[float], running: int, stamp: float) -> MetricsSnapshot:
    logger = PrometheusStatLogger(MetricsSetup(model_name="m"), clock=lambda: stamp)
    logger.record(
        SchedulerStats(num_running_reqs=running),
        IterationStats(num_generation_tokens=tokens, inter_token_latencies=Counter(latencies)),
    )
    return logger.snapshot()


def test_counters_add_up_and_gauges_are_the_latest() -> None:
    merged = merge_snapshots([snapshot(3, [0.5], 9, 2.0), snapshot(4, [0.5, 30.0], 5, 1.0)])
    assert merged.value("vllm:generation_tokens") == 7
    assert merged.count("vllm:inter_token_latency_seconds") == 3
    assert merged.value("vllm:inter_token_latency_seconds") == 31.0
    assert merged.value("vllm:num_requests_running") == 9, "both speak of one engine; the later stamp is right"


def test_what_was_merged_stays_as_it_was() -> None:
    one, two = snapshot(3, [0.5], 9, 2.0), snapshot(4, [0.5], 5, 1.0)
    before = msgspec.msgpack.encode((one, two))
    merge_snapshots([one, two])
    assert msgspec.msgpack.encode((one, two)) == before


def test_a_snapshot_crosses_a_process_boundary() -> None:
    seen = snapshot(3, [0.5], 9, 2.0)
    exemplar = Exemplar(0.5, 1.0, {"request_id": "x"})
    seen.find("vllm:inter_token_latency_seconds").series[0].exemplars[3] = exemplar
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(seen), type=MetricsSnapshot) == seen


def test_the_later_exemplar_stays() -> None:
    def histogram(timestamp: float) -> MetricsSnapshot:
        series = Series(("m",), 1.0, [1, 0], exemplars={0: Exemplar(1.0, timestamp, {"request_id": str(timestamp)})})
        return MetricsSnapshot([Family("h", "histogram", "", ("model_name",), (1.0,), series=[series])])

    merged = merge_snapshots([histogram(5.0), histogram(3.0)])
    assert merged.find("h").series[0].exemplars[0].timestamp == 5.0


def test_two_versions_are_not_merged() -> None:
    one = MetricsSnapshot([Family("h", "gauge", "", ("a",))])
    two = MetricsSnapshot([Family("h", "gauge", "", ("b",))])
    with pytest.raises(ValueError, match="mean different things by the metric h"):
        merge_snapshots([one, two])


values = st.builds(
    snapshot,
    st.integers(0, 9),
    st.lists(st.sampled_from((0.25, 0.5, 4.0)), max_size=3),
    st.integers(0, 9),
    st.floats(0, 10),
)


@given(st.lists(values, min_size=1, max_size=4), st.randoms())
def test_neither_order_nor_grouping_matters(snapshots: list[MetricsSnapshot], random: object) -> None:
    shuffled = list(snapshots)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    nested = merge_snapshots(
        [merge_snapshots(shuffled[:2]), *([merge_snapshots(shuffled[2:])] if shuffled[2:] else [])]
    )
    assert nested == merge_snapshots(snapshots)
