"""docs/recipes/add_a_metric.md: its row works."""

from __future__ import annotations

import re
from pathlib import Path

from quire.frontend.metrics.catalog import spec as spec_module
from quire.frontend.metrics.catalog.spec import MetricSpec
from quire.frontend.metrics.publish.store import MetricsStore
from quire.wire.stats import SchedulerStats

PAGE = Path(__file__).resolve().parents[5] / "docs" / "recipes" / "add_a_metric.md"


def test_the_row_of_the_recipe() -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    row: MetricSpec = eval(found[1].strip(), vars(spec_module))  # our own page
    store = MetricsStore([row], {"model_name": "m"}, {})
    store.record_all([SchedulerStats(num_scheduled_tokens=5)])
    store.record_all([SchedulerStats(num_scheduled_tokens=6)])
    assert store.snapshot().value("quire_step_tokens") == 11
