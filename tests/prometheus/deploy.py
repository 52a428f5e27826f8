"""The queries of deploy/: every one of its files, as Grafana and the autoscalers would send it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCRAPE_INTERVAL_S = 1
VARIABLES = {
    "$__rate_interval": f"{4 * SCRAPE_INTERVAL_S}s",  # the shortest that Grafana takes
    "$model": ".+",  # anything, but there must be such a label
    "$instance": ".+",
}
_LEGEND_LABEL = re.compile(r"{{\s*(\w+)\s*}}")
_LIMIT = re.compile(r"\s*(?:[<>]=?|[!=]=)\s*[\d.]+$")


@dataclass(frozen=True)
class Query:
    """`labels` are those that the legend shows."""

    where: str
    expr: str
    labels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Alert:
    """An alert's expression, and the same without its limit: the number that it watches."""

    name: str
    expr: str

    @property
    def watched(self) -> str:
        found = _LIMIT.sub("", self.expr)
        assert found != self.expr, f"{self.name}: {self.expr} has no limit"
        return found


def fill_in(expr: str) -> str:
    """A dashboard's query with its variables as they are when everything is chosen."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"an unknown variable: {expr}"
    return expr


def dashboards() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, document)."""
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        yield path.stem, json.loads(path.read_text())


def panel_queries() -> Iterator[Query]:
    """Returns the queries of every panel of every dashboard."""
    for name, document in dashboards():
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                labels = frozenset(_LEGEND_LABEL.findall(target["legendFormat"]))
                yield Query(
                    f"{name}/{panel['title']}/{target['refId']}",
                    fill_in(target["expr"]),
                    labels,
                )


def variable_queries() -> Iterator[tuple[str, str, str]]:
    """(dashboard, metric, label): where the choices of a dashboard come from."""
    for name, document in dashboards():
        for variable in document["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["query"])
                assert found is not None, variable["query"]
                yield name, found[1], found[2]


def scaling_queries() -> Iterator[Query]:
    """Returns the queries of KEDA's trigger and of the HPA's adapter."""
    kubernetes = DEPLOY / "kubernetes"
    for number, trigger in enumerate(yaml.safe_load((kubernetes / "keda.yaml").read_text())["spec"]["triggers"]):
        yield Query(f"keda/{number}", trigger["metadata"]["query"])
    for rule in yaml.safe_load((kubernetes / "prometheus-adapter.yaml").read_text())["rules"]["custom"]:
        name = rule["name"]["as"]
        yield Query(f"adapter/{name}/series", rule["seriesQuery"])
        expr = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        matchers = ",".join(f'{label}="{value}"' for label, value in POD.items())
        yield Query(f"adapter/{name}", expr.replace("<<.LabelMatchers>>", matchers))


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]:
        yield from group["rules"]


def recorded() -> Iterator[Query]:
    """Yields what the recording rules make."""
    yield from (Query(rule["record"], rule["record"]) for rule in rules() if "record" in rule)


def alerts() -> Iterator[Alert]:
    yield from (Alert(rule["alert"], rule["expr"]) for rule in rules() if "alert" in rule)


def labels_of_pods() -> dict[str, str]:
    """Returns what the pod monitor copies from a pod to its series."""
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "server.yaml").read_text()))
    (pods,) = (document for document in documents if document["kind"] == "Deployment")
    (monitor,) = (document for document in documents if document["kind"] == "PodMonitor")
    own = pods["spec"]["template"]["metadata"]["labels"]
    return {name: own[name] for name in monitor["spec"].get("podTargetLabels", ())}


POD = {"namespace": "default", "pod": "quire-0"}
"""Labels that the Prometheus operator adds to each series of a pod."""

TARGET_LABELS = {**POD, **labels_of_pods()}
