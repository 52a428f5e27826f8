"""The metrics, one row each: name, kind, help, and where its values come from.

`PREFIX` is vLLM's, so that dashboards and autoscalers made for it work. A new metric is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.frontend.metrics.stats import IterationStats
from quire.wire.engine_core import FINISH_REASON_STRINGS
from quire.wire.stats import SchedulerStats

PREFIX = "vllm:"
MODEL_LABELS = ("model_name", "engine")
"""Every metric has these."""
LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
LONG_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)

Sample = tuple[tuple[str, ...], float]
"""Values of the row's own labels, and what to set, add or observe."""


def _one(value: float) -> list[Sample]:
    return [((), value)]


def _each(values: Iterable[float]) -> list[Sample]:
    return [((), value) for value in values]


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """A row. Exactly one of the two readers is given; they are called once per step."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Beside `MODEL_LABELS`."""
    buckets: tuple[float, ...] = ()
    of_scheduler: Callable[[SchedulerStats], Sequence[Sample]] | None = None
    of_iteration: Callable[[IterationStats], Sequence[Sample]] | None = None


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="num_requests_running",
        kind="gauge",
        help="Requests that take part in steps.",
        of_scheduler=lambda stats: _one(stats.num_running_reqs),
    ),
    MetricSpec(
        name="num_requests_waiting",
        kind="gauge",
        help="Requests that wait to be scheduled.",
        of_scheduler=lambda stats: _one(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs),
    ),
    MetricSpec(
        name="kv_cache_usage_perc",
        kind="gauge",
        help="Share of the KV cache in use; 1 is all of it.",
        of_scheduler=lambda stats: _one(stats.kv_cache_usage),
    ),
    MetricSpec(
        name="prefix_cache_queries",
        kind="counter",
        help="Prompt tokens that were looked up in the prefix cache.",
        of_scheduler=lambda stats: _one(stats.prefix_cache_stats.queries),
    ),
    MetricSpec(
        name="prefix_cache_hits",
        kind="counter",
        help="Prompt tokens that were found there.",
        of_scheduler=lambda stats: _one(stats.prefix_cache_stats.hits),
    ),
    MetricSpec(
        name="num_preemptions",
        kind="counter",
        help="Times a request lost its blocks to others.",
        of_iteration=lambda stats: _one(stats.num_preempted_reqs),
    ),
    MetricSpec(
        name="prompt_tokens",
        kind="counter",
        help="Prompt tokens of requests with a first token, cached ones among them.",
        of_iteration=lambda stats: _one(stats.num_prompt_tokens),
    ),
    MetricSpec(
        name="generation_tokens",
        kind="counter",
        help="Tokens generated.",
        of_iteration=lambda stats: _one(stats.num_generation_tokens),
    ),
    MetricSpec(
        name="request_success",
        kind="counter",
        help="Requests that have ended, by the reason.",
        labels=("finished_reason",),
        of_iteration=lambda stats: [
            ((FINISH_REASON_STRINGS[finished.finish_reason],), 1) for finished in stats.finished_requests
        ],
    ),
    MetricSpec(
        name="time_to_first_token_seconds",
        kind="histogram",
        help="From a request's arrival to its first token.",
        buckets=LATENCY_BUCKETS,
        of_iteration=lambda stats: _each(stats.time_to_first_tokens),
    ),
    MetricSpec(
        name="inter_token_latency_seconds",
        kind="histogram",
        help="From one output of a request to the next.",
        buckets=LATENCY_BUCKETS,
        of_iteration=lambda stats: _each(stats.inter_token_latencies),
    ),
    MetricSpec(
        name="e2e_request_latency_seconds",
        kind="histogram",
        help="From a request's arrival to its end.",
        buckets=LONG_BUCKETS,
        of_iteration=lambda stats: _each(finished.e2e_latency for finished in stats.finished_requests),
    ),
)
