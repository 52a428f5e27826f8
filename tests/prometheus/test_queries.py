"""Every query of deploy/ against a Prometheus that has watched a server work: none in error, none without an answer."""

from __future__ import annotations

import httpx2
import pytest

from tests.process.serving import ServerProcess

from . import deploy
from .conftest import DEAD_TARGET
from .deploy import Alert, Query
from .server import Prometheus
from .vllm_queries import queries as vllm_queries

pytestmark = pytest.mark.prometheus

EMPTY = {
    "quire_engine/Draft tokens accepted/A": "the server does not speculate",
    "quire_engine/Mean acceptance length/A": "the server does not speculate",
    "quire_engine/Accepted, by position/A": "the server does not speculate",
    "quire_engine/Draft tokens, by result/A": "the server does not speculate",
    "quire_engine/Draft tokens, by result/B": "the server does not speculate",
    "quire_engine/Draft tokens, by result/C": "the server does not speculate",
    "quire_engine/Proposed and not verified, by reason/A": "the server does not speculate",
    "quire_engine/Time of the drafter/A": "the server does not speculate",
    "quire_engine/Speculation is on/A": "the server does not speculate",
    "quire_engine/Draft tokens of a request/A": "the server does not speculate",
    "quire_engine/Draft tokens of a request/B": "the server does not speculate",
    "quire_engine/Requests by LoRA adapter/A": "the server has no adapters",
    "quire_engine/Tokens by LoRA adapter/A": "the server has no adapters",
    "quire_engine/Loads of LoRA adapters/A": "the server has no adapters",
    "quire_engine/Loads of LoRA adapters/B": "the server has no adapters",
    "quire_engine/Loads, by outcome/A": "the server has no KV connector",
    "quire_engine/Wait for a load/A": "the server has no KV connector",
    "quire_engine/Wait for a load/B": "the server has no KV connector",
    "quire_engine/Wait for a load/C": "the server has no KV connector",
    "quire_engine/Wait for a load/D": "the server has no KV connector",
    "quire_engine/Records, accepted and rejected by reason/A": "the server has no KV connector",
    "quire_engine/Records, accepted and rejected by reason/B": "the server has no KV connector",
    "quire_engine/Blocks saved, and dropped by reason/A": "the server has no KV connector",
    "quire_engine/Blocks saved, and dropped by reason/B": "the server has no KV connector",
    "quire_engine/From computed to saved/A": "the server has no KV connector",
    "quire_engine/From computed to saved/B": "the server has no KV connector",
    "quire_engine/From computed to saved/C": "the server has no KV connector",
    "quire_engine/From computed to saved/D": "the server has no KV connector",
    "quire_engine/Blocks of transfers/A": "the server has no KV connector",
    "quire_engine/Leases, by end/A": "the server has no KV connector",
    "quire_engine/Store/A": "the server has no KV connector",
}
"""Panels that show nothing here, and why."""

MUST_SHOW = {"QuireDown": "one of the targets is", "QuireRejecting": "more is asked than the queue holds"}
MAY_SHOW = {
    "QuireSaturated": "the load is all that the server can do",
    "QuireThrashing": "the cache is too small for the load",
    "QuireSlowFirstToken": "a slow machine under load",
}
"""Alerts that must fire; all others must not fire, nor begin to."""


def ids(queries: list[Query]) -> list[str]:
    return [query.where for query in queries]


PANELS = list(deploy.panel_queries())
OTHERS = [*deploy.scaling_queries(), *deploy.recorded()]
ALERTS = list(deploy.alerts())


@pytest.mark.parametrize("query", PANELS, ids=ids(PANELS))
def test_a_panel_shows_something(scraped: Prometheus, query: Query) -> None:
    found = scraped.ever(query.expr)
    assert bool(found) == (query.where not in EMPTY), EMPTY.get(query.where, query.expr)
    for labels in found:
        assert query.labels <= set(labels), f"the legend asks for {sorted(query.labels)}, there are {sorted(labels)}"


def test_the_table_of_empty_panels_names_panels() -> None:
    assert set(EMPTY) <= set(ids(PANELS))
    assert {*MUST_SHOW, *MAY_SHOW} <= {alert.name for alert in ALERTS}


@pytest.mark.parametrize(("dashboard", "metric", "label"), list(deploy.variable_queries()))
def test_a_dashboard_has_something_to_choose(scraped: Prometheus, dashboard: str, metric: str, label: str) -> None:
    assert scraped.get(f"label/{label}/values", **{"match[]": metric}), dashboard


@pytest.mark.parametrize("query", OTHERS, ids=ids(OTHERS))
def test_a_recording_rule_or_an_autoscaler_finds_something(scraped: Prometheus, query: Query) -> None:
    assert scraped.ever(query.expr)


@pytest.mark.parametrize("expr", [expr for _, expr in vllm_queries()], ids=[who for who, _ in vllm_queries()])
def test_what_was_written_for_vllm_finds_something(scraped: Prometheus, expr: str) -> None:
    assert scraped.ever(expr)


@pytest.mark.parametrize("alert", ALERTS, ids=[alert.name for alert in ALERTS])
def test_an_alert_watches_something_and_is_right(scraped: Prometheus, alert: Alert) -> None:
    assert scraped.ever(alert.watched), alert.watched
    found = scraped.ever(alert.expr)
    if alert.name in MUST_SHOW:
        assert found, MUST_SHOW[alert.name]
    elif alert.name not in MAY_SHOW:
        assert found == []


def test_the_server_that_is_down_is_the_one_complained_of(scraped: Prometheus, server: ServerProcess) -> None:
    (down,) = (alert for alert in ALERTS if alert.name == "QuireDown")
    scraped.wait_for(f'up{{instance="{server.url.removeprefix("http://")}"}} == 1')
    assert DEAD_TARGET in [labels["instance"] for labels in scraped.now(down.expr)]


def test_prometheus_evaluates_every_rule(scraped: Prometheus) -> None:
    rules = scraped.rules_when_evaluated()
    assert {rule["name"] for rule in rules} == {rule.get("record") or rule["alert"] for rule in deploy.rules()}
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}


def test_every_family_of_the_exposition_has_come(scraped: Prometheus, server: ServerProcess) -> None:
    """Prometheus takes OpenMetrics; the reader here the older format."""
    text = httpx2.get(f"{server.url}/metrics", timeout=30).text
    said = {line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE ")}
    assert said - {name.removesuffix("_total") for name in scraped.get("metadata")} == set()


def test_slow_buckets_carry_the_request(scraped: Prometheus) -> None:
    found = scraped.get(
        "query_exemplars",
        query="vllm:time_to_first_token_seconds_bucket",
        start=scraped.since,
        end=scraped.since + 3600,
    )
    exemplars = [exemplar for series in found for exemplar in series["exemplars"]]
    assert exemplars
    assert all("request_id" in exemplar["labels"] for exemplar in exemplars)
