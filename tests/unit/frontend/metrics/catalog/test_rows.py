"""The exposition against a copy of vLLM's list: names, types, labels, buckets, values that are there from the start."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from quire.config.engine import CacheConfig
from quire.frontend.metrics.catalog.quire_rows import INFOS, METRICS, NOT_APPLICABLE
from quire.frontend.metrics.catalog.spec import LEGACY_NAMES, VLLM, MetricSpec
from quire.frontend.metrics.frontend_stats import cache_config_labels
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.publish.snapshot import Family
from quire.wire.engine_core import EngineCoreReadyResponse

SPEC = tomllib.loads((Path(__file__).parent / "vllm_metrics.toml").read_text())
READY = EngineCoreReadyResponse(4096, 100, 16, 1584, 1.5, ("generate",))
EVERYTHING = MetricsSetup(
    model_name="m",
    max_model_len=4096,
    conditions=frozenset(spec.condition for spec in METRICS if spec.condition),
    cache_configs={0: cache_config_labels(CacheConfig(), READY)},
)


def excuse(name: str) -> str | None:
    return next((reason for pattern, reason in NOT_APPLICABLE.items() if fnmatch(name, pattern)), None)


def families(setup: MetricsSetup = EVERYTHING) -> dict[str, Family]:
    return {family.name: family for family in PrometheusStatLogger(setup).snapshot().families}


@pytest.mark.parametrize("name", SPEC["names"])
def test_a_metric_of_vllm_is_there_exactly_or_there_is_a_reason(name: str) -> None:
    expected: dict[str, Any] = SPEC["names"][name]
    family = families().get(VLLM + name)
    if family is None:
        assert excuse(name), f"{name} is neither exported nor excused"
        return
    assert excuse(name) is None, f"{name} is exported and excused"
    assert family.kind == expected["kind"]
    own = (expected["label"],) if "label" in expected else ()
    if "labels_include" in expected:
        assert set(expected["labels_include"]) <= set(family.label_names)
    else:
        assert family.label_names == tuple(expected.get("labels_only", ("model_name", "engine", *own)))
    assert list(family.bounds) == SPEC["families"].get(expected.get("buckets"), [])
    if "values" in expected:
        assert {series.labels[-1] for series in family.series} == set(expected["values"])
    elif not own and "labels_only" not in expected:
        assert len(family.series) == 1, "the series is there from the start"


def test_every_excuse_is_for_a_name_of_vllm() -> None:
    names = [*SPEC["names"], *SPEC["legacy"]["names"]]
    for pattern in NOT_APPLICABLE:
        assert any(fnmatch(name, pattern) for name in names), pattern


def test_names_without_a_model_in_vllm_are_marked_as_ours() -> None:
    known = {VLLM + name for name in (*SPEC["names"], *SPEC["legacy"]["names"])}
    for spec in METRICS:
        if spec.prefix == VLLM:
            assert spec.full_name in known
        assert ":" not in spec.full_name.removeprefix(VLLM)


@pytest.mark.parametrize("name", SPEC["legacy"]["names"])
def test_old_names_are_behind_a_switch_and_say_that_they_are_deprecated(name: str) -> None:
    specs = [spec for spec in METRICS if spec.name == name and spec.prefix == VLLM]
    if not specs:
        assert excuse(name)
        return
    (spec,) = specs
    assert spec.help.startswith("Deprecated: ")
    plain = families(MetricsSetup(model_name="m"))
    shown = families(MetricsSetup(model_name="m", conditions=frozenset({LEGACY_NAMES})))
    assert (VLLM + name in plain) == (name == "gpu_cache_usage_perc")  # autoscalers ask for that one
    assert VLLM + name in shown


def test_rows_are_complete() -> None:
    names = [spec.full_name for spec in (*METRICS, *INFOS)]
    assert len(set(names)) == len(names)
    for spec in METRICS:
        check_row(spec)


def check_row(spec: MetricSpec) -> None:
    ways = [way is not None for way in (spec.value, spec.values, spec.counted, spec.samples)]
    assert sum(ways) == (0 if spec.is_zero else 1), spec.name
    assert not spec.is_zero or "lways 0." in spec.help, spec.name
    assert spec.counted is None or spec.kind == "histogram", spec.name
    assert (spec.samples is not None) == bool(spec.labels), spec.name
    assert spec.help.endswith("."), spec.name
    assert (spec.kind == "histogram") == bool(spec.family), spec.name
    assert all(len(known) == len(spec.labels) for known in spec.known), spec.name
    if spec.kind == "counter":
        assert not spec.name.endswith("_total"), f"{spec.name}: the suffix is added when it is written"


@pytest.mark.parametrize("condition", sorted({spec.condition for spec in METRICS if spec.condition}))
def test_a_row_with_a_condition_is_left_out_without_it(condition: str) -> None:
    names = {spec.full_name for spec in METRICS if spec.condition == condition}
    assert not names & families(MetricsSetup(model_name="m")).keys()
    assert names <= families(MetricsSetup(model_name="m", conditions=frozenset({condition}))).keys()


def test_both_formats_can_be_parsed_and_agree() -> None:
    logger = PrometheusStatLogger(EVERYTHING)
    text = {f.name: f for f in parse_text(logger.exposition())}
    openmetrics = {f.name: f for f in parse_openmetrics(logger.exposition("openmetrics") + "# EOF\n")}
    assert text.keys() == openmetrics.keys()
    for name, family in text.items():
        assert family.type == openmetrics[name].type
        assert [(s.name, s.labels, s.value) for s in family.samples] == [
            (s.name, s.labels, s.value) for s in openmetrics[name].samples
        ]


def test_bounds_are_written_as_floats_and_counters_end_in_total() -> None:
    text = PrometheusStatLogger(EVERYTHING).exposition()
    assert 'vllm:request_params_n_bucket{model_name="m",engine="0",le="1.0"} 0.0' in text
    assert 'vllm:time_to_first_token_seconds_bucket{model_name="m",engine="0",le="+Inf"} 0.0' in text
    assert 'vllm:request_success_total{model_name="m",engine="0",finished_reason="abort"} 0.0' in text
    assert "# TYPE vllm:prompt_tokens_total counter" in text
    assert "# TYPE vllm:iteration_tokens_total histogram" in text
    assert "_created" not in text
