"""A real Prometheus on a free port of the loopback interface."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.process.background import running

from .deploy import DEPLOY, SCRAPE_INTERVAL_S

START_TIMEOUT_S = 60
WAIT_TIMEOUT_S = 120
POLL_S = 0.1
_ADDRESS = re.compile(r'msg="Listening on" address=(\S+)')
_READY = "Server is ready to receive web requests"


class Prometheus:
    """Its HTTP API, and the time from which on it has looked."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client
        self.since = time.time()

    def get(self, path: str, **params: Any) -> Any:
        """The data of an answer; an AssertionError, with Prometheus' words, if it has none."""
        answer = self._client.get(path, params=params).json()
        assert answer["status"] == "success", f"{params}: {answer.get('errorType')}: {answer.get('error')}"
        assert not answer.get("warnings"), f"{params}: {answer['warnings']}"
        return answer["data"]

    def now(self, expr: str) -> list[dict[str, str]]:
        """The labels of each series that an expression has at this time."""
        return [series["metric"] for series in self.get("query", query=expr)["result"]]

    def ever(self, expr: str) -> list[dict[str, str]]:
        """The labels of each series that an expression has had since the beginning, as a picture would show them: up to
        this moment, which is the last of the steps."""
        end = time.time()
        start = end - math.ceil((end - self.since) / SCRAPE_INTERVAL_S) * SCRAPE_INTERVAL_S
        found = self.get("query_range", query=expr, start=start, end=end, step=SCRAPE_INTERVAL_S)
        shown = [series for series in found["result"] if any(value != "NaN" for _, value in series["values"])]
        return [series["metric"] for series in shown]

    def wait_for(self, expr: str) -> None:
        """Waits until an expression has a series."""
        end = time.monotonic() + WAIT_TIMEOUT_S
        while not self.now(expr):
            assert time.monotonic() < end, f"not seen in {WAIT_TIMEOUT_S} s: {expr}"
            time.sleep(POLL_S)

    def rules_when_evaluated(self) -> list[dict[str, Any]]:
        """Each rule with its health, after its first evaluation."""
        end = time.monotonic() + WAIT_TIMEOUT_S
        while True:
            rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
            if rules and all(rule["health"] != "unknown" for rule in rules):
                return rules
            assert time.monotonic() < end, f"not evaluated in {WAIT_TIMEOUT_S} s: {rules}"
            time.sleep(POLL_S)


def write_configuration(directory: Path, targets: Sequence[str], labels: Mapping[str, str]) -> Path:
    """The one of deploy/ with its rules, but of these targets, and every second."""
    document = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    interval = f"{SCRAPE_INTERVAL_S}s"
    document["global"].update(scrape_interval=interval, evaluation_interval=interval)
    document["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in document["rule_files"]]
    (job,) = document["scrape_configs"]
    job["static_configs"] = [{"targets": list(targets), "labels": dict(labels)}]
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def prometheus(
    program: str, directory: Path, targets: Sequence[str], labels: Mapping[str, str]
) -> Iterator[Prometheus]:
    """One that scrapes these targets, with its data in this directory, ended with SIGKILL."""
    command = [
        program,
        f"--config.file={write_configuration(directory, targets, labels)}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
    ]
    with running(command, cwd=directory) as program:
        said = program.wait_for(lambda line: _READY in line, START_TIMEOUT_S)
        address = _ADDRESS.search(said)
        assert address is not None, said
        with httpx2.Client(base_url=f"http://{address[1]}/api/v1", timeout=30) as client:
            yield Prometheus(client)
