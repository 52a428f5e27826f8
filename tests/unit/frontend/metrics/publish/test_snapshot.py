"""Snapshots: what several processes counted, merged, and read as values."""

from __future__ import annotations

import collections
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.collect.facts import AdapterLoad, FrontendFacts, close_facts, merge_facts
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.collect.saturation import Saturation
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.publish.snapshot import (
    Counter,
    Exemplar,
    Family,
    Gauge,
    Histogram,
    MetricsSnapshot,
    ProcessReport,
    Series,
    Vector,
    merge_reports,
    merge_snapshots,
    read_metrics,
)
from quire.testing.metrics_audit import MetricsAudit
from quire.wire.stats import SchedulerStats, SpecDecodingStats

from ..books import OPERATIONS, Books


def snapshot(tokens: int, latencies: list[float], running: int, stamp: float) -> MetricsSnapshot:
    logger = PrometheusStatLogger(MetricsSetup(model_name="m"), clock=lambda: stamp)
    logger.record(
        SchedulerStats(num_running_reqs=running),
        IterationStats(num_generation_tokens=tokens, inter_token_latencies=collections.Counter(latencies)),
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


READER = Books()


def read(report: ProcessReport) -> MetricsSnapshot:
    return READER.metrics.read(report)


def facts(time: float = 1.0, **fields: object) -> FrontendFacts:
    return FrontendFacts(time=time, ledger=RequestLedger(), num_live={}, **fields)  # type: ignore[arg-type]


def test_what_is_added_and_what_is_not() -> None:
    one, two = Books("1"), Books("2")
    for books, number in ((one, 2), (two, 3)):
        for _ in range(number):
            books.receive()
            books.accept()
            books.yield_token()
        books.yield_token()
        books.finish()
    one.note_step(7)
    merged = merge_reports([one.take(), two.take()])
    seen = read(merged)
    assert seen.value("quire_requests_accepted") == 5
    assert seen.value("quire_requests_live", "waiting") == seen.value("quire_requests_live") == 3
    assert seen.value("vllm:generation_tokens") == 7
    assert seen.count("vllm:e2e_request_latency_seconds") == 2
    assert seen.value("vllm:num_requests_running") == 7, "of the engine, which both share"
    assert seen.value("quire_kv_blocks") == 10
    assert len(seen.find("quire_build_info").series) == 1
    assert seen.value("quire_api_processes", "answered") == 2
    assert {s.labels: s.value for s in merged.process.find("memory").series} == {("1",): 5.0, ("2",): 5.0}
    MetricsAudit().check(seen)


def test_a_report_crosses_a_process_boundary() -> None:
    books = Books()
    books.receive()
    books.reject()
    report = books.take()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ProcessReport) == report


def test_the_step_is_as_old_as_the_last_one_that_anybody_heard_of() -> None:
    starved = facts(100.0, oldest_arrival=40.0, last_step_time=30.0)
    served = facts(100.0, oldest_arrival=99.0, last_step_time=99.5)
    idle = facts(100.0)
    assert (starved.step_age_s, served.step_age_s, idle.step_age_s) == (60.0, 0.5, 0.0)
    assert merge_facts([starved, served, idle]).step_age_s == 0.5, "the engine works, on what others want"
    hung = [facts(100.0, oldest_arrival=arrival, last_step_time=30.0) for arrival in (40.0, 99.0)]
    assert merge_facts(hung).step_age_s == 60.0, "newcomers elsewhere do not hide a hang"


def test_whoever_put_the_engine_to_sleep_knows() -> None:
    merged = merge_facts([facts(9.0), facts(5.0, sleep_level=2, sleep_time=4.0), facts(8.0)])
    assert merged.sleep_level == 2
    assert merge_facts([merged, facts(1.0, sleep_level=0, sleep_time=6.0)]).sleep_level == 0


def test_the_last_word_on_the_core_counts() -> None:
    assert not merge_facts([facts(1.0, is_core_ready=True), facts(2.0, is_core_ready=False)]).is_core_ready
    assert merge_facts([facts(3.0, is_core_ready=True), facts(2.0, is_core_ready=False)]).is_core_ready
    assert not merge_facts([facts(2.0, is_core_ready=True), facts(2.0, is_core_ready=False)]).is_core_ready


def test_the_books_of_a_process_are_closed() -> None:
    books = Books()
    for _ in range(3):
        books.receive()
        books.accept()
    books.yield_token()
    books.receive()
    closed = books.take().close(is_lost=True)
    seen = read(closed)
    assert seen.value("quire_requests_lost") == 3
    assert seen.value("quire_requests_rejected", "lost") == 1
    assert (seen.value("quire_requests_live"), seen.value("quire_queue_tokens")) == (0, 0)
    assert seen.value("quire_engine_step_age_seconds") == 0
    assert seen.value("quire_api_processes") == 0
    assert seen.value("quire_api_processes_lost") == 1
    assert seen.value("vllm:generation_tokens") == 1
    assert closed.process.families == []
    assert read(books.take().close(is_lost=False)).value("quire_api_processes_lost") == 0


counts = st.dictionaries(st.sampled_from(("a", "b")), st.integers(0, 5))
times = st.integers(0, 8).map(float)
any_facts = st.builds(
    FrontendFacts,
    time=times,
    ledger=st.builds(RequestLedger, st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), counts, counts),
    num_live=counts,
    num_queued_tokens=st.integers(0, 5),
    core_counts=counts,
    is_core_ready=st.booleans(),
    oldest_arrival=st.none() | times,
    last_step_time=times,
    saturation=times.map(lambda x: Saturation(limit_tokens_per_s=x)),
    sleep_level=st.integers(0, 2),
    sleep_time=times,
    operations_in_flight=counts,
    adapters=st.builds(AdapterLoad, counts, counts),
    max_lora=st.integers(0, 5),
)


@given(st.lists(any_facts, min_size=1, max_size=5), st.integers(0, 5), st.randoms(use_true_random=False))
def test_neither_order_nor_grouping_of_facts_matters(
    found: list[FrontendFacts], split: int, random: random.Random
) -> None:
    expected = merge_facts(found)
    shuffled = list(found)
    random.shuffle(shuffled)
    parts = [part for part in (shuffled[:split], shuffled[split:]) if part]
    assert merge_facts([merge_facts(part) for part in parts]) == expected


@given(st.lists(any_facts, min_size=1, max_size=4))
def test_closing_all_is_closing_their_sum(found: list[FrontendFacts]) -> None:
    together = close_facts(merge_facts(found), is_lost=False)
    assert merge_facts([close_facts(one, is_lost=False) for one in found]) == together


actions = st.tuples(
    st.integers(0, 2), st.sampled_from((*(operation.__name__ for operation in OPERATIONS), "report", "scrape", "kill"))
)


@given(st.lists(actions, max_size=120))
def test_the_laws_hold_whatever_processes_do_and_die(script: list[tuple[int, str]]) -> None:
    processes = [Books(str(i)) for i in range(3)]
    last = [books.take() for books in processes]
    departed = [Books("gone").take().close(is_lost=False)]
    audit = MetricsAudit()
    for index, action in script:
        match action:
            case "report":
                last[index] = processes[index].take()
            case "scrape":
                last = [books.take() for books in processes]
                audit.check(read(merge_reports([*last, *departed])))
            case "kill":
                departed = [merge_reports([*departed, last[index].close(is_lost=True)])]
                processes[index] = Books(str(index))
                last[index] = processes[index].take()
                audit.check(read(merge_reports([*last, *departed])))
            case _:
                getattr(processes[index], action)()


def test_reports_of_two_versions_are_not_merged() -> None:
    one, two = Books().take(), Books().take()
    two.counted.families[0].label_names = ("other",)
    with pytest.raises(ValueError, match="one version"):
        merge_reports([one, two])


def test_every_kind_of_metric_is_in_a_snapshot() -> None:
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
