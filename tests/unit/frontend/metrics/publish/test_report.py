"""Several processes as one: what is added, what is not, and that the laws hold whatever the processes do, and die."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.metrics.collect.facts import AdapterLoad, FrontendFacts, close_facts, merge_facts
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.collect.saturation import Saturation
from quire.frontend.metrics.publish.report import ProcessReport, merge_reports
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.testing.metrics_audit import MetricsAudit

from ..books import OPERATIONS, Books

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
