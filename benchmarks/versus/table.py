"""The report as Markdown: one table, the conditions, and in words where Quire loses."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.versus.figures import BASELINE, Figure, Row
from benchmarks.versus.peers import PEERS

BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the whole text. `report` is the content of the JSON file."""
    rows = [Row.from_json(row) for row in report["rows"]]
    peers = [name for name in PEERS if any(name in row.figures for row in rows)]
    return "\n\n".join(
        [_conditions(report, peers), format_table(rows, peers), *_losses(rows, peers), *_missing(report)]
    )


def merge(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins reports of one machine: conditions of the last, rows of all, the last of each title and peers.

    Figures measured beside different peers at different times are never one row.
    """
    all_rows = [row for report in reports for row in report["rows"]]
    places = {row["title"]: place for place, row in reversed(list(enumerate(all_rows)))}
    last = {(row["title"], *sorted(row["figures"])): row for row in all_rows}
    rows = sorted(last.values(), key=lambda row: places[row["title"]])
    neighbours = [report["neighbours"] for report in reports if report["neighbours"] is not None]
    return {
        **reports[-1],
        "command": "; ".join(dict.fromkeys(report["command"] for report in reports)),
        "versions": {name: version for report in reports for name, version in report["versions"].items()},
        "neighbours": max(neighbours, default=None),
        "rows": rows,
    }


def format_table(rows: Sequence[Row], peers: Sequence[str]) -> str:
    """Returns Quire's figures, and each peer's with the ratio. A ratio below 1, where Quire loses, is bold."""
    lines = ["| | " + " | ".join(PEERS[peer].title for peer in peers) + " |", "|---|" + "--:|" * len(peers)]
    lines += ["| " + " | ".join([row.title, *(format_cell(row, peer) for peer in peers)]) + " |" for row in rows]
    return "\n".join(lines)


def format_cell(row: Row, peer: str) -> str:
    """Returns `2.06 ± 3 % (2.3×)`, or why there is no figure."""
    figure = row.figures.get(peer, Figure())
    if figure.value is None:
        return figure.failure or "–"
    text = f"{figure.value:,.{row.digits}f}"
    if figure.spread is not None and figure.spread >= 0.005:
        text += f" ± {figure.spread * 100:.0f} %"
    ratio = row.ratio(peer) if peer != BASELINE else None
    if ratio is None:
        return text
    return f"{text} ({ratio:.2f}×)" if ratio >= 1 else f"{text} (**{ratio:.2f}×**)"


def _conditions(report: Mapping[str, Any], peers: Sequence[str]) -> str:
    machine, versions = report["machine"], report["versions"]
    commands = "\n".join(_wrap(command, 4) for command in report["command"].split("; "))
    text = (
        f"{report['date']}. {machine['cpu']}, {len(report['cpus'])} cores, {report['reps']} repetitions in turn, "
        "medians ± half the range, bfloat16. In parentheses: how many times better Quire is; **bold** where it loses."
    )
    parts = [_wrap(text), commands]
    ceilings = machine.get("ceilings")
    notes = []
    if ceilings:
        each = [
            f"{values['read_gb_s']} GB/s read and {values['bf16_tflop_s']} TFLOP/s of bfloat16 with {count} "
            f"thread{'' if count == '1' else 's'}"
            for count, values in ceilings.items()
            if count != "instruction_set"
        ]
        notes.append(f"Measured ceilings ({ceilings['instruction_set']}): {', '.join(each)}.")
    if report.get("neighbours") is not None:
        share = report["neighbours"] * 100
        notes.append(f"Other processes took at most {share:.0f} % of the cores during a repetition.")
    if notes:
        parts.append(_wrap(" ".join(notes)))
    known = [versions[peer] for peer in peers if versions.get(peer)]
    if known:
        parts.append(_wrap(f"Versions: {', '.join(known)}."))
    return "\n\n".join(parts)


def _wrap(text: str, indent: int = 0) -> str:
    """Returns text in lines of at most 118 characters; an indented one is a command, whose lines are continued."""
    lines = textwrap.wrap(text, 110 if indent else 118, break_long_words=False, break_on_hyphens=False)
    if not indent:
        return "\n".join(lines)
    return " \\\n".join(" " * (indent if number == 0 else indent + 4) + line for number, line in enumerate(lines))


def _losses(rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    lost = [
        f"{row.title} ({', '.join(f'{PEERS[p].title} {row.ratio(p):.2f}×' for p in peers if _loses(row, p))})"
        for row in rows
        if any(_loses(row, p) for p in peers)
    ]
    return ["Quire loses:", "\n".join(f"* {each}" for each in lost)] if lost else ["Quire loses none of these."]


def _loses(row: Row, peer: str) -> bool:
    ratio = row.ratio(peer) if peer != BASELINE else None
    return ratio is not None and ratio < 1


def _missing(report: Mapping[str, Any]) -> list[str]:
    missing = report.get("missing") or {}
    return ["\n".join(f"Not measured: {PEERS[name].title} ({why})" for name, why in missing.items())] if missing else []


def update_page(page: Path, text: str, name: str = "versus") -> None:
    """Puts `text` between the markers of this name in `page`. Raises ValueError if it has none."""
    content = page.read_text(encoding="utf-8")
    first, last = BEGIN.format(name), END.format(name)
    before, begin, rest = content.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {first} and {last}: put them where the table belongs")
    page.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")
