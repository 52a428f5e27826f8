from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from quire.frontend.metrics.collect.facts import AdapterLoad
from quire.frontend.metrics.publish.exposition import CONTENT_TYPES, Exposition, Format, choose_format
from quire.frontend.metrics.publish.snapshot import Exemplar, Family, Series, format_value
from quire.frontend.metrics.server_metrics import END_MARK, ProcessMetrics

from ..books import OPERATIONS, Books

PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        ("", "text"),
        ("*/*", "text"),
        ("text/plain", "text"),
        (PROMETHEUS_ACCEPT, "openmetrics"),
        ("application/openmetrics-text", "openmetrics"),
        ("application/openmetrics-text; version=2.0.0", "text"),
        ("application/openmetrics-text;version=1.0.0;q=0", "text"),
    ],
)
def test_the_scraper_chooses(accept: str, format: str) -> None:
    assert choose_format(accept) == format
    assert CONTENT_TYPES[choose_format(accept)].startswith(("text/plain", "application/openmetrics-text"))


@given(st.text(max_size=20), st.floats(), st.text(max_size=20))
def test_any_label_and_any_value_come_back(label: str, value: float, request_id: str) -> None:
    exemplars = {0: Exemplar(0.5, 12.0, {"request_id": request_id})}
    families = [
        Family("a", "gauge", "Help\nwith \\ two lines.", ("x",), series=[Series((label,), value)]),
        Family(
            "b", "histogram", 'A "quote".', ("x",), (1.0, 2.5), series=[Series((label,), 3.5, [1, 0, 2], 0, exemplars)]
        ),
    ]
    exposition = Exposition()
    for text, parse in (
        (exposition.write(families), parse_text),
        (exposition.write(families, "openmetrics") + END_MARK, parse_openmetrics),
    ):
        gauge, histogram = parse(text)
        assert gauge.documentation == "Help\nwith \\ two lines."
        (sample,) = gauge.samples
        assert sample.labels == {"x": label}
        assert sample.value == value or value != value
        counts = {s.labels["le"]: s.value for s in histogram.samples if "le" in s.labels}
        assert counts == {"1.0": 1, "2.5": 1, "+Inf": 3}
        if parse is parse_openmetrics:
            shown = histogram.samples[0].exemplar.labels["request_id"]
            assert len(shown) == len(request_id)
            assert all(a in (b, "_") for a, b in zip(shown, request_id, strict=True))


@given(st.lists(st.sampled_from((*OPERATIONS, "step", "adapter", "text", "openmetrics"))))
def test_what_is_not_written_again_would_have_been_the_same(script: list[Callable[[Books], None] | Format]) -> None:
    """Scrapes at any moments, against a writer that remembers nothing."""
    books = Books()
    for action in [*script, "text", "openmetrics"]:
        match action:
            case "step":
                books.note_step(num_running=len(script))
            case "adapter":
                books.adapters = AdapterLoad({"a": 1}) if books.adapters == AdapterLoad() else AdapterLoad()
            case "text" | "openmetrics":
                written = books.metrics.exposition(action)
                assert written == Exposition().write(books.metrics.snapshot().families, action)
            case operation:
                operation(books)
        books.now += 0.25


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1.0"), (0.25, "0.25"), (float("inf"), "+Inf"), (-float("inf"), "-Inf"), (float("nan"), "NaN")],
)
def test_a_number_is_written_in_the_format(value: float, text: str) -> None:
    assert format_value(value) == text


def test_the_process_speaks_both_formats() -> None:
    process = ProcessMetrics()
    assert "python_info" in {family.name for family in parse_text(process.exposition())}
    text = process.exposition("openmetrics")
    assert text.endswith(END_MARK)
    names = {family.name for family in parse_openmetrics(text)}
    assert {"python_info", "process_resident_memory_bytes"} <= names


@pytest.mark.parametrize("format", ["text", "openmetrics"])
def test_one_start_time_stands_for_all_created_samples(format: Format) -> None:
    """docs/metrics.md says why there are none, and what to read instead."""
    books, process = Books(), ProcessMetrics()
    for operation in (Books.receive, Books.accept, Books.yield_token, Books.finish):
        operation(books)
    text = books.metrics.exposition(format) + process.exposition(format)
    assert "_created" not in text
    (start,) = (float(line.split()[-1]) for line in text.splitlines() if line.startswith("process_start_time_seconds "))
    assert 0 < start <= time.time()
