"""Writes docs/metrics.md: `python -m tools.metrics_page`, with src on the path."""

from __future__ import annotations

from pathlib import Path

from quire.frontend.metrics.catalog.table import make_metrics_page

DOCS = Path(__file__).resolve().parents[1] / "docs"
INTRODUCTION = Path(__file__).with_name("metrics_introduction.md")


def main() -> None:
    """Overwrite the page."""
    text = make_metrics_page(INTRODUCTION.read_text(encoding="utf-8"))
    (DOCS / "metrics.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
