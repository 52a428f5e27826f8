"""Charts: what is drawn stays inside the picture, and the page needs nothing but itself."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.bench.plots import HEIGHT, WIDTH, Axis, Chart, Series, check_plot_path, to_html, to_svg, write_plot
from quire.errors import ConfigError

values = st.just(0.0) | st.floats(1e-6, 1e9)
points = st.lists(st.tuples(values, values), min_size=1, max_size=30).map(sorted)


@given(st.lists(points, min_size=1, max_size=7), st.booleans(), st.booleans(), st.none() | values)
def test_everything_is_inside(
    lines: list[list[tuple[float, float]]], is_log: bool, steps: bool, bound: float | None
) -> None:
    series = [Series(f"line {i} <&>", line, is_stepped=steps, has_marks=True) for i, line in enumerate(lines)]
    chart = Chart('a "title" <b>', "x", "y", series, x_is_log=is_log, y_line=None if bound is None else ("b", bound))
    svg = ElementTree.fromstring(to_svg(chart))  # it is XML: everything is escaped
    circles = svg.findall("circle")
    assert len(circles) == sum(len(line) for line in lines)
    for circle in circles:
        assert 0 <= float(circle.get("cx", "nan")) <= WIDTH
        assert 0 <= float(circle.get("cy", "nan")) <= HEIGHT


@given(st.lists(values, min_size=1, max_size=20), st.booleans())
def test_ticks_enclose_the_values_and_are_few(found: list[float], is_log: bool) -> None:
    axis = Axis(found, 0, 100, is_log=is_log, from_zero=False)
    assert axis.ticks == sorted(axis.ticks)
    assert 2 <= len(axis.ticks) <= 40
    assert axis.ticks[0] <= min(found) * (1 + 1e-9) + 1e-12
    assert axis.ticks[-1] >= max(found) * (1 - 1e-9)
    assert all(-1e-6 <= axis.place(value) <= 100 + 1e-6 for value in found)


CHARTS = [
    Chart(
        "One",
        "s",
        "ms",
        [Series("p50", [(1, 2.0), (2, 3.0), (8, 4.0)], has_marks=True)],
        x_is_log=True,
        y_line=("max", 3),
    ),
    Chart("Two", "s", "n", [Series("a", [(0, 0.0), (2, 3.0)], is_stepped=True), Series("b", [(0, 1.0)])]),
]


def test_the_page_fetches_nothing() -> None:
    page = to_html("A <title>", "a report & more", CHARTS)
    assert re.findall(r"(?:src|href)=|https?://|<script|@import|url\(", page) == []
    assert "A &lt;title&gt;" in page
    assert "a report &amp; more" in page
    assert page.count("<svg") == 2


def test_a_plot_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.html", "b.png"):
        check_plot_path(tmp_path / name)
        write_plot(tmp_path / name, "title", "report", CHARTS)
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'quire[plot]', or ask for an .html file")):
        check_plot_path(tmp_path / "a.png")
    check_plot_path(tmp_path / "a.html")


@pytest.mark.parametrize(("name", "words"), [("a.svg", "must end in"), ("no/a.html", "no directory")])
def test_paths_that_cannot_be(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_plot_path(tmp_path / name)
