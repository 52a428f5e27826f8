"""Writes snapshots as text: Prometheus format 0.0.4, or OpenMetrics 1.0.0, which has exemplars.

Most series do not change between two scrapes: their lines are kept, and so is the text around the numbers of the
others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Literal

from quire.frontend.metrics.publish.snapshot import Exemplar, Family, Series, format_value
from quire.frontend.metrics.publish.store import CountedRow

Format = Literal["text", "openmetrics"]
CONTENT_TYPES: dict[Format, str] = {
    "text": "text/plain; version=0.0.4; charset=utf-8",
    "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
MAX_EXEMPLAR_CHARS = 128
"""Limit of OpenMetrics for the label names and values of an exemplar together."""
MAX_REMEMBERED = 1000
"""Number of vanished series of a family whose lines are kept."""
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_UNREADABLE = re.compile(r"[^\x20-\x7e]|[\\\"{}#,=]")
"""Characters that parsers of exemplars mishandle, escaped or not."""
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def choose_format(accept: str) -> Format:
    """Returns the format for a scraper that sends this Accept header: OpenMetrics only on request."""
    for part in accept.split(","):
        media_type, *params = (piece.strip().lower() for piece in part.split(";"))
        if media_type == "application/openmetrics-text" and "q=0" not in params:
            versions = [param for param in params if param.startswith("version=")]
            if not versions or versions[0] in ("version=1.0.0", "version=0.0.1"):
                return "openmetrics"
    return "text"


class Exposition:
    """Writes snapshots of one process. It keeps the text of each series, so a scrape costs as much as has changed since
    the last one."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, Format], _FamilyText] = {}

    def write(self, families: Iterable[Family], format: Format = "text") -> str:
        """Returns all families as text, without the end mark of OpenMetrics: other collectors may follow."""
        return "".join([self.write_family(family, format) for family in families])

    def write_family(self, family: Family, format: Format) -> str:
        """Returns one family as text."""
        written = self._families.get((family.name, format))
        if written is None:
            written = self._families[family.name, format] = _FamilyText(family, format == "openmetrics")
        return written.write(family)


class LiveExposition:
    """Writes metrics directly from the store, on the thread that counts. Unchanged ones are not looked at."""

    def __init__(self, rows: Iterable[CountedRow]) -> None:
        self._rows = list(rows)
        self._exposition = Exposition()
        self._written: dict[Format, list[tuple[int, str]]] = {}

    def write(self, format: Format) -> str:
        """Returns the present values of all metrics as text."""
        written = self._written.setdefault(format, [(-1, "")] * len(self._rows))
        parts = []
        for position, row in enumerate(self._rows):
            changes, text = written[position]
            if changes != row.changes:
                family = row.family()
                text = "" if family is None else self._exposition.write_family(family, format)
                written[position] = row.changes, text
            parts.append(text)
        return "".join(parts)


class _FamilyText:
    """Text of one family, by the labels of its series."""

    def __init__(self, family: Family, is_openmetrics: bool) -> None:
        self._head = make_head(family, is_openmetrics)
        self._is_openmetrics = is_openmetrics
        self._series: dict[tuple[str, ...], _SeriesText] = {}

    def write(self, family: Family) -> str:
        """Returns all lines."""
        known = self._series
        if len(known) > MAX_REMEMBERED + len(family.series):  # labels that come and go
            known.clear()
        parts = [self._head]
        for series in family.series:
            written = known.get(series.labels)
            if written is None:
                written = known[series.labels] = _SeriesText(family, series.labels)
            if written.value != series.value or written.counts != series.counts:
                written.update(series, self._is_openmetrics)
            parts.append(written.text)
        return "".join(parts)


class _SeriesText:
    """The lines of one series, and their numbers. An exemplar changes only together with a count."""

    __slots__ = ("_prefixes", "_template", "counts", "text", "value")

    def __init__(self, family: Family, labels: tuple[str, ...]) -> None:
        self.value = math.nan  # differs from everything
        self.counts: list[int] = []
        self.text = ""
        self._prefixes = make_prefixes(family, labels)
        ends = ["%s"] if family.kind in ("counter", "gauge") else ["%d.0"] * (len(self._prefixes) - 2) + ["%s", "%d.0"]
        pairs = zip(self._prefixes, ends, strict=True)
        self._template = "".join(prefix.replace("%", "%%") + end + "\n" for prefix, end in pairs)

    def update(self, series: Series, is_openmetrics: bool) -> None:
        """Writes the lines again."""
        self.value, self.counts = series.value, series.counts.copy()
        value = format_value(series.value)
        if len(self._prefixes) == 1:
            self.text = self._template % value
            return
        totals = list(accumulate(series.counts))
        if is_openmetrics and series.exemplars:
            lines = [
                f"{prefix}{total}.0{format_exemplar(series.exemplars.get(bucket))}\n"
                for bucket, (prefix, total) in enumerate(zip(self._prefixes, totals, strict=False))
            ]
            self.text = "".join([*lines, f"{self._prefixes[-2]}{value}\n", f"{self._prefixes[-1]}{totals[-1]}.0\n"])
            return
        buckets = totals if len(self._prefixes) > 2 else ()
        self.text = self._template % (*buckets, value, totals[-1])


def make_head(family: Family, is_openmetrics: bool) -> str:
    """Returns the two lines before the series of a family."""
    name = family.name + ("_total" if family.kind == "counter" and not is_openmetrics else "")
    text = family.help.translate(_ESCAPES if is_openmetrics else _HELP_ESCAPES)
    return f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n"


def make_prefixes(family: Family, labels: tuple[str, ...]) -> list[str]:
    """Returns the text before each number of a series: buckets, then sum and count."""
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


def format_exemplar(exemplar: Exemplar | None) -> str:
    """Returns the text after the number of a bucket."""
    if exemplar is None:
        return ""
    room = MAX_EXEMPLAR_CHARS
    pairs = []
    for name, value in exemplar.labels.items():
        value = _UNREADABLE.sub("_", value[: max(0, room - len(name))])
        room -= len(name) + len(value)
        pairs.append(f'{name}="{value}"')
    return f" # {{{','.join(pairs)}}} {format_value(exemplar.value)} {exemplar.timestamp:.3f}"
