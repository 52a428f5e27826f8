"""Charts as values, and as SVG. What is drawn is decided in `serve_charts.py`; here it is only scaled and placed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 46, 44
_NUM_COLOURS = 6


@dataclass(frozen=True)
class Series:
    """A line through points, in order of x. `is_stepped`: a value holds until the next."""

    name: str
    points: Sequence[tuple[float, float]]
    is_stepped: bool = False
    has_marks: bool = False


@dataclass(frozen=True)
class Chart:
    """Some series on common axes. `y_line`: a level drawn across, with its name (an objective)."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_is_log: bool = False
    y_line: tuple[str, float] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to see."""
        return not any(series.points for series in self.series)


class Axis:
    """Values on a line from `start` to `end`, in pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, is_log: bool, from_zero: bool) -> None:
        low, high = min(values), max(values)
        self.is_log = is_log and low > 0
        if from_zero and not self.is_log:
            low = min(low, 0.0)
        if high <= low:
            low, high = (low / 2, low * 2) if self.is_log else (low, low + 1.0)
        self._start, self._end = start, end
        self.ticks = _log_ticks(low, high) if self.is_log else _ticks(low, high)
        self._low, self._high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def place(self, value: float) -> float:
        """The pixel of `value`."""
        low, high, at = self._low, self._high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self._start + (at - low) / (high - low) * (self._end - self._start)


def to_svg(chart: Chart) -> str:
    """The chart as an `<svg>` element; its colours are classes that the page's style sheet defines."""
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points] + ([chart.y_line[1]] if chart.y_line else [])
    x_axis = Axis(xs, _LEFT, WIDTH - _RIGHT, is_log=chart.x_is_log, from_zero=False)
    y_axis = Axis(ys, HEIGHT - _BOTTOM, _TOP, is_log=False, from_zero=True)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        _text(WIDTH / 2, 16, chart.title, "title"),
        *_grid(x_axis, y_axis),
        _text((WIDTH + _LEFT) / 2, HEIGHT - 6, chart.x_label, "label"),
        f'<text class="label" transform="translate(12 {HEIGHT / 2}) rotate(-90)">{escape(chart.y_label)}</text>',
    ]
    if chart.y_line is not None:
        y = y_axis.place(chart.y_line[1])
        parts.append(f'<line class="bound" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(WIDTH - _RIGHT, y - 4, chart.y_line[0], "tick end"))
    for number, series in enumerate(chart.series):
        parts += _line(series, number % _NUM_COLOURS, x_axis, y_axis)
    if len(chart.series) > 1:
        parts += _legend(chart.series)
    return "\n".join([*parts, "</svg>"])


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.place(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(tick), "tick end"))
    for tick in x_axis.ticks:
        x = x_axis.place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, HEIGHT - _BOTTOM + 16, _number(tick), "tick"))
    return parts


def _line(series: Series, colour: int, x_axis: Axis, y_axis: Axis) -> list[str]:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
    if not places:
        return []
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for x, y in places[1:]:
        path += f"H{x:.1f}V{y:.1f}" if series.is_stepped else f"L{x:.1f} {y:.1f}"
    parts = [f'<path class="line c{colour}" d="{path}"/>']
    if series.has_marks:
        for (x, y), (value_x, value_y) in zip(places, series.points, strict=True):
            words = escape(f"{series.name}: {_number(value_y)} at {_number(value_x)}")
            parts.append(
                f'<circle class="mark c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{words}</title></circle>'
            )
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts, x = [], float(_LEFT)
    for number, item in enumerate(series):
        parts.append(f'<line class="line c{number % _NUM_COLOURS}" x1="{x}" x2="{x + 14}" y1="32" y2="32"/>')
        parts.append(_text(x + 18, 36, item.name, "tick start"))
        x += 30 + 6.2 * len(item.name)
    return parts


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers around [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of two, or of ten where there would be many."""
    base = 2.0 if high / low <= 1024 else 10.0
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    return [base**i for i in range(first, last + 1)]


def _number(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
