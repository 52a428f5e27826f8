"""A snapshot as text: Prometheus' format 0.0.4, and OpenMetrics 1.0.0, which has exemplars.

Most series are the same in one scrape as in the one before: their lines are kept, and so is what stands around the
numbers of the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Literal, Protocol

from quire.frontend.metrics.publish.snapshot import Exemplar, Family, Series, format_value

Format = Literal["text", "openmetrics"]
CONTENT_TYPES: dict[Format, str] = {
    "text": "text/plain; version=0.0.4; charset=utf-8",
    "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
MAX_EXEMPLAR_CHARS = 128
"""Of an exemplar's label names and values together, as OpenMetrics limits them."""
MAX_REMEMBERED = 1000
"""Series of a family whose lines are kept although they are not there any more."""
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
    """Writes snapshots of one process. Remembers what it has written of each series: what has not changed since is not
    written again, so a scrape costs what has happened since the last one."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, Format], _FamilyText] = {}

    def write(self, families: Iterable[Family], format: Format = "text") -> str:
        """All of it, without the end mark of OpenMetrics: other collectors may follow."""
        return "".join([self.write_family(family, format) for family in families])

    def write_family(self, family: Family, format: Format) -> str:
        """One metric."""
        written = self._families.get((family.name, format))
        if written is None:
            written = self._families[family.name, format] = _FamilyText(family, format == "openmetrics")
        return written.write(family)


class LiveFamily(Protocol):
    """A metric where it is counted."""

    changes: int
    """Grows whenever `family` may have changed."""

    def family(self) -> Family | None:
        """As it is now; None if it is not to be shown."""


class LiveExposition:
    """Writes metrics where they are counted, on the thread that counts. What has not changed is not looked at."""

    def __init__(self, rows: Iterable[LiveFamily]) -> None:
        self._rows = list(rows)
        self._exposition = Exposition()
        self._written: dict[Format, list[tuple[int, str]]] = {}

    def write(self, format: Format) -> str:
        """All of them as they are now."""
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
    """What was written of one family, by the labels of its series."""

    def __init__(self, family: Family, is_openmetrics: bool) -> None:
        self._head = make_head(family, is_openmetrics)
        self._is_openmetrics = is_openmetrics
        self._series: dict[tuple[str, ...], _SeriesText] = {}

    def write(self, family: Family) -> str:
        """All lines."""
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
    """The lines of one series, and the numbers in them. An exemplar only changes together with a count."""

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
        """Write them anew."""
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
