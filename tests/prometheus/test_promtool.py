"""promtool, Prometheus' own checker, on deploy/ and on what a server says."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

import httpx2
import pytest
import yaml

from tests.process.serving import ServerProcess

from . import deploy
from .deploy import DEPLOY

pytestmark = pytest.mark.prometheus

ALERTS = Path(__file__).parent / "alerts.yml"
KNOWN = {
    "metric names should not contain ':'": lambda name: name.startswith("vllm:"),
    'non-counter metrics should not have "_total" suffix': lambda name: name == "vllm:iteration_tokens_total",
}
"""Complaints of promtool about vLLM's own names, which are kept because dashboards ask for them."""


def run(promtool: str, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *words], input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", ["rules", "config"])
def test_the_files_are_in_order(promtool: str, kind: str) -> None:
    name = {"rules": "rules.yml", "config": "prometheus.yml"}[kind]
    done = run(promtool, "check", kind, "--lint-fatal", str(DEPLOY / "prometheus" / name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_silent_in_health_and_fires_in_need(promtool: str) -> None:
    done = run(promtool, "test", "rules", str(ALERTS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_is_left_out() -> None:
    fires: dict[str, set[bool]] = defaultdict(set)
    for case in yaml.safe_load(ALERTS.read_text())["tests"]:
        for moment in case["alert_rule_test"]:
            fires[moment["alertname"]].add("exp_alerts" in moment)
    assert fires == {alert.name: {False, True} for alert in deploy.alerts()}


def test_only_vllms_own_names_are_complained_of(promtool: str, server: ServerProcess) -> None:
    """After a request, so that every family has its series."""
    httpx2.post(f"{server.url}/v1/completions", json={"prompt": [50, 51], "max_tokens": 2}, timeout=60)
    text = httpx2.get(f"{server.url}/metrics", timeout=30).text
    done = run(promtool, "check", "metrics", text=text)
    complaints = [tuple(line.split(" ", 1)) for line in done.stderr.splitlines()]
    assert {words for _, words in complaints} == set(KNOWN)
    assert [(name, words) for name, words in complaints if not KNOWN[words](name)] == []
    assert done.stdout == ""
