"""Charts in files: an HTML page that needs nothing else, or a PNG drawn by matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from html import escape
from pathlib import Path

from quire.cli.bench.charts import Chart, to_svg
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
    """Before anything is measured: whether a plot can be written there. Raises ConfigError."""
    if path.suffix.lower() not in (".html", ".png"):
        raise ConfigError(f"--plot {path}: its name must end in .html or .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.parent}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs matplotlib: pip install 'quire[plot]', or ask for an .html file")


def write_plot(path: Path, title: str, report: str, charts: Sequence[Chart]) -> None:
    """Write the charts in the form that the file's name asks for. Raises ConfigError."""
    try:
        if path.suffix.lower() == ".png":
            _write_png(path, title, charts)
        else:
            path.write_text(to_html(title, report, charts), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--plot {path}: {e.strerror or e}") from None


def to_html(title: str, report: str, charts: Sequence[Chart]) -> str:
    """One page with everything in it: no script, no font, nothing fetched."""
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
