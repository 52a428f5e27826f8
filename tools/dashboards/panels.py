"""The dashboards: rows of panels, each with a title, a unit and its queries.

`$model` and `$instance` are variables of the dashboard. Every name in a query must be in the catalog.
"""

from __future__ import annotations

from dataclasses import dataclass

SELECT = 'model_name=~"$model",instance=~"$instance"'
ON_INSTANCE = 'instance=~"$instance"'
RATE = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """One line of a panel."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    description: str = ""


@dataclass(frozen=True)
class Section:
    """A row of a dashboard."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A dashboard, which is one file."""

    uid: str
    title: str
    sections: tuple[Section, ...]


def rate(metric: str, by: str = "", select: str = SELECT) -> str:
    """Returns the rate per second over all series, or by a label."""
    over = f" by ({by})" if by else ""
    return f"sum{over} (rate({metric}{{{select}}}[{RATE}]))"


def total(metric: str, by: str = "", select: str = SELECT) -> str:
    """Returns the sum of gauges over all series, or by a label."""
    over = f" by ({by})" if by else ""
    return f"sum{over} ({metric}{{{select}}})"


def quantiles(metric: str) -> tuple[Query, ...]:
    """Returns the queries of the median, p90, p99 and mean of a histogram."""
    found = [
        Query(f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{SELECT}}}[{RATE}])))", legend)
        for q, legend in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))
    ]
    return (*found, Query(f"{rate(metric + '_sum')} / {rate(metric + '_count')}", "mean"))


def ratio(part: str, whole: str) -> str:
    """Returns one rate as a share of another."""
    return f"{rate(part)} / {rate(whole)}"


def latency(title: str, metric: str) -> Panel:
    """Returns the panel of a histogram of seconds."""
    return Panel(title, "s", quantiles(metric))


OVERVIEW = Dashboard(
    "quire-overview",
    "Quire: overview",
    (
        Section(
            "Health",
            (
                Panel("Saturation", "percentunit", (Query(f"max (quire_saturation{{{SELECT}}})"),), "gauge"),
                Panel("Ready", "short", (Query(f"min (quire_engine_ready{{{SELECT}}})"),), "stat"),
                Panel("Running", "short", (Query(total("vllm:num_requests_running")),), "stat"),
                Panel("Waiting", "short", (Query(total("vllm:num_requests_waiting")),), "stat"),
                Panel(
                    "KV cache in use", "percentunit", (Query(f"max (vllm:kv_cache_usage_perc{{{SELECT}}})"),), "gauge"
                ),
                Panel("Restarts of the core", "short", (Query(total("quire_engine_restarts_total")),), "stat"),
            ),
        ),
        Section(
            "Traffic",
            (
                Panel(
                    "Finished requests, by reason",
                    "reqps",
                    (Query(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
                ),
                Panel(
                    "Rejected requests, by reason",
                    "reqps",
                    (Query(rate("quire_requests_rejected_total", "reason"), "{{reason}}"),),
                ),
                Panel(
                    "Tokens per second",
                    "short",
                    (
                        Query(rate("vllm:prompt_tokens_total"), "prompt"),
                        Query(rate("vllm:generation_tokens_total"), "generation"),
                    ),
                ),
                Panel(
                    "HTTP answers, by status",
                    "reqps",
                    (Query(rate("http_requests_total", "status", ON_INSTANCE), "{{status}}"),),
                ),
            ),
        ),
        Section(
            "Latency",
            (
                latency("Time to first token", "vllm:time_to_first_token_seconds"),
                latency("Between tokens", "vllm:inter_token_latency_seconds"),
                latency("Time per output token, by request", "vllm:request_time_per_output_token_seconds"),
                latency("End to end", "vllm:e2e_request_latency_seconds"),
                latency("In the queue", "vllm:request_queue_time_seconds"),
                latency("Prefill", "vllm:request_prefill_time_seconds"),
                latency("Decode", "vllm:request_decode_time_seconds"),
                latency("Inference", "vllm:request_inference_time_seconds"),
            ),
        ),
        Section(
            "Shape of requests",
            (
                Panel("Prompt tokens", "short", quantiles("vllm:request_prompt_tokens")),
                Panel("Output tokens", "short", quantiles("vllm:request_generation_tokens")),
                Panel("Requested max_tokens", "short", quantiles("vllm:request_params_max_tokens")),
                Panel("Outputs per request (n)", "short", quantiles("vllm:request_params_n")),
            ),
        ),
    ),
)

ENGINE = Dashboard(
    "quire-engine",
    "Quire: engine and cache",
    (
        Section(
            "Load",
            (
                Panel(
                    "Saturation by resource",
                    "percentunit",
                    (Query(f"max by (resource) (quire_saturation_by_resource{{{SELECT}}})", "{{resource}}"),),
                ),
                Panel(
                    "Maximum tokens per second, in this mix",
                    "short",
                    (
                        Query(total("quire_saturation_limit_tokens_per_second"), "limit"),
                        Query(f"{rate('vllm:prompt_tokens_total')} + {rate('vllm:generation_tokens_total')}", "now"),
                    ),
                ),
                Panel(
                    "Waiting, by reason",
                    "short",
                    (Query(total("vllm:num_requests_waiting_by_reason", "reason"), "{{reason}}"),),
                ),
                Panel("Prompt tokens in the queue", "short", (Query(total("quire_queue_tokens")),)),
                Panel("Tokens per step", "short", quantiles("vllm:iteration_tokens_total")),
                Panel(
                    "Age of the last step",
                    "s",
                    (Query(f"max by (instance) (quire_engine_step_age_seconds{{{SELECT}}})", "{{instance}}"),),
                ),
            ),
        ),
        Section(
            "KV cache",
            (
                Panel("Blocks", "short", (Query(total("quire_kv_blocks", "state"), "{{state}}"),)),
                Panel(
                    "Prefix cache hits",
                    "percentunit",
                    (Query(ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "hits"),),
                ),
                Panel(
                    "Prompt tokens, by source",
                    "short",
                    (Query(rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),),
                ),
                Panel("Preemptions", "ops", (Query(rate("vllm:num_preemptions_total")),)),
                Panel(
                    "Tokens computed again",
                    "short",
                    (
                        Query(rate("quire_preemption_recomputed_tokens_total"), "preemptions"),
                        Query(rate("quire_restart_recomputed_tokens_total"), "restarts"),
                    ),
                ),
                latency("Lifetime of a block", "vllm:kv_block_lifetime_seconds"),
                latency("Idle before eviction", "vllm:kv_block_idle_before_evict_seconds"),
                latency("Between two uses", "vllm:kv_block_reuse_gap_seconds"),
            ),
        ),
        Section(
            "KV store and peers",
            (
                Panel(
                    "Cached prompt tokens, by where they came from",
                    "short",
                    (Query(rate("vllm:prompt_tokens_cached_by_source_total", "source"), "{{source}}"),),
                ),
                Panel("Loads, by outcome", "ops", (Query(rate("quire_kv_loads_total", "outcome"), "{{outcome}}"),)),
                latency("Wait for a load", "quire_kv_load_seconds"),
                Panel(
                    "Records, accepted and rejected by reason",
                    "ops",
                    (
                        Query(rate("quire_kv_records_accepted_total"), "accepted"),
                        Query(rate("quire_kv_records_rejected_total", "reason"), "{{reason}}"),
                    ),
                ),
                Panel(
                    "Blocks saved, and dropped by reason",
                    "ops",
                    (
                        Query(rate("quire_kv_saved_blocks_total"), "saved"),
                        Query(rate("quire_kv_saves_dropped_total", "reason"), "{{reason}}"),
                    ),
                ),
                latency("From computed to saved", "quire_kv_save_lag_seconds"),
                Panel("Blocks of transfers", "short", (Query(total("quire_kv_held_blocks", "state"), "{{state}}"),)),
                Panel("Leases, by end", "ops", (Query(rate("quire_kv_leases_total", "end"), "{{end}}"),)),
                Panel("Store", "bytes", (Query(f"max (quire_kv_store_bytes{{{SELECT}}})", "bytes of the store"),)),
            ),
        ),
        Section(
            "Speculation",
            (
                Panel(
                    "Draft tokens accepted",
                    "percentunit",
                    (
                        Query(
                            ratio(
                                "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"
                            )
                        ),
                    ),
                ),
                Panel(
                    "Mean acceptance length",
                    "short",
                    (
                        Query(
                            "1 + "
                            + ratio("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"),
                            "tokens per step with drafts",
                        ),
                    ),
                ),
                Panel(
                    "Accepted, by position",
                    "short",
                    (Query(rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"), "{{position}}"),),
                ),
                Panel(
                    "Draft tokens, by result",
                    "short",
                    (
                        Query(rate("vllm:spec_decode_num_accepted_tokens_total"), "accepted"),
                        Query(rate("quire_spec_decode_rejected_tokens_total"), "rejected"),
                        Query(rate("quire_spec_decode_cut_tokens_total"), "cut by a stop"),
                    ),
                    description="Their sum is the rate of draft tokens that were verified.",
                ),
                Panel(
                    "Proposed and not verified, by reason",
                    "short",
                    (Query(rate("quire_spec_decode_unused_tokens_total", "reason"), "{{reason}}"),),
                ),
                Panel(
                    "Time of the drafter",
                    "percentunit",
                    (Query(rate("quire_spec_decode_draft_seconds_total"), "share of the time"),),
                ),
                Panel(
                    "Speculation is on",
                    "short",
                    (Query(total("quire_spec_decode_enabled"), "engines that draft"),),
                    description="0 after a drafter has failed: the answers stay the same, and nothing is drafted.",
                ),
                Panel(
                    "Draft tokens of a request",
                    "short",
                    (
                        Query(
                            ratio("quire_request_draft_tokens_sum", "quire_request_draft_tokens_count"),
                            "verified, mean",
                        ),
                        Query(
                            ratio(
                                "quire_request_accepted_draft_tokens_sum", "quire_request_accepted_draft_tokens_count"
                            ),
                            "accepted, mean",
                        ),
                    ),
                ),
            ),
        ),
        Section(
            "The ledger",
            (
                Panel(
                    "Requests",
                    "reqps",
                    (
                        Query(rate("quire_requests_received_total"), "received"),
                        Query(rate("quire_requests_accepted_total"), "accepted"),
                        Query(rate("quire_requests_finished_total"), "finished"),
                    ),
                ),
                Panel("Live", "short", (Query(total("quire_requests_live", "state"), "{{state}}"),)),
                Panel(
                    "Discarded and late tokens",
                    "short",
                    (
                        Query(rate("quire_discarded_tokens_total", "reason"), "{{reason}}"),
                        Query(rate("quire_late_tokens_total"), "late"),
                    ),
                ),
                Panel(
                    "Imbalance of the ledger",
                    "short",
                    (
                        Query(
                            " - ".join(
                                total(f"quire_requests_{name}")
                                for name in ("accepted_total", "finished_total", "live", "lost_total")
                            ),
                            "requests",
                        ),
                    ),
                    description="0 at every scrape; anything else is a fault in Quire.",
                ),
                Panel(
                    "Restarts of the core, by cause",
                    "short",
                    (Query(total("quire_engine_restarts_total", "cause"), "{{cause}}"),),
                ),
                Panel("Resumed requests", "short", (Query(total("quire_requests_resumed_total")),)),
                Panel(
                    "Dropped messages", "ops", (Query(rate("quire_dropped_messages_total", "reason"), "{{reason}}"),)
                ),
            ),
        ),
        Section(
            "Adapters, sleep, process",
            (
                Panel(
                    "Requests by LoRA adapter",
                    "short",
                    (Query(total("quire_lora_requests", "adapter, state"), "{{adapter}} {{state}}"),),
                ),
                Panel(
                    "Tokens by LoRA adapter",
                    "short",
                    (Query(rate("quire_lora_generation_tokens_total", "adapter"), "{{adapter}}"),),
                    description="Generated tokens per second; the empty name is the model itself.",
                ),
                Panel(
                    "Loads of LoRA adapters",
                    "ops",
                    (
                        Query(rate("quire_lora_loads_total", "outcome"), "{{outcome}}"),
                        Query(rate("quire_lora_evictions_total"), "evicted"),
                    ),
                ),
                Panel(
                    "Sleep state", "short", (Query(total("vllm:engine_sleep_state", "sleep_state"), "{{sleep_state}}"),)
                ),
                Panel(
                    "Memory of the server",
                    "bytes",
                    (Query(f"process_resident_memory_bytes{{{ON_INSTANCE}}}", "{{instance}}"),),
                ),
                Panel(
                    "CPU of the server",
                    "percentunit",
                    (Query(f"rate(process_cpu_seconds_total{{{ON_INSTANCE}}}[{RATE}])", "{{instance}}"),),
                ),
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, ENGINE)
