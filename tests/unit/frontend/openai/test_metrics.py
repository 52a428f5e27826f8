"""Metrics over HTTP, for a scraper, a balancer and an operator."""

from __future__ import annotations

import json

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from quire.testing.failpoints import injected
from quire.testing.metrics_audit import MetricsAudit, read_exposition

from .serving import Server, check

BODY = {"prompt": [50, 51, 52], "max_tokens": 4, "ignore_eos": True}


def test_every_scrape_adds_up() -> None:
    async def scrape(server: Server) -> None:
        audit = MetricsAudit()
        audit.check(read_exposition((await server.get("/metrics")).text))
        await server.answer("/v1/completions", **BODY, n=2, temperature=1.0)
        await server.refusal("/v1/completions", prompt="x", temperature=9)
        await server.refusal("/v1/completions", 400, prompt=[1] * 600)
        response = await server.get("/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        seen = read_exposition(response.text)
        audit.check(seen)
        assert seen.value("vllm:request_success", "length") == 2
        assert seen.value("vllm:generation_tokens") == 8
        assert seen.value("quire_requests_received") == 3
        assert seen.value("quire_requests_rejected", "prompt_too_long") == 1
        assert seen.value("http_requests", "2xx", "/v1/completions") == 1
        assert seen.value("http_requests", "4xx", "/v1/completions") == 2
        assert seen.value("http_requests") == 3, "probes and scrapes are not counted"
        info = seen.find("vllm:cache_config_info")
        labels = dict(zip(info.label_names, info.series[0].labels, strict=True))
        assert labels["block_size"] == "16"
        assert {"process_resident_memory_bytes", "python_info"} <= {f.name for f in parse_text(response.text)}

    check(scrape)


def test_openmetrics_for_who_asks() -> None:
    async def scrape(server: Server) -> None:
        headers = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "x-request-id": "slow-one"}
        await server.post("/v1/completions", BODY, headers=headers)
        response = await server.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
        assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        families = {family.name: family for family in parse_openmetrics(response.text)}
        assert "python_info" in families
        samples = families["vllm:e2e_request_latency_seconds"].samples
        (exemplar,) = [sample.exemplar for sample in samples if sample.exemplar is not None]
        assert exemplar.labels["trace_id"] == "ab" * 16
        assert "slow-one" in exemplar.labels["request_id"]

    check(scrape)


@pytest.mark.parametrize("stream", [False, True])
def test_a_balancer_is_told_of_the_load(stream: bool) -> None:
    async def ask(server: Server) -> None:
        url, body = "/v1/completions", {**BODY, "stream": stream}
        text = (await server.post(url, body, headers={"endpoint-load-metrics-format": "text"})).headers
        kind, _, pairs = text["endpoint-load-metrics"].partition(" ")
        assert kind == "TEXT"
        named = dict(pair.strip().split("=") for pair in pairs.split(","))
        assert set(named) == {
            "application_utilization",
            "named_metrics.kv_cache_usage_perc",
            "named_metrics.num_requests_running",
            "named_metrics.num_requests_waiting",
        }
        assert all(float(value) >= 0 for value in named.values())
        found = (await server.post(url, body, headers={"endpoint-load-metrics-format": "json"})).headers
        kind, _, report = found["endpoint-load-metrics"].partition(" ")
        assert kind == "JSON"
        assert 0 <= json.loads(report)["application_utilization"] <= 1
        for headers in ({}, {"endpoint-load-metrics-format": "xml"}):
            assert "endpoint-load-metrics" not in (await server.post(url, body, headers=headers)).headers
        health = await server.get("/health", headers={"endpoint-load-metrics-format": "text"})
        assert "endpoint-load-metrics" not in health.headers

    check(ask)


def test_an_exporter_that_fails_costs_nobody_anything() -> None:
    """Promise P13: traffic is unaffected, and scrapes report the failure."""

    def fail(name: str, key: str) -> None:
        raise RuntimeError("disk full")

    async def go_on(server: Server) -> None:
        before = await server.answer("/v1/completions", **BODY)
        with injected("frontend.stats.record", fail):
            during = await server.answer("/v1/completions", **BODY)
        after = await server.answer("/v1/completions", **BODY)
        assert before["choices"][0]["text"] == during["choices"][0]["text"] == after["choices"][0]["text"]
        response = await server.get("/metrics")
        assert response.status_code == 503
        assert "has failed" in response.json()["error"]["message"]

    check(go_on)


def test_no_statistics_no_metrics() -> None:
    async def scrape(server: Server) -> None:
        assert (await server.get("/metrics")).status_code == 404
        await server.answer("/v1/completions", **BODY)

    check(scrape, engine_flags={"disable_log_stats": True})
