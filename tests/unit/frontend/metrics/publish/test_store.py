"""Events counted together are counted as one by one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from operator import attrgetter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.metrics.catalog.spec import MetricSpec, each
from quire.frontend.metrics.collect.events import RequestOwner
from quire.frontend.metrics.publish.store import MetricsStore

BOUNDS = {"sizes": (1.0, 2.0, 5.0)}


class Event(msgspec.Struct):
    """Something with numbers of every kind."""

    size: float | None = None
    sizes: list[float] = []
    kind: str = "a"
    owner: RequestOwner | None = None


def rows(kind: Any, **fields: Any) -> tuple[MetricSpec, ...]:
    """The ways a row can read its events."""

    def row(name: str, **ways: Any) -> MetricSpec:
        return MetricSpec(name=f"{kind}_{name}", kind=kind, help="", source=Event, **ways, **fields)

    samples = row("samples", labels=("kind",), known=each("ab"), samples=lambda e: [((e.kind,), s) for s in e.sizes])
    return row("value", value=attrgetter("size")), row("values", values=attrgetter("sizes")), samples


HISTOGRAMS = (
    *rows("histogram", family="sizes", has_owners=True),
    MetricSpec(
        name="histogram_counted",
        kind="histogram",
        help="",
        source=Event,
        counted=lambda event: Counter(event.sizes),
        family="sizes",
    ),
)
SPECS = (*rows("counter"), *rows("gauge"), *rows("summary"), *HISTOGRAMS)
NUMBERS = st.integers(0, 8).map(lambda number: number / 2)
EVENTS = st.builds(
    Event,
    st.none() | NUMBERS,
    st.lists(NUMBERS, max_size=12),
    st.sampled_from("ab"),
    st.sampled_from([None, RequestOwner("r")]),
)


def make() -> MetricsStore:
    return MetricsStore(SPECS, {"model_name": "m"}, BOUNDS, clock=lambda: 1.0)


@given(st.lists(EVENTS, max_size=8), st.integers(1, 4))
def test_in_batches_or_one_by_one(events: list[Event], batch_size: int) -> None:
    one_by_one, together = make(), make()
    for event in events:
        one_by_one.record_all([event])
    for start in range(0, len(events), batch_size):
        together.record_all(events[start : start + batch_size])
    assert together.snapshot() == one_by_one.snapshot()


@given(st.lists(EVENTS, max_size=8))
def test_all_ways_of_reading_agree(events: list[Event]) -> None:
    store = make()
    store.record_all(events)
    seen = store.snapshot()
    sizes = [size for event in events for size in event.sizes]
    single = [event.size for event in events if event.size is not None]
    for kind in ("counter", "histogram", "summary"):
        assert seen.value(f"vllm:{kind}_value") == sum(single)
        assert seen.value(f"vllm:{kind}_values") == sum(sizes)
        labelled = [seen.value(f"vllm:{kind}_samples", label) for label in "ab"]
        assert labelled == [sum(sum(event.sizes) for event in events if event.kind == label) for label in "ab"]
    for name, values in (("value", single), ("values", sizes), ("counted", sizes)):
        expected = [sum(low < value <= high for value in values) for low, high in ((-1, 1), (1, 2), (2, 5))]
        assert seen.find(f"vllm:histogram_{name}").series[0].counts == [*expected, 0]


@given(
    st.lists(st.integers(-8, 8).map(lambda number: number / 2), min_size=1, max_size=5, unique=True).map(sorted),
    st.lists(st.none() | st.integers(-5, 5) | st.integers(-21, 21).map(lambda number: number / 4)),
)
def test_each_value_is_in_its_bucket(bounds: list[float], sizes: list[float | None]) -> None:
    (spec,) = rows("histogram", family="sizes", has_owners=True)[:1]
    store = MetricsStore([spec], {"model_name": "m"}, {"sizes": tuple(bounds)})
    store.record_all([Event(size, owner=RequestOwner(str(number))) for number, size in enumerate(sizes)])
    (family,) = store.snapshot().families
    (series,) = family.series
    edges = [-math.inf, *bounds, math.inf]
    latest = {}
    for bucket, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = [number for number, size in enumerate(sizes) if size is not None and low < size <= high]
        assert series.counts[bucket] == len(inside)
        if inside:
            latest[bucket] = str(inside[-1])
    assert {bucket: exemplar.labels["request_id"] for bucket, exemplar in series.exemplars.items()} == latest
    assert [str(bound) for bound in family.bounds] == [str(bound) for bound in bounds], "they are shown as floats"


def test_an_exemplar_is_the_latest_of_its_bucket() -> None:
    store = make()
    sizes = {"first": 0.5, "second": 0.75, "third": 3.0}
    store.record_all([Event(size, owner=RequestOwner(name)) for name, size in sizes.items()])
    store.record_all([Event(0.25)])  # without an owner
    exemplars = store.snapshot().find("vllm:histogram_value").series[0].exemplars
    assert {bucket: (e.value, e.labels["request_id"]) for bucket, e in exemplars.items()} == {
        0: (0.75, "second"),
        2: (3.0, "third"),
    }


def test_nothing_is_nothing() -> None:
    store = make()
    before = store.snapshot()
    store.record_all([])
    store.record_all([object()])
    assert store.snapshot() == before


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_row_says_when_it_has_changed(spec: MetricSpec) -> None:
    store = MetricsStore([spec], {"model_name": "m"}, BOUNDS)
    (row,) = store.rows
    store.record_all([Event(size=1.0, sizes=[1.0])])
    assert row.changes > 0
