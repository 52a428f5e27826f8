"""Writes docs/metrics.md: `python -m tools.metrics_page`, with src on the path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quire.frontend.metrics.catalog.quire_rows import HTTP, INFOS, LEDGER, NOT_APPLICABLE
from quire.frontend.metrics.catalog.spec import FAMILIES, TOKENS, VLLM, MetricSpec
from quire.frontend.metrics.catalog.transfer_rows import TRANSFERS
from quire.frontend.metrics.catalog.vllm_rows import COUNTERS, ENGINE_GAUGES, HISTOGRAMS, LEGACY, OPERATIONS

DOCS = Path(__file__).resolve().parents[1] / "docs"
INTRODUCTION = Path(__file__).with_name("metrics_introduction.md")


_SECTIONS: tuple[tuple[str, tuple[MetricSpec, ...]], ...] = (
    ("Gauges of the engine", ENGINE_GAUGES),
    ("Counters", COUNTERS),
    ("Histograms", HISTOGRAMS),
    ("Control operations", OPERATIONS),
    ("The ledger, and other metrics that vLLM does not have", LEDGER),
    ("Transfers of KV blocks", TRANSFERS),
    ("HTTP", HTTP),
    ("Older names", LEGACY),
)


def make_metrics_page(introduction: str) -> str:
    """`introduction`, and a table of every metric."""
    parts = [introduction.rstrip()]
    parts += [f"## {title}\n\n{_table(specs)}" for title, specs in _SECTIONS]
    infos = "\n".join(f"| `{info.full_name}` | gauge, 1 | {info.help} |" for info in INFOS)
    parts.append(f"## Facts as labels\n\n| metric | kind | meaning |\n|---|---|---|\n{infos}")
    parts.append("## Bounds of histograms\n\n" + _bounds())
    reasons = "\n".join(f"| `{VLLM}{name}` | {reason} |" for name, reason in NOT_APPLICABLE.items())
    parts.append(f"## Metrics of vLLM that Quire does not export\n\n| metric | why |\n|---|---|\n{reasons}")
    return "\n\n".join(parts) + "\n"


def _table(specs: Iterable[MetricSpec]) -> str:
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for spec in specs:
        name = spec.full_name + ("_total" if spec.kind == "counter" else "")
        kind = spec.kind + (f", {spec.family}" if spec.family else "")
        labels = ", ".join(spec.base_labels + tuple(_describe_label(spec, label) for label in spec.labels)) or "none"
        only = f" Only with {spec.condition}." if spec.condition else ""
        rows.append(f"| `{name}` | {kind} | {labels} | {spec.help}{only} |")
    return "\n".join(rows)


def _describe_label(spec: MetricSpec, label: str) -> str:
    position = spec.labels.index(label)
    values = dict.fromkeys(known[position] for known in spec.known)
    return label + (f" ({', '.join(values)})" if values else "")


def _bounds() -> str:
    rows = ["| family | bounds |", "|---|---|"]
    rows += [f"| `{name}` | {', '.join(f'{bound:g}' for bound in bounds)} |" for name, bounds in FAMILIES.items()]
    rows.append(f"| `{TOKENS}` | 1, 2, 5, 10, 20, 50 … up to the model's context |")
    return "\n".join(rows)


def main() -> None:
    """Overwrite the page."""
    text = make_metrics_page(INTRODUCTION.read_text(encoding="utf-8"))
    (DOCS / "metrics.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
