"""Dashboards, rules and manifests: every query is one, and asks for metrics and labels that are exported."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tools.dashboards.__main__ import file_name, make_dashboard
from tools.dashboards.panels import DASHBOARDS

from quire.envs import CACHE_ROOT
from quire.frontend.metrics.catalog.quire_rows import METRICS
from quire.frontend.metrics.collect.events import HttpExchange
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.server_metrics import ProcessMetrics

from .promql import parse

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
FROM_PROMETHEUS = {"instance", "job", "le", "pod", "namespace", "app"}
"""Labels that a scrape adds."""
UP = "up"


@functools.cache
def exported() -> dict[str, set[str]]:
    """The labels of everything a query may ask for."""
    setup = MetricsSetup(model_name="m", conditions=frozenset(spec.condition for spec in METRICS if spec.condition))
    logger = PrometheusStatLogger(setup)
    logger.record_exchange(HttpExchange("GET", "/", 200, 0.1, 0, 0))
    found: dict[str, set[str]] = {UP: set()}
    for spec in METRICS:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
        for suffix in suffixes.get(spec.kind, ("",)):
            found[spec.full_name + suffix] = {*spec.base_labels, *spec.labels}
    for family in text_string_to_metric_families(logger.exposition() + ProcessMetrics().exposition()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@functools.cache
def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(where, query)."""
    for dashboard in DASHBOARDS:
        for section in dashboard.sections:
            for panel in section.panels:
                yield from ((f"{dashboard.uid}: {panel.title}", query.expr) for query in panel.queries)
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]
    for trigger in yaml.safe_load((DEPLOY / "kubernetes" / "keda.yaml").read_text())["spec"]["triggers"]:
        yield "keda", trigger["metadata"]["query"]


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_asks_for_what_is_there(where: str, query: str) -> None:
    known = exported()
    recorded = {rule["record"]: {"model_name"} for rule in rules() if "record" in rule}
    expression = parse(query)
    assert expression.selectors
    labels: set[str] = set()
    for selector in expression.selectors:
        assert selector.metric in {*known, *recorded}, f"{where}: nothing exports {selector.metric}"
        own = known.get(selector.metric) or recorded.get(selector.metric, set())
        assert set(selector.labels) <= own | FROM_PROMETHEUS, f"{where}: {selector.metric} has no such labels"
        labels |= own
    assert set(expression.grouped_by) <= labels | FROM_PROMETHEUS, where


@pytest.mark.parametrize(
    "query",
    ["", "sum(", "rate(a)", "sum by (le (a)", 'a{b="c"', "a b", "a[5m]]", "1 +", "a{b<'c'}", "histogram_quantile 0.9"],
)
def test_the_parser_refuses_what_is_no_query(query: str) -> None:
    with pytest.raises(ValueError):
        parse(query)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_the_files_are_those_of_the_tables(dashboard: Any) -> None:
    written = json.loads((DEPLOY / "grafana" / file_name(dashboard)).read_text())
    assert written == make_dashboard(dashboard), "run python -m tools.dashboards"
    panels = written["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]


def test_histograms_are_shown_by_their_buckets() -> None:
    shown = {name for _, query in queries() for name in [s.metric for s in parse(query).selectors]}
    wanted = [
        spec for spec in METRICS if spec.kind == "histogram" and spec.prefix == "vllm:" and "latency" in spec.name
    ]
    assert {spec.full_name + "_bucket" for spec in wanted} <= shown


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_rules() -> None:
    rules_file = DEPLOY / "prometheus" / "rules.yml"
    subprocess.run(["promtool", "check", "rules", str(rules_file)], check=True, capture_output=True, timeout=60)


def test_alerts_say_what_is_wrong() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]


def test_a_pod_has_time_to_drain() -> None:
    deployment, *_ = yaml.safe_load_all((DEPLOY / "kubernetes" / "server.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = container["args"]
    times = [float(args[args.index(flag) + 1]) for flag in ("--drain-accept-s", "--shutdown-timeout")]
    assert pod["terminationGracePeriodSeconds"] > sum(times)
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/health/ready", "livenessProbe": "/health", "readinessProbe": "/health/ready"}


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_manifests_can_be_read(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert isinstance(document, dict)


def test_the_pod_monitor_gives_the_labels_that_queries_ask_for() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "server.yaml").read_text()))
    (pods,) = (document for document in documents if document["kind"] == "Deployment")
    (monitor,) = (document["spec"] for document in documents if document["kind"] == "PodMonitor")
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    labels = pods["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["jobLabel"]] == job["job_name"]
    (down,) = (rule for rule in rules() if rule.get("alert") == "QuireDown")
    assert f'job="{job["job_name"]}"' in down["expr"]
    assert monitor["podTargetLabels"] == ["app"]
    for trigger in yaml.safe_load((DEPLOY / "kubernetes" / "keda.yaml").read_text())["spec"]["triggers"]:
        assert f'{{app="{labels["app"]}"}}' in trigger["metadata"]["query"]


def test_the_autoscalers_look_at_the_saturation() -> None:
    hpa = yaml.safe_load((DEPLOY / "kubernetes" / "hpa.yaml").read_text())
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())
    (metric,) = hpa["spec"]["metrics"]
    (rule,) = adapter["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == "quire_saturation"
    assert "quire_saturation" in exported()


def cache_root_in_the_image(variable: str = CACHE_ROOT.name) -> str:
    (line,) = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.startswith(f"ENV {variable}=")]
    return line.partition("=")[2]


def test_models_of_the_hub_are_kept_where_a_server_can_write() -> None:
    pod, *_ = yaml.safe_load_all((DEPLOY / "kubernetes" / "server.yaml").read_text())
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["quire"]["environment"]
    for environment in ({one["name"]: one["value"] for one in container["env"]}, composed):
        assert environment["HF_HOME"] == cache_root_in_the_image("HF_HOME")
        assert Path(environment["HF_HOME"]).is_relative_to(environment[CACHE_ROOT.name])


def test_a_pod_can_write_its_weight_cache() -> None:
    deployment, *_ = yaml.safe_load_all((DEPLOY / "kubernetes" / "server.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"], "else any directory would do"
    root = next(one["value"] for one in container["env"] if one["name"] == CACHE_ROOT.name)
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == root]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    assert not mount.get("readOnly")
    assert not volume["persistentVolumeClaim"].get("readOnly")
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"], "a claim belongs to root otherwise"
    assert root == cache_root_in_the_image()


def test_a_composed_server_can_write_its_weight_cache() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = compose["services"]["quire"]
    assert server["read_only"], "else any directory would do"
    root = server["environment"][CACHE_ROOT.name]
    (name,) = [volume.split(":")[0] for volume in server["volumes"] if volume.split(":")[1:] == [root]]
    assert name in compose["volumes"]
    assert root == cache_root_in_the_image(), "a new volume has the owner that the directory has in the image"
