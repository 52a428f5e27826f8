"""Every query that a consumer of vLLM's metrics sends finds a series on a server that has answered one request."""

from __future__ import annotations

import functools
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from tests.prometheus.vllm_queries import queries

from .serving import Server, check

QUERIES = list(queries())
SELECTOR = re.compile(r"(?<![\w:])((?:vllm:|http_|process_)\w+)(?:\{(.*?)\})?(?=[\s\[)]|$)")
MATCHER = re.compile(r'(\w+)(=~?)"([^"]*)"')
OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0"}


@functools.cache
def exported() -> tuple[list[Sample], list[Sample]]:
    """In Prometheus' text format, and in OpenMetrics."""
    found: list[list[Sample]] = []

    async def scrape(server: Server) -> None:
        await server.answer("/v1/completions", prompt=[50, 51, 52], max_tokens=4, ignore_eos=True)
        for headers, parse in (({}, parse_text), (OPENMETRICS, parse_openmetrics)):
            families = parse((await server.get("/metrics", headers=headers)).text)
            found.append([sample for family in families for sample in family.samples])

    check(scrape)
    return found[0], found[1]


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=[who for who, _ in QUERIES])
def test_a_query_made_for_vllm_finds_something(query: str) -> None:
    selectors = SELECTOR.findall(query)
    assert selectors, query
    for samples in exported():
        for name, inside in selectors:
            matchers = [
                (label, re.compile(text if op == "=~" else re.escape(text)))
                for label, op, text in MATCHER.findall(inside)
            ]
            assert any(
                sample.name == name
                and all(wanted.fullmatch(sample.labels.get(label, "")) for label, wanted in matchers)
                for sample in samples
            ), f"nothing for {name}{{{inside}}}"


def test_what_is_not_exported_is_missed() -> None:
    for query in ("sum(vllm:no_such_thing)", 'vllm:num_requests_waiting{engine="7"}'):
        with pytest.raises(AssertionError, match="nothing for"):
            test_a_query_made_for_vllm_finds_something(query)
