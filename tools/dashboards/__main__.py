"""Writes deploy/grafana/*.json: `python -m tools.dashboards`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.dashboards.panels import DASHBOARDS, Dashboard, Panel

DIRECTORY = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NUM_COLUMNS, HEIGHT = 24, 7


def make_dashboard(dashboard: Dashboard) -> dict[str, Any]:
    """Returns the dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for section in dashboard.sections:
        row = {"h": 1, "w": NUM_COLUMNS, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": section.title, "gridPos": row, "panels": []})
        y += 1
        width = NUM_COLUMNS // (6 if all(panel.kind != "timeseries" for panel in section.panels) else 4)
        for number, panel in enumerate(section.panels):
            line, column = divmod(number * width, NUM_COLUMNS)
            place = {"h": HEIGHT, "w": width, "x": column, "y": y + line * HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **make_panel(panel)})
        y += HEIGHT * -(-len(section.panels) * width // NUM_COLUMNS)
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["quire"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [make_datasource(), make_variable("model", "model_name"), make_variable("instance", "instance")]
        },
        "panels": panels,
    }


def make_panel(panel: Panel) -> dict[str, Any]:
    """Returns the panel without its position."""
    limits = {"min": 0, "max": 1} if panel.kind == "gauge" else {"min": 0} if panel.unit != "short" else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **limits}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if panel.kind == "timeseries" else {},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "exemplar": "_bucket" in query.expr,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def make_datasource() -> dict[str, Any]:
    """Returns the variable that chooses the Prometheus server."""
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def make_variable(name: str, label: str) -> dict[str, Any]:
    """Returns the variable that chooses values of a label."""
    query = f"label_values(vllm:num_requests_running, {label})"
    everything = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {"name": name, "type": "query", "datasource": DATASOURCE, "query": query, "refresh": 2, **everything}


def file_name(dashboard: Dashboard) -> str:
    """Returns its file name in deploy/grafana."""
    return dashboard.uid.replace("-", "_") + ".json"


def main() -> None:
    """Overwrites the files."""
    for dashboard in DASHBOARDS:
        text = json.dumps(make_dashboard(dashboard), indent=2) + "\n"
        (DIRECTORY / file_name(dashboard)).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
