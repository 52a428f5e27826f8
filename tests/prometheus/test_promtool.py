"""promtool, Prometheus' own checker, on deploy/ and on what a server says."""

from __future__ import annotations

import subprocess

import httpx2
import pytest

from tests.process.serving import ServerProcess

from .deploy import DEPLOY

pytestmark = pytest.mark.prometheus

KNOWN = {
    "metric names should not contain ':'": lambda name: name.startswith("vllm:"),
    'non-counter metrics should not have "_total" suffix': lambda name: name == "vllm:iteration_tokens_total",
}
"""What it holds against vLLM's own names, which are kept because dashboards ask for them."""


def run(promtool: str, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *words], input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", ["rules", "config"])
def test_the_files_are_in_order(promtool: str, kind: str) -> None:
    name = {"rules": "rules.yml", "config": "prometheus.yml"}[kind]
    done = run(promtool, "check", kind, "--lint-fatal", str(DEPLOY / "prometheus" / name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_vllms_own_names_are_complained_of(promtool: str, server: ServerProcess) -> None:
    """After a request, so that every family has its series."""
    httpx2.post(f"{server.url}/v1/completions", json={"prompt": [50, 51], "max_tokens": 2}, timeout=60)
    text = httpx2.get(f"{server.url}/metrics", timeout=30).text
    done = run(promtool, "check", "metrics", text=text)
    complaints = [tuple(line.split(" ", 1)) for line in done.stderr.splitlines()]
    assert {words for _, words in complaints} == set(KNOWN)
    assert [(name, words) for name, words in complaints if not KNOWN[words](name)] == []
    assert done.stdout == ""
