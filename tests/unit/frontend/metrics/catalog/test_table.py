from __future__ import annotations

from pathlib import Path

from tools.metrics_page import make_metrics_page

from quire.frontend.metrics.catalog.quire_rows import METRICS, NOT_APPLICABLE
from quire.frontend.metrics.catalog.spec import FAMILY_NAMES

ROOT = Path(__file__).resolve().parents[5]


def test_the_page_is_that_of_the_catalog() -> None:
    introduction = (ROOT / "tools" / "metrics_introduction.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == make_metrics_page(introduction), "run python -m tools.metrics_page"


def test_it_names_everything() -> None:
    page = make_metrics_page("# Metrics")
    for spec in METRICS:
        assert f"| `{spec.full_name}{'_total' if spec.kind == 'counter' else ''}` |" in page
    for name in (*FAMILY_NAMES, *NOT_APPLICABLE):
        assert name in page
