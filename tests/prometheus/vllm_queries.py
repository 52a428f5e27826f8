"""Queries that dashboards, alerts, autoscalers and routers send to Prometheus because a server is vLLM.

Written from the names, labels, label values and bounds that those programs are documented to ask for. What vLLM exports
only with a feature that Quire has not (docs/metrics.md) is not here; speculation and LoRA show themselves only where
there is some.
"""

from __future__ import annotations

from collections.abc import Iterator

_MODEL = 'model_name=~".+"'
_TIMES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
)
_SIZES = ("request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "request_params_max_tokens")
_RATES = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "mm_cache_queries_total",
    "mm_cache_hits_total",
    "prompt_tokens_cached_total",
)
_LABELLED = {
    "request_success_total": ("finished_reason", ("stop", "length", "abort", "error", "repetition")),
    "prompt_tokens_by_source_total": ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    "num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "engine_sleep_state": ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
}
_GOALS = {
    "time_to_first_token_seconds": ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"),
    "request_time_per_output_token_seconds": ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
    "inter_token_latency_seconds": ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
}
"""Tiles that say which share was faster ask for one bucket, by the text of its bound."""


def queries() -> Iterator[tuple[str, str]]:
    """(the file that asks, its query)."""
    for name in _TIMES:
        buckets = f"sum by (le) (rate(vllm:{name}_bucket{{{_MODEL}}}[1m]))"
        yield f"dashboard: percentile of {name}", f"histogram_quantile(0.95, {buckets})"
        yield (
            f"dashboard: mean {name}",
            f"sum(rate(vllm:{name}_sum{{{_MODEL}}}[1m])) / sum(rate(vllm:{name}_count{{{_MODEL}}}[1m]))",
        )
    for name, bounds in _GOALS.items():
        for bound in bounds:
            yield (
                f"dashboard: share of {name} below {bound}",
                f'sum(rate(vllm:{name}_bucket{{{_MODEL}, le="{bound}"}}[1m]))'
                f" / sum(rate(vllm:{name}_count{{{_MODEL}}}[1m]))",
            )
    for name in _SIZES:
        yield f"dashboard: heat map of {name}", f"sum by (le) (increase(vllm:{name}_bucket{{{_MODEL}}}[1m]))"
    for name in _RATES:
        yield f"dashboard: rate of {name}", f"sum by (model_name, engine) (rate(vllm:{name}{{{_MODEL}}}[1m]))"
    for name, (label, values) in _LABELLED.items():
        for value in values:
            yield f"dashboard: {name} {value}", f'sum(vllm:{name}{{{_MODEL}, {label}="{value}"}})'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        yield f"router, dashboard: {name}", f'max by (engine) (vllm:{name}{{{_MODEL}, engine="0"}})'
    yield "router: size of the cache", 'max by (block_size, num_gpu_blocks) (vllm:cache_config_info{engine="0"})'
    yield "older autoscalers: the cache's former name", f"avg(vllm:gpu_cache_usage_perc{{{_MODEL}}})"
    yield "autoscaler: queue", "sum(vllm:num_requests_waiting)"
    yield "autoscaler: the cache is full", "avg_over_time(vllm:kv_cache_usage_perc[1m])"
    yield (
        "alert: hit rate",
        "sum(rate(vllm:prefix_cache_hits_total[1m])) / sum(rate(vllm:prefix_cache_queries_total[1m]))",
    )
    yield (
        "dashboard: requests over HTTP",
        'sum by (handler) (rate(http_requests_total{status="2xx", handler=~".+"}[1m]))',
    )
    yield (
        "dashboard: time of requests over HTTP",
        "histogram_quantile(0.95, sum by (le, handler) (rate(http_request_duration_seconds_bucket[1m])))",
    )
    yield "dashboard: memory of the process", "process_resident_memory_bytes"
    yield "dashboard: processor time", "rate(process_cpu_seconds_total[1m])"
