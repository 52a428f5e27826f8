"""Charts of a run or a sweep, in an HTML page that needs nothing else, or a PNG that matplotlib draws.

`run_charts` and `sweep_charts` decide what is drawn; `to_svg` only scales and places it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from quire.cli.bench.outcomes import Level, LoadResult, ServiceLevel, in_flight
from quire.errors import ConfigError
from quire.resolve import resolve

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #6e7781; --grid: #d8dee4; --page: #fff;
  --c0: #0969da; --c1: #bc4c00; --c2: #8250df; --c3: #1a7f37; --c4: #bf3989; --c5: #7d4e00; --bound: #cf222e }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #8d96a0; --grid: #30363d; --page: #0d1117;
  --c0: #4493f8; --c1: #f0883e; --c2: #ab7df8; --c3: #3fb950; --c4: #db61a2; --c5: #d29922; --bound: #f85149 } }
body { margin: 2rem auto; max-width: 1020px; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--page) }
pre { overflow-x: auto; font-size: 13px } figure { margin: 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 1.5rem }
svg { width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); text-anchor: middle }
svg text.title { font-size: 14px; font-weight: 600; fill: var(--ink) }
svg text.end { text-anchor: end } svg text.start { text-anchor: start }
.grid { stroke: var(--grid); stroke-width: 1 }
.line { fill: none; stroke-width: 2 } .mark { stroke: none }
.bound { stroke: var(--bound); stroke-width: 1.5; stroke-dasharray: 5 4 }
""" + "\n".join(f".line.c{i} {{ stroke: var(--c{i}) }} .mark.c{i} {{ fill: var(--c{i}) }}" for i in range(6))


def check_plot_path(path: Path) -> None:
    """Checks that a plot can be written to `path`, before anything is measured. Raises ConfigError."""
    if path.suffix.lower() not in (".html", ".png"):
        raise ConfigError(f"--plot {path}: its name must end in .html or .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.parent}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs matplotlib: pip install 'quire[plot]', or ask for an .html file")


def write_plot(path: Path, title: str, report: str, charts: Sequence[Chart]) -> None:
    """Writes the charts in the form that the file's name asks for. Raises ConfigError."""
    try:
        if path.suffix.lower() == ".png":
            _write_png(path, title, charts)
        else:
            path.write_text(to_html(title, report, charts), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--plot {path}: {e.strerror or e}") from None


def to_html(title: str, report: str, charts: Sequence[Chart]) -> str:
    """Returns one page with everything in it: no script, no font, nothing fetched."""
    figures = "\n".join(f"<figure>{to_svg(chart)}</figure>" for chart in charts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<pre>{escape(report)}</pre>\n<div class="charts">\n{figures}\n</div>\n</body>\n</html>\n'
    )


def _write_png(path: Path, title: str, charts: Sequence[Chart]) -> None:
    figure_class = resolve("matplotlib.figure:Figure")
    num_rows = max(1, -(-len(charts) // 2))
    figure = figure_class(figsize=(11, 3.6 * num_rows), layout="constrained")
    figure.suptitle(title)
    for number, chart in enumerate(charts):
        axes = figure.add_subplot(num_rows, 2, number + 1)
        for series in chart.series:
            xs, ys = [x for x, _ in series.points], [y for _, y in series.points]
            style = {"drawstyle": "steps-post"} if series.is_stepped else {}
            axes.plot(xs, ys, marker="o" if series.has_marks else None, label=series.name or None, **style)
        if chart.y_line is not None:
            axes.axhline(chart.y_line[1], linestyle="--", color="tab:red", label=chart.y_line[0])
        if chart.x_is_log:
            axes.set_xscale("log", base=2)
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(chart.series) > 1:
            axes.legend()
    figure.savefig(path, dpi=110)


MAX_POINTS = 400
"""Largest number of points of a line; others are left out evenly."""


def run_charts(level: Level) -> list[Chart]:
    """Returns the charts of one load: latency distributions, requests in flight and tokens per second over its time."""
    result, start = level.result, level.result.start_s
    answered = result.answered
    gaps = [gap for o in answered for gap in o.timing.gaps_s]
    flight = [(moment - start, float(count)) for moment, count in in_flight(result.outcomes)]
    charts = [
        _distribution("Time to first token", [o.ttft_s for o in answered if o.ttft_s is not None]),
        _distribution("Between tokens", gaps),
        _distribution("End to end", [o.e2e_s for o in answered]),
        Chart("Requests in flight", "s", "requests", [Series("in flight", _thin(flight), is_stepped=True)]),
        Chart("Output", "s", "tokens/s", [Series("tokens/s", _token_rate(result))]),
        Chart(
            "Latency of each request",
            "s (intended send time)",
            "ms",
            [
                Series("first token", _thin(_over_time(result, "ttft_s"))),
                Series("end to end", _thin(_over_time(result, "e2e_s"))),
            ],
        ),
    ]
    return [chart for chart in charts if not chart.is_empty]


def sweep_charts(levels: Sequence[Level], slo: ServiceLevel) -> list[Chart]:
    """Returns the charts of several loads: latencies and throughput over the offered load, and one over the other."""
    by_rate = any(level.rate is not None for level in levels)
    levels = [level for level in levels if not by_rate or level.rate is not None]
    x_label = "offered requests/s" if by_rate else "concurrency"
    ordered = sorted(levels, key=lambda level: _offered(level, by_rate))

    def line(name: str, *keys: str) -> Series:
        points = []
        for level in ordered:
            value: Any = level.figures
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                points.append((_offered(level, by_rate), float(value)))
        return Series(name, points, has_marks=True)

    def latency(title: str, key: str, metric: str) -> Chart:
        bound = slo.bounds_ms.get(metric)
        return Chart(
            title,
            x_label,
            "ms",
            [line(q, key, q) for q in ("p50", "p90", "p99")],
            x_is_log=not by_rate,
            y_line=None if bound is None else (f"{metric} {bound:g} ms", bound),
        )

    output = Series(
        "p50",
        [
            (level.figures["output_tokens_per_s"], level.figures["tpot_ms"]["p50"])
            for level in ordered
            if level.figures["tpot_ms"]
        ],
        has_marks=True,
    )
    charts = [
        latency("Time to first token", "ttft_ms", "ttft"),
        latency("Time per output token", "tpot_ms", "tpot"),
        latency("End to end", "e2e_ms", "e2e"),
        Chart("Output", x_label, "tokens/s", [line("tokens/s", "output_tokens_per_s")], x_is_log=not by_rate),
        Chart("Answered", x_label, "requests/s", _answered(line, by_rate, ordered), x_is_log=not by_rate),
        Chart("Time per token over throughput", "output tokens/s", "ms per token", [output]),
    ]
    if slo:
        charts.append(
            Chart(f"Within {slo}", x_label, "share", [line("share", "goodput", "share")], x_is_log=not by_rate)
        )
    return [chart for chart in charts if not chart.is_empty]


def _answered(line: Any, by_rate: bool, ordered: Sequence[Level]) -> list[Series]:
    series = [line("answered", "requests_per_s"), line("within the objective", "goodput", "requests_per_s")]
    if by_rate:
        series.append(Series("offered", [(_offered(level, True), _offered(level, True)) for level in ordered]))
    return [s for s in series if s.points]


def _offered(level: Level, by_rate: bool) -> float:
    return float((level.rate if by_rate else level.concurrency) or 0)


def _distribution(title: str, seconds: Sequence[float]) -> Chart:
    """Returns the cumulative distribution of the values."""
    ordered = sorted(seconds)
    points = [(value * 1e3, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]
    return Chart(
        title, "ms", "share of requests" if title != "Between tokens" else "share", [Series("", _thin(points))]
    )


def _over_time(result: LoadResult, attribute: str) -> list[tuple[float, float]]:
    found = [(o.intended_s - result.start_s, getattr(o, attribute)) for o in result.answered]
    return sorted((moment, value * 1e3) for moment, value in found if value is not None)


def _token_rate(result: LoadResult, num_bins: int = 40) -> list[tuple[float, float]]:
    """Returns tokens per second in equal parts of the load. A request's tokens are spread evenly over its chunks."""
    if result.wall_s <= 0:
        return []
    width = result.wall_s / num_bins
    bins = [0.0] * num_bins
    for timing in (o.timing for o in result.answered):
        if timing.first_token_s is None:
            continue
        weight = timing.num_output_tokens / (1 + len(timing.gaps_s))
        moment = timing.first_token_s
        for gap in (0.0, *timing.gaps_s):
            moment += gap
            bins[min(num_bins - 1, max(0, int((moment - result.start_s) / width)))] += weight
    return [((i + 0.5) * width, count / width) for i, count in enumerate(bins)]


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MAX_POINTS:
        return list(points)
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(i * step)] for i in range(MAX_POINTS)]


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
        """True if no series has a point."""
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
        """Returns the pixel of `value`."""
        low, high, at = self._low, self._high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self._start + (at - low) / (high - low) * (self._end - self._start)


def to_svg(chart: Chart) -> str:
    """Returns the chart as an `<svg>` element; its colours are classes of the page's style sheet."""
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
    """Returns about five round numbers around [low, high]."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of two, or of ten where there would be many."""
    base = 2.0 if high / low <= 1024 else 10.0
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    return [base**i for i in range(first, last + 1)]


def _number(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
