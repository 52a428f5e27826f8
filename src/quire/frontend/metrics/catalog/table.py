"""The whole catalog: every row, and the names of vLLM that have none. docs/metrics.md is made of it."""

from __future__ import annotations

from quire.frontend.metrics.catalog.quire_rows import HTTP, LEDGER
from quire.frontend.metrics.catalog.spec import QUIRE, InfoSpec, MetricSpec
from quire.frontend.metrics.catalog.vllm_rows import (
    COUNTERS,
    ENGINE_GAUGES,
    HISTOGRAMS,
    LEGACY,
    OPERATIONS,
)

METRICS: tuple[MetricSpec, ...] = (*ENGINE_GAUGES, *COUNTERS, *HISTOGRAMS, *OPERATIONS, *LEDGER, *HTTP, *LEGACY)

CACHE_CONFIG_INFO = InfoSpec(
    name="cache_config_info", help="Configuration of the KV cache, and values found at start-up."
)
BUILD_INFO = InfoSpec(name="build_info", help="Version of Quire.", prefix=QUIRE)
INFOS: tuple[InfoSpec, ...] = (CACHE_CONFIG_INFO, BUILD_INFO)

NOT_APPLICABLE: dict[str, str] = {
    "num_requests_kv_fetch_by_stage": "there is no transfer of KV blocks between engines",
    "watermark_requests": "outputs are not watermarked",
    "diffusion_*": "no diffusion models are served",
    "estimated_flops_per_gpu_total": "work is measured, not estimated: --enable-mfu-metrics does not exist",
    "estimated_read_bytes_per_gpu_total": "see estimated_flops_per_gpu_total",
    "estimated_write_bytes_per_gpu_total": "see estimated_flops_per_gpu_total",
    "kv_offload_*": "KV blocks are not offloaded",
    "simple_kv_offload_*": "KV blocks are not offloaded",
    "nixl_*": "there is no NIXL connector",
    "hisparse_*": "there is no hierarchical sparse cache",
    "hf3fs_*": "there is no 3FS connector",
    "mooncake_store_*": "there is no Mooncake connector",
    "tool_call_parser_invocations_total": "its label values are not documented; http_requests_total counts the calls",
    "websocket_*": "there are no websocket routes",
    "model_forward_time_milliseconds": "the frontend does not see the parts of a step",
    "model_execute_time_milliseconds": "see model_forward_time_milliseconds",
    "gpu_prefix_cache_hit_rate": "a rate: divide prefix_cache_hits by prefix_cache_queries",
    "cpu_prefix_cache_hit_rate": "there is no swap space; see gpu_prefix_cache_hit_rate",
    "spec_decode_draft_acceptance_rate": "a rate: divide spec_decode_num_accepted_tokens by _num_draft_tokens",
    "spec_decode_efficiency": "a rate: compute it from the spec_decode counters",
    "spec_decode_num_emitted_tokens": "it is spec_decode_num_accepted_tokens plus _num_drafts",
}
"""vLLM's names (without the prefix; `*` for any end) that are not exported, and why."""
