"""Rows that vLLM does not have (the ledger, the health of the core, saturation), the rows of HTTP; the whole catalog.

`METRICS` holds every row, `NOT_APPLICABLE` the names of vLLM that have none. docs/metrics.md is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter

from quire.frontend.metrics.catalog.spec import (
    LORA,
    QUIRE,
    SPEC_DECODE,
    InfoSpec,
    MetricSpec,
    Sample,
    each,
    labelled,
    of_adapters,
    of_drafts,
    of_exchange,
    of_finished,
    of_ledger,
    of_outputs,
    of_step,
)
from quire.frontend.metrics.catalog.transfer_rows import TRANSFERS
from quire.frontend.metrics.catalog.vllm_rows import (
    COUNTERS,
    ENGINE_GAUGES,
    HISTOGRAMS,
    LEGACY,
    OPERATIONS,
)
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.collect.facts import NO_DRAFTS
from quire.frontend.metrics.collect.ledger import DISCARD_REASONS, FINISH_REASONS, REJECTION_REASONS
from quire.frontend.metrics.collect.saturation import RESOURCES
from quire.frontend.routing.policy import REASONS

DROP_REASONS = ("stale", "corrupt", "repeated", "lost", "unknown")
LIVE_STATES = ("waiting", "running", "resting")
UNUSED_REASONS = (
    *("ended", "aborted", "jumped", "context", "grammar", "cap", "budget", "blocks", "preempted", "invalid"),
    "abandoned",
)
LOAD_OUTCOMES = ("loaded", "failed")
ADAPTER_STATES = ("cold", "loading", "ready", "failed")
of_own_drafts = partial(of_drafts, kind="counter", prefix=QUIRE, condition=SPEC_DECODE)


def _split(counts: Mapping[str, int], prefix: str) -> list[Sample]:
    """Returns the counts whose names begin with `prefix`; the other parts of a name, between dots, are the labels."""
    found = ((name.removeprefix(prefix), count) for name, count in counts.items() if name.startswith(prefix))
    return [(tuple(name.split(".")), count) for name, count in found]


def _tokens_of_adapters(stats: IterationStats, which: int, total: int) -> list[Sample]:
    """Returns the prompt tokens (`which` of 0) or generated ones (1) by adapter; "" for the others of `total`."""
    samples = [((name,), float(tokens[which])) for name, tokens in stats.tokens_of_adapters.items()]
    return [(("",), total - sum(count for _, count in samples)), *samples]


LEDGER: tuple[MetricSpec, ...] = (
    of_ledger(
        name="requests_received",
        help="Requests received, one per requested output.",
        value=lambda facts: facts.ledger.num_received,
    ),
    of_ledger(
        name="requests_accepted",
        help="Requests accepted.",
        value=lambda facts: facts.ledger.num_accepted,
    ),
    of_ledger(
        name="requests_rejected",
        help="Requests rejected, or cancelled before they were accepted, by reason. No work was done for them.",
        labels=("reason",),
        known=each(REJECTION_REASONS),
        samples=lambda facts: labelled(facts.ledger.rejected),
    ),
    of_ledger(
        name="requests_in_admission",
        kind="gauge",
        help="Requests received and not decided yet: received = accepted + rejected + in admission.",
        value=lambda facts: facts.ledger.num_in_admission,
    ),
    of_ledger(
        name="requests_finished",
        help="Accepted requests that have finished, by reason.",
        labels=("reason",),
        known=each(FINISH_REASONS),
        samples=lambda facts: labelled(facts.ledger.finished),
    ),
    of_ledger(
        name="requests_live",
        kind="gauge",
        help="Accepted requests that have not finished: accepted = finished + live + lost.",
        labels=("state",),
        known=each(LIVE_STATES),
        samples=lambda facts: [((state,), facts.num_live.get(state, 0)) for state in LIVE_STATES],
    ),
    of_ledger(
        name="requests_lost",
        help="Requests that were live in an API process when it was killed.",
        value=lambda facts: facts.num_lost,
    ),
    of_ledger(
        name="api_processes",
        kind="gauge",
        help="Processes in this scrape: answered, or late (represented by their last report).",
        labels=("state",),
        known=each(("answered", "late")),
        samples=lambda facts: [((state,), facts.num_processes.get(state, 0)) for state in ("answered", "late")],
    ),
    of_ledger(
        name="api_processes_lost",
        help="API processes that exited without a final report.",
        value=lambda facts: facts.num_lost_processes,
    ),
    of_ledger(
        name="queue_tokens",
        kind="gauge",
        help="Prompt tokens of requests that wait for their first token.",
        value=lambda facts: facts.num_queued_tokens,
    ),
    of_ledger(
        name="delivered_tokens",
        help="Tokens that became part of an answer: generation = delivered + discarded.",
        value=lambda facts: facts.ledger.num_delivered_tokens,
    ),
    of_ledger(
        name="discarded_tokens",
        help="Tokens generated for a live request that are no part of its answer, by reason.",
        labels=("reason",),
        known=each(DISCARD_REASONS),
        samples=lambda facts: labelled(facts.ledger.discarded_tokens),
    ),
    of_ledger(
        name="late_tokens",
        help="Tokens received for requests that had already finished; in no other count.",
        value=lambda facts: facts.ledger.num_late_tokens,
    ),
    of_ledger(
        name="requests_resumed",
        help="Requests resumed after a restart of the engine core.",
        value=lambda facts: facts.core_counts.get("resumed_requests", 0),
    ),
    of_ledger(
        name="requests_poisoned",
        help="Requests failed alone because they repeatedly crashed the engine core.",
        value=lambda facts: facts.core_counts.get("poisoned_requests", 0),
    ),
    of_ledger(
        name="restart_recomputed_tokens",
        help="Tokens recomputed after restarts of the engine core.",
        value=lambda facts: facts.core_counts.get("recomputed_tokens", 0),
    ),
    of_step(
        name="preemption_recomputed_tokens",
        kind="counter",
        help="Tokens recomputed after preemptions.",
        value=lambda stats: stats.num_recomputed_tokens,
        prefix=QUIRE,
    ),
    of_step(
        name="kv_events_dropped",
        kind="counter",
        help="Batches of KV cache events that were lost because too many waited; all that is cached followed.",
        value=lambda stats: stats.num_dropped_kv_events,
        prefix=QUIRE,
    ),
    of_ledger(
        name="engine_restarts",
        help="Restarts of the engine core, by cause.",
        labels=("cause",),
        known=each(("crash", "hang", "killed", "draft", "start", "lost")),
        samples=lambda facts: labelled(facts.core_restarts),
    ),
    of_ledger(
        name="worker_deaths",
        help="Ends of worker processes, after each of which their engine core was started again: by a signal (killed), "
        "or by themselves (exited).",
        labels=("cause",),
        known=each(("killed", "exited")),
        samples=lambda facts: _split(facts.core_counts, "worker_deaths."),
    ),
    of_ledger(
        name="dropped_messages",
        help="Messages of the engine core, or parts of them, that could not be used, by reason.",
        labels=("reason",),
        known=each(DROP_REASONS),
        samples=lambda facts: [((reason,), facts.core_counts.get(reason, 0)) for reason in DROP_REASONS],
    ),
    of_ledger(
        name="engine_ready",
        kind="gauge",
        help="1 if a request would be worked on now; 0 while the engine core is being started again.",
        value=lambda facts: float(facts.is_core_ready),
    ),
    of_ledger(
        name="engines_up",
        kind="gauge",
        help="Engines that would work on a request now.",
        value=lambda facts: float(facts.num_engines_up),
    ),
    of_ledger(
        name="engine_moves",
        help="Requests that went on at another engine, by the engine they left and the reason.",
        labels=("engine", "reason"),
        samples=lambda facts: _split(facts.core_counts, "moves."),
    ),
    of_ledger(
        name="engine_moved_tokens_recomputed",
        help="Tokens of moved requests that the other engine computed again.",
        value=lambda facts: facts.core_counts.get("moved_tokens", 0),
    ),
    of_ledger(
        name="foreign_numerics_moves",
        help="Streams that went on at an engine that may compute other bits (--reroute-any-numerics).",
        value=lambda facts: facts.core_counts.get("foreign_moves", 0),
    ),
    of_ledger(
        name="router_decisions",
        help="Choices of an engine for a request, by reason.",
        labels=("why",),
        known=each(REASONS),
        samples=lambda facts: _split(facts.core_counts, "routed."),
    ),
    of_ledger(
        name="router_expected_cached_tokens",
        help="Tokens of placed requests that the router expected in the engine's prefix cache.",
        value=lambda facts: facts.core_counts.get("expected_cached_tokens", 0),
    ),
    of_step(
        name="dp_wave",
        kind="gauge",
        help="Waves of engines that step together (they share experts, or --dp-coordinator always) that are over.",
        value=lambda stats: stats.current_wave,
        prefix=QUIRE,
    ),
    of_step(
        name="dummy_batches",
        kind="counter",
        help="Steps without requests that an engine ran because others waited for it.",
        value=lambda stats: stats.num_dummy_batches,
        prefix=QUIRE,
    ),
    of_step(
        name="barrier_wait_seconds",
        kind="counter",
        help="Time that the workers of --tensor-parallel-size have waited for one another, added up over the workers.",
        value=lambda stats: stats.barrier_wait_seconds,
        prefix=QUIRE,
    ),
    of_ledger(
        name="engine_step_age_seconds",
        kind="gauge",
        help="Seconds since the last step, while there is work; else 0.",
        value=lambda facts: facts.step_age_s,
    ),
    of_step(
        name="kv_blocks",
        kind="gauge",
        help="Blocks of the KV cache: used by requests, free with reusable content, free without, held by transfers.",
        labels=("state",),
        known=each(("used", "cached", "free", "held")),
        samples=lambda stats: (
            (("used",), stats.num_used_blocks),
            (("cached",), stats.num_cached_blocks),
            (("free",), stats.num_free_blocks),
            (("held",), stats.num_held_blocks),
        ),
        prefix=QUIRE,
    ),
    of_ledger(
        name="saturation",
        kind="gauge",
        help="How close the engine is to its limit, in [0, 1], for any mix of requests.",
        value=lambda facts: facts.saturation.value,
    ),
    of_ledger(
        name="saturation_by_resource",
        kind="gauge",
        help="The shares whose largest is quire_saturation.",
        labels=("resource",),
        known=each(RESOURCES),
        samples=lambda facts: labelled(facts.saturation.by_resource),
    ),
    of_ledger(
        name="saturation_limit_tokens_per_second",
        kind="gauge",
        help="Prompt and output tokens per second at which compute would be used up, measured for the present mix.",
        value=lambda facts: facts.saturation.limit_tokens_per_s,
    ),
    of_own_drafts(
        name="spec_decode_rejected_tokens",
        help="Draft tokens that differ from the token drawn: draft = accepted + rejected + cut.",
        value=lambda drafts: drafts.num_rejected_tokens,
    ),
    of_own_drafts(
        name="spec_decode_cut_tokens",
        help="Draft tokens that matched behind the end of their request.",
        value=lambda drafts: drafts.num_cut_tokens,
    ),
    of_own_drafts(
        name="spec_decode_proposed_tokens",
        help="Tokens that the drafter proposed: proposed = draft + unused + in flight.",
        value=lambda drafts: drafts.num_proposed_tokens,
    ),
    of_own_drafts(
        name="spec_decode_unused_tokens",
        help="Proposed tokens that were never verified, by reason.",
        labels=("reason",),
        known=each(UNUSED_REASONS),
        samples=lambda drafts: labelled(drafts.num_unused_tokens),
    ),
    of_own_drafts(
        name="spec_decode_draft_seconds",
        help="Seconds that the drafter took.",
        value=lambda drafts: drafts.draft_seconds,
    ),
    of_finished(
        name="request_draft_tokens",
        help="Verified draft tokens of a finished request; they add up to spec_decode_num_draft_tokens at rest.",
        value=attrgetter("num_draft_tokens"),
        prefix=QUIRE,
        family="request_tokens",
        condition=SPEC_DECODE,
    ),
    of_finished(
        name="request_accepted_draft_tokens",
        help="Accepted draft tokens of a finished request; they add up to spec_decode_num_accepted_tokens at rest.",
        value=attrgetter("num_accepted_draft_tokens"),
        prefix=QUIRE,
        family="request_tokens",
        condition=SPEC_DECODE,
    ),
    of_ledger(
        name="spec_decode_enabled",
        kind="gauge",
        help="1 while drafts are made; 0 after the drafter has failed.",
        value=lambda facts: float(not facts.core_counts[NO_DRAFTS]) if NO_DRAFTS in facts.core_counts else None,
        condition=SPEC_DECODE,
    ),
    of_ledger(
        name="lora_requests",
        kind="gauge",
        help="Live requests by LoRA adapter: the busiest adapters, and the others as `other`.",
        labels=("adapter", "state"),
        samples=lambda facts: [((adapter, state), count) for adapter, state, count in facts.adapters.capped()],
        condition=LORA,
    ),
    of_outputs(
        name="lora_prompt_tokens",
        kind="counter",
        help="Prompt tokens by LoRA adapter, the empty label for the model itself: their sum is vllm:prompt_tokens.",
        labels=("adapter",),
        known=(("",),),
        samples=lambda stats: _tokens_of_adapters(stats, 0, stats.num_prompt_tokens),
        prefix=QUIRE,
        condition=LORA,
    ),
    of_outputs(
        name="lora_generation_tokens",
        kind="counter",
        help="Generated tokens in the same way: their sum is vllm:generation_tokens.",
        labels=("adapter",),
        known=(("",),),
        samples=lambda stats: _tokens_of_adapters(stats, 1, stats.num_generation_tokens),
        prefix=QUIRE,
        condition=LORA,
    ),
    of_adapters(
        name="lora_loads",
        kind="counter",
        help="Loads of LoRA adapters, by outcome.",
        labels=("outcome",),
        known=each(LOAD_OUTCOMES),
        samples=lambda adapters: labelled(adapters.num_loads),
    ),
    of_adapters(
        name="lora_load_seconds",
        kind="histogram",
        help="Seconds that a load of a LoRA adapter took.",
        values=attrgetter("load_seconds"),
        family="adapter",
    ),
    of_adapters(
        name="lora_wait_seconds",
        kind="histogram",
        help="Seconds that a request waited for its LoRA adapter, if it waited.",
        values=attrgetter("wait_seconds"),
        family="adapter",
    ),
    of_adapters(
        name="lora_evictions",
        kind="counter",
        help="LoRA adapters dropped to make room for others.",
        value=attrgetter("num_evictions"),
    ),
    of_adapters(
        name="lora_resident_bytes",
        kind="gauge",
        help="Memory of the loaded LoRA adapters.",
        value=attrgetter("resident_bytes"),
    ),
    of_adapters(
        name="lora_adapters",
        kind="gauge",
        help="Known LoRA adapters, by state: cold ones are loaded when a request needs them.",
        labels=("state",),
        known=each(ADAPTER_STATES),
        samples=lambda adapters: labelled(adapters.num_adapters),
    ),
)

HTTP: tuple[MetricSpec, ...] = (
    of_exchange(
        name="http_requests",
        kind="counter",
        help="HTTP requests by method, status class and route; without health probes.",
        labels=("method", "status", "handler"),
        samples=lambda done: (((done.method, f"{done.status // 100}xx", done.handler), 1),),
    ),
    of_exchange(
        name="http_request_duration_seconds",
        kind="histogram",
        help="Seconds from an HTTP request to the end of its response, by method and route.",
        labels=("method", "handler"),
        samples=lambda done: (((done.method, done.handler), done.duration_s),),
        family="http",
    ),
    of_exchange(
        name="http_request_duration_highr_seconds",
        kind="histogram",
        help="The same in finer buckets, without labels.",
        value=lambda done: done.duration_s,
        family="http_highr",
    ),
    of_exchange(
        name="http_request_size_bytes",
        kind="summary",
        help="Sizes of HTTP request bodies, as announced, by route.",
        labels=("handler",),
        samples=lambda done: (((done.handler,), done.request_bytes),),
    ),
    of_exchange(
        name="http_response_size_bytes",
        kind="summary",
        help="Sizes of HTTP response bodies, by route.",
        labels=("handler",),
        samples=lambda done: (((done.handler,), done.response_bytes),),
    ),
)


METRICS: tuple[MetricSpec, ...] = (
    *(*ENGINE_GAUGES, *COUNTERS, *HISTOGRAMS, *OPERATIONS, *LEDGER, *TRANSFERS, *HTTP, *LEGACY),
)

CACHE_CONFIG_INFO = InfoSpec(
    name="cache_config_info", help="Configuration of the KV cache, and values found at start-up."
)
BUILD_INFO = InfoSpec(name="build_info", help="Version of Quire.", prefix=QUIRE)
INFOS: tuple[InfoSpec, ...] = (CACHE_CONFIG_INFO, BUILD_INFO)

NOT_APPLICABLE: dict[str, str] = {
    "num_requests_kv_fetch_by_stage": "loads have no stages here; see quire_kv_loads_in_flight",
    "watermark_requests": "outputs are not watermarked",
    "diffusion_*": "no diffusion models are served",
    "estimated_flops_per_gpu_total": "work is measured, not estimated: --enable-mfu-metrics does not exist",
    "estimated_read_bytes_per_gpu_total": "see estimated_flops_per_gpu_total",
    "estimated_write_bytes_per_gpu_total": "see estimated_flops_per_gpu_total",
    "kv_offload_*": "KV blocks are not offloaded",
    "simple_kv_offload_*": "KV blocks are not offloaded",
    "nixl_*": "blocks of other engines come by a protocol of its own: quire_kv_loads, quire_kv_leases",
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
