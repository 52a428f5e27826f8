"""What `quire bench serve --plot` shows: a run's distributions and course, or a sweep's curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.cli.bench.charts import Chart, Series
from quire.cli.bench.outcomes import Level, LoadResult, ServiceLevel, in_flight

MAX_POINTS = 400
"""Of a line; of more, every so-manieth is drawn."""


def run_charts(level: Level) -> list[Chart]:
    """Of one load: latency distributions, requests in flight and tokens per second over its time."""
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
    """Of several loads: latencies and throughput over what was offered, and one over the other."""
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
    """The share of values up to each."""
    ordered = sorted(seconds)
    points = [(value * 1e3, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]
    return Chart(
        title, "ms", "share of requests" if title != "Between tokens" else "share", [Series("", _thin(points))]
    )


def _over_time(result: LoadResult, attribute: str) -> list[tuple[float, float]]:
    found = [(o.intended_s - result.start_s, getattr(o, attribute)) for o in result.answered]
    return sorted((moment, value * 1e3) for moment, value in found if value is not None)


def _token_rate(result: LoadResult, num_bins: int = 40) -> list[tuple[float, float]]:
    """Tokens per second in each of some equal parts of the load. A chunk's tokens are spread evenly over the chunks."""
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
