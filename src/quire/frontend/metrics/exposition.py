"""A snapshot as text: Prometheus' format 0.0.4, and OpenMetrics 1.0.0, which has exemplars.

What is the same in every scrape (name and labels of a line) is written once and kept: a scrape is mostly numbers.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from quire.frontend.metrics.snapshot import Exemplar, Family, MetricsSnapshot, Series

Format = Literal["text", "openmetrics"]
CONTENT_TYPES: dict[Format, str] = {
    "text": "text/plain; version=0.0.4; charset=utf-8",
    "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
MAX_EXEMPLAR_CHARS = 128
"""Of an exemplar's label names and values together, as OpenMetrics limits them."""
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_UNREADABLE = re.compile(r"[^\x20-\x7e]|[\\\"{}#,=]")
"""What parsers of exemplars stumble over, escaped or not."""
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def choose_format(accept: str) -> Format:
    """What a scraper that sends this Accept header is given: OpenMetrics only if it asks for it."""
    for part in accept.split(","):
        media_type, *params = (piece.strip().lower() for piece in part.split(";"))
        if media_type == "application/openmetrics-text" and "q=0" not in params:
            versions = [param for param in params if param.startswith("version=")]
            if not versions or versions[0] in ("version=1.0.0", "version=0.0.1"):
                return "openmetrics"
    return "text"


class Exposition:
    """Writes snapshots of one process. Remembers the constant parts of every line it has written."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, bool], str] = {}
        self._prefixes: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def write(self, snapshot: MetricsSnapshot, format: Format = "text") -> str:
        """All of it, without the end mark of OpenMetrics: other collectors may follow."""
        lines: list[str] = []
        is_openmetrics = format == "openmetrics"
        for family in snapshot.families:
            head = self._heads.get((family.name, is_openmetrics))
            if head is None:
                head = self._heads[family.name, is_openmetrics] = make_head(family, is_openmetrics)
            lines.append(head)
            for series in family.series:
                prefixes = self._get_prefixes(family, series)
                if family.kind in ("histogram", "summary"):
                    _write_observations(lines, family, series, prefixes, is_openmetrics)
                else:
                    lines.append(f"{prefixes[0]}{format_value(series.value)}\n")
        return "".join(lines)

    def _get_prefixes(self, family: Family, series: Series) -> list[str]:
        key = family.name, series.labels
        prefixes = self._prefixes.get(key)
        if prefixes is None:
            prefixes = make_prefixes(family, series.labels)
            if len(self._prefixes) < 100_000:
                self._prefixes[key] = prefixes
        return prefixes


def make_head(family: Family, is_openmetrics: bool) -> str:
    """The two lines before a family's series."""
    name = family.name + ("_total" if family.kind == "counter" and not is_openmetrics else "")
    text = family.help.translate(_ESCAPES if is_openmetrics else _HELP_ESCAPES)
    return f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n"


def make_prefixes(family: Family, labels: tuple[str, ...]) -> list[str]:
    """Everything of a series' lines that stands before the number: buckets, then sum and count."""
    pairs = [f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(family.label_names, labels, strict=True)]
    own = "{" + ",".join(pairs) + "}" if pairs else ""
    name = family.name
    if family.kind == "counter":
        return [f"{name}_total{own} "]
    if family.kind == "gauge":
        return [f"{name}{own} "]
    ends = [f"{name}_sum{own} ", f"{name}_count{own} "]
    if family.kind == "summary":
        return ends
    before = "".join(f"{pair}," for pair in pairs)
    bounds = [*(format_value(bound) for bound in family.bounds), "+Inf"]
    return [f'{name}_bucket{{{before}le="{bound}"}} ' for bound in bounds] + ends


def _write_observations(
    lines: list[str], family: Family, series: Series, prefixes: list[str], with_exemplars: bool
) -> None:
    total = 0
    for bucket, count in enumerate(series.counts):
        total += count
        if family.kind == "histogram":
            exemplar = series.exemplars.get(bucket) if with_exemplars else None
            lines.append(f"{prefixes[bucket]}{total}.0{format_exemplar(exemplar)}\n")
    lines.append(f"{prefixes[-2]}{format_value(series.value)}\n")
    lines.append(f"{prefixes[-1]}{total}.0\n")


def format_value(value: float) -> str:
    """A number as Prometheus reads it: 1.0, 0.25, +Inf."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def format_exemplar(exemplar: Exemplar | None) -> str:
    """What follows a bucket's number."""
    if exemplar is None:
        return ""
    room = MAX_EXEMPLAR_CHARS
    pairs = []
    for name, value in exemplar.labels.items():
        value = _UNREADABLE.sub("_", value[: max(0, room - len(name))])
        room -= len(name) + len(value)
        pairs.append(f'{name}="{value}"')
    return f" # {{{','.join(pairs)}}} {format_value(exemplar.value)} {exemplar.timestamp:.3f}"
