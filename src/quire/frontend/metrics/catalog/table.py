"""The whole catalog: every row, the names of vLLM that have none, and the page docs/metrics.md made of them."""

from __future__ import annotations

from collections.abc import Iterable

from quire.frontend.metrics.catalog.quire_rows import HTTP, LEDGER
from quire.frontend.metrics.catalog.spec import FAMILIES, QUIRE, TOKENS, VLLM, InfoSpec, MetricSpec
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

_SECTIONS: tuple[tuple[str, tuple[MetricSpec, ...]], ...] = (
    ("Gauges of the engine", ENGINE_GAUGES),
    ("Counters", COUNTERS),
    ("Histograms", HISTOGRAMS),
    ("Control operations", OPERATIONS),
    ("The ledger, and other metrics that vLLM does not have", LEDGER),
    ("HTTP", HTTP),
    ("Older names", LEGACY),
)


def make_metrics_page(introduction: str) -> str:
    """`introduction`, and a table of every metric."""
    parts = [introduction.rstrip()]
    parts += [f"## {title}\n\n{_table(specs)}" for title, specs in _SECTIONS]
    infos = "\n".join(f"| `{info.full_name}` | gauge, 1 | {info.help} |" for info in INFOS)
    parts.append(f"## Facts as labels\n\n| metric | kind | meaning |\n|---|---|---|\n{infos}")
    parts.append("## Bounds of histograms\n\n" + _bounds())
    reasons = "\n".join(f"| `{VLLM}{name}` | {reason} |" for name, reason in NOT_APPLICABLE.items())
    parts.append(f"## Metrics of vLLM that Quire does not export\n\n| metric | why |\n|---|---|\n{reasons}")
    return "\n\n".join(parts) + "\n"


def _table(specs: Iterable[MetricSpec]) -> str:
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for spec in specs:
        name = spec.full_name + ("_total" if spec.kind == "counter" else "")
        kind = spec.kind + (f", {spec.family}" if spec.family else "")
        labels = ", ".join(spec.base_labels + tuple(_describe_label(spec, label) for label in spec.labels)) or "none"
        only = f" Only with {spec.condition}." if spec.condition else ""
        rows.append(f"| `{name}` | {kind} | {labels} | {spec.help}{only} |")
    return "\n".join(rows)


def _describe_label(spec: MetricSpec, label: str) -> str:
    position = spec.labels.index(label)
    values = dict.fromkeys(known[position] for known in spec.known)
    return label + (f" ({', '.join(values)})" if values else "")


def _bounds() -> str:
    rows = ["| family | bounds |", "|---|---|"]
    rows += [f"| `{name}` | {', '.join(f'{bound:g}' for bound in bounds)} |" for name, bounds in FAMILIES.items()]
    rows.append(f"| `{TOKENS}` | 1, 2, 5, 10, 20, 50 … up to the model's context |")
    return "\n".join(rows)
