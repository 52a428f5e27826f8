"""The rows with vLLM's names, so that dashboards and autoscalers made for it work: name, kind, help, labels, buckets,
and where the value comes from.

`LEGACY` are names of vLLM's first engine: exported with --show-hidden-metrics-for-version only.
"""

from __future__ import annotations

from operator import attrgetter

from quire.frontend.metrics.catalog.spec import (
    KV_SAMPLING,
    LEGACY_NAMES,
    LORA,
    MODEL_LABEL,
    NANS,
    SPEC_DECODE,
    MetricSpec,
    Sample,
    each,
    labelled,
    of_drafts,
    of_evictions,
    of_facts,
    of_finished,
    of_outputs,
    of_prefills,
    of_step,
)
from quire.frontend.metrics.collect.events import (
    SLEEP_OPERATIONS,
    WEIGHT_OPERATIONS,
    ControlOperation,
    FinishedRequestStats,
    FirstToken,
)
from quire.frontend.metrics.collect.facts import MAX_ADAPTER_SERIES, FrontendFacts
from quire.wire.engine_core import FINISH_REASON_STRINGS
from quire.wire.stats import SpecDecodingStats

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""Names of the sleep levels 0, 1 and 2."""


def _accepted_per_position(drafts: SpecDecodingStats) -> list[Sample]:
    return [((str(position),), count) for position, count in enumerate(drafts.num_accepted_tokens_per_pos)]


def _adapter_lists(facts: FrontendFacts) -> list[Sample]:
    lists = (
        ",".join(sorted(name for name, count in counts.items() if count)[:MAX_ADAPTER_SERIES])
        for counts in (facts.adapters.waiting, facts.adapters.running)
    )
    return [((str(facts.max_lora), *lists), facts.time)]


ENGINE_GAUGES: tuple[MetricSpec, ...] = (
    of_step(
        name="num_requests_running",
        kind="gauge",
        help="Requests being run, as of the last step.",
        value=attrgetter("num_running_reqs"),
    ),
    of_step(
        name="num_requests_waiting",
        kind="gauge",
        help="Requests waiting to be scheduled, as of the last step.",
        value=lambda stats: stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
    ),
    of_step(
        name="num_requests_waiting_by_reason",
        kind="gauge",
        help="The same by reason: capacity, or deferred (a grammar, the next input of a session).",
        labels=("reason",),
        known=each(("capacity", "deferred")),
        samples=lambda stats: (
            (("capacity",), stats.num_waiting_reqs),
            (("deferred",), stats.num_skipped_waiting_reqs),
        ),
    ),
    of_facts(
        name="engine_sleep_state",
        kind="gauge",
        help="1 for the present state of the engine: awake, asleep with its weights, or asleep without them.",
        labels=("sleep_state",),
        known=each(SLEEP_STATES),
        samples=lambda facts: [
            ((state,), float(facts.sleep_level == level)) for level, state in enumerate(SLEEP_STATES)
        ],
    ),
    of_step(
        name="kv_cache_usage_perc",
        kind="gauge",
        help="Share of KV-cache blocks used by requests; 1 is all of them.",
        value=attrgetter("kv_cache_usage"),
    ),
    of_step(
        name="gpu_cache_usage_perc",
        kind="gauge",
        help="Deprecated: use vllm:kv_cache_usage_perc, which this equals. Kept because autoscalers query it.",
        value=attrgetter("kv_cache_usage"),
    ),
    of_facts(
        name="lora_requests_info",
        kind="gauge",
        help="Adapters with requests, as lists in the labels. The value is the time.",
        base_labels=(),
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        samples=_adapter_lists,
        condition=LORA,
    ),
)

COUNTERS: tuple[MetricSpec, ...] = (
    of_step(
        name="prefix_cache_queries",
        kind="counter",
        help="Prompt tokens looked up in the prefix cache, at the first admission of each request.",
        value=attrgetter("prefix_cache_stats.queries"),
    ),
    of_step(
        name="prefix_cache_hits",
        kind="counter",
        help="Prompt tokens found in the prefix cache.",
        value=attrgetter("prefix_cache_stats.hits"),
    ),
    of_step(
        name="external_prefix_cache_queries",
        kind="counter",
        help="Tokens looked up in stores outside the engine: those that its prefix cache did not have, at the first "
        "admission of each request. 0 without a connector.",
        value=lambda stats: None if stats.kv_transfer is None else stats.kv_transfer.prefix_cache_stats.queries,
    ),
    of_step(
        name="external_prefix_cache_hits",
        kind="counter",
        help="Tokens that were loaded from stores outside the engine and used. 0 without a connector.",
        value=lambda stats: None if stats.kv_transfer is None else stats.kv_transfer.prefix_cache_stats.hits,
    ),
    of_step(
        name="mm_cache_queries",
        kind="counter",
        help="Images and sounds looked up in the cache of processed ones. There are none yet. Always 0.",
    ),
    of_step(
        name="mm_cache_hits",
        kind="counter",
        help="Images and sounds found in the cache of processed ones. Always 0.",
    ),
    of_outputs(
        name="num_preemptions",
        kind="counter",
        help="Preemptions: a request lost its blocks to other requests.",
        value=attrgetter("num_preempted_reqs"),
    ),
    of_prefills(
        name="prompt_tokens",
        kind="counter",
        help="Prompt tokens of requests with a first token, cached ones included.",
        value=attrgetter("num_prompt_tokens"),
    ),
    of_prefills(
        name="prompt_tokens_by_source",
        kind="counter",
        help="The same by the source of their keys and values.",
        labels=("source",),
        known=each(("local_compute", "local_cache_hit", "external_kv_transfer")),
        samples=lambda prefills: (
            (("local_compute",), prefills.num_computed_tokens),
            (("local_cache_hit",), prefills.num_local_cached_tokens),
            (("external_kv_transfer",), prefills.num_external_cached_tokens),
        ),
    ),
    of_prefills(
        name="prompt_tokens_cached",
        kind="counter",
        help="Prompt tokens that were found in a cache.",
        value=attrgetter("num_cached_tokens"),
    ),
    of_prefills(
        name="prompt_tokens_cached_by_source",
        kind="counter",
        help="The same by location of the cache. Quire's own is the device.",
        labels=("source",),
        known=each(("device", "host", "p2p", "disk", "external_unspecified")),
        samples=lambda prefills: (
            (("device",), prefills.num_local_cached_tokens),
            *labelled(prefills.external_by_source),
        ),
    ),
    of_outputs(
        name="generation_tokens",
        kind="counter",
        help="Tokens generated for live requests.",
        value=attrgetter("num_generation_tokens"),
    ),
    MetricSpec(
        name="request_success",
        kind="counter",
        help="Finished requests, by reason; each output of a prompt counts.",
        source=FinishedRequestStats,
        labels=("finished_reason",),
        known=each(FINISH_REASON_STRINGS),
        samples=lambda finished: (((FINISH_REASON_STRINGS[finished.finish_reason],), 1),),
    ),
    of_outputs(
        name="corrupted_requests",
        kind="counter",
        help="Requests with a NaN in their logits.",
        value=attrgetter("num_corrupted_reqs"),
        condition=NANS,
    ),
    of_facts(
        name="admission_rejections",
        kind="counter",
        help="User requests rejected because the queue was full, by limit.",
        base_labels=MODEL_LABEL,
        labels=("reason",),
        known=each(("max_num_queued_reqs", "max_num_queued_tokens")),
        samples=lambda facts: labelled(facts.admission_rejections),
        is_total=True,
    ),
    of_drafts(
        name="spec_decode_num_drafts",
        kind="counter",
        help="Verified drafts.",
        value=attrgetter("num_drafts"),
        condition=SPEC_DECODE,
    ),
    of_drafts(
        name="spec_decode_num_draft_tokens",
        kind="counter",
        help="Draft tokens.",
        value=attrgetter("num_draft_tokens"),
        condition=SPEC_DECODE,
    ),
    of_drafts(
        name="spec_decode_num_accepted_tokens",
        kind="counter",
        help="Accepted draft tokens.",
        value=attrgetter("num_accepted_tokens"),
        condition=SPEC_DECODE,
    ),
    of_drafts(
        name="spec_decode_num_accepted_tokens_per_pos",
        kind="counter",
        help="The same by position in the draft.",
        labels=("position",),
        samples=_accepted_per_position,
        condition=SPEC_DECODE,
    ),
)

HISTOGRAMS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="time_to_first_token_seconds",
        kind="histogram",
        help="Seconds from the arrival of a request to its first token.",
        source=FirstToken,
        value=attrgetter("latency"),
        has_owners=True,
        family="time_to_first_token",
    ),
    of_outputs(
        name="inter_token_latency_seconds",
        kind="histogram",
        help="Seconds from one output of a request to the next, preemptions included.",
        counted=attrgetter("inter_token_latencies"),
        family="inter_token_latency",
    ),
    of_finished(
        name="request_time_per_output_token_seconds",
        help="Mean seconds between the tokens of a finished request; 0 for one token.",
        value=attrgetter("mean_time_per_output_token"),
        family="inter_token_latency",
    ),
    of_finished(
        name="e2e_request_latency_seconds",
        help="Seconds from the arrival of a request to its end, for every finish reason.",
        value=attrgetter("e2e_latency"),
        family="request_latency",
    ),
    of_finished(
        name="request_queue_time_seconds",
        help="Seconds from the scheduler's receipt of a request to its first scheduling; only of scheduled requests.",
        value=attrgetter("queued_time"),
        family="request_latency",
    ),
    of_finished(
        name="request_inference_time_seconds",
        help="Seconds from the first scheduling to the last token, preemptions included.",
        value=attrgetter("inference_time"),
        family="request_latency",
    ),
    of_finished(
        name="request_prefill_time_seconds",
        help="Seconds from the first scheduling to the first token, preemptions included.",
        value=attrgetter("prefill_time"),
        family="request_latency",
    ),
    of_finished(
        name="request_decode_time_seconds",
        help="Seconds from the first token to the last, preemptions included.",
        value=attrgetter("decode_time"),
        family="request_latency",
    ),
    of_step(
        name="iteration_tokens_total",
        kind="histogram",
        help="Tokens per step: computed prompt tokens of requests with a first token, and generated tokens.",
        value=lambda stats: (stats.num_prefilled_tokens + stats.num_generation_tokens) or None,
        family="iteration_tokens",
    ),
    of_finished(
        name="request_prompt_tokens",
        help="Prompt tokens of a finished request.",
        value=attrgetter("num_prompt_tokens"),
        family="request_tokens",
    ),
    of_finished(
        name="request_generation_tokens",
        help="Generated tokens of a finished request.",
        value=attrgetter("num_generation_tokens"),
        family="request_tokens",
    ),
    of_outputs(
        name="request_max_num_generation_tokens",
        kind="histogram",
        help="Tokens of the longest output of a finished user request.",
        values=attrgetter("max_num_generation_tokens"),
        family="request_tokens",
    ),
    of_finished(
        name="request_params_max_tokens",
        help="max_tokens of a finished request, if it was set.",
        value=attrgetter("max_tokens_param"),
        family="request_tokens",
    ),
    of_finished(
        name="request_prefill_kv_computed_tokens",
        help="Computed prompt tokens of a finished request: those not found in the cache.",
        value=lambda finished: max(0, finished.num_prompt_tokens - finished.num_cached_tokens),
        family="request_tokens",
    ),
    of_outputs(
        name="request_params_n",
        kind="histogram",
        help="n of a finished user request.",
        values=attrgetter("n_params"),
        family="num_outputs",
    ),
    of_finished(
        name="request_num_preemptions",
        help="Preemptions of a finished request.",
        value=attrgetter("num_preemptions"),
        family="num_preemptions",
    ),
    of_evictions(
        name="kv_block_lifetime_seconds",
        kind="histogram",
        help="Seconds from the allocation of a sampled block to its eviction from the prefix cache.",
        value=attrgetter("lifetime_s"),
        family="kv_residency",
        condition=KV_SAMPLING,
    ),
    of_evictions(
        name="kv_block_idle_before_evict_seconds",
        kind="histogram",
        help="Seconds from the last use of a sampled block to its eviction.",
        value=attrgetter("idle_s"),
        family="kv_residency",
        condition=KV_SAMPLING,
    ),
    of_evictions(
        name="kv_block_reuse_gap_seconds",
        kind="histogram",
        help="Seconds between the last few uses of a sampled block before its eviction.",
        values=attrgetter("reuse_gaps_s"),
        family="kv_residency",
        condition=KV_SAMPLING,
    ),
)


def _operation_rows(name: str, what: str, operations: tuple[str, ...]) -> tuple[MetricSpec, ...]:
    def read_duration(done: ControlOperation) -> list[Sample]:
        return [((done.operation,), done.duration_s)] if done.operation in operations else []

    def read_in_flight(facts: FrontendFacts) -> list[Sample]:
        return [((operation,), facts.operations_in_flight.get(operation, 0)) for operation in operations]

    return (
        MetricSpec(
            name=f"{name}_operation_duration_seconds",
            kind="histogram",
            help=f"{what}: seconds per operation.",
            source=ControlOperation,
            labels=("operation",),
            known=each(operations),
            samples=read_duration,
            family="operation",
        ),
        of_facts(
            name=f"{name}_operations_in_flight",
            kind="gauge",
            help=f"{what}: number in progress.",
            labels=("operation",),
            known=each(operations),
            samples=read_in_flight,
        ),
    )


OPERATIONS: tuple[MetricSpec, ...] = (
    *_operation_rows("sleep_mode", "Operations of sleeping and waking", SLEEP_OPERATIONS),
    *_operation_rows("rl_weight_update", "Operations on the weights; Quire has `update`", WEIGHT_OPERATIONS),
)

LEGACY: tuple[MetricSpec, ...] = (
    of_facts(
        name="num_requests_swapped",
        kind="gauge",
        help="Deprecated: requests are recomputed, never swapped out. Always 0.",
        value=lambda facts: 0.0,
        condition=LEGACY_NAMES,
    ),
    of_facts(
        name="cpu_cache_usage_perc",
        kind="gauge",
        help="Deprecated: there is no swap space. Always 0. See vllm:kv_cache_usage_perc.",
        value=lambda facts: 0.0,
        condition=LEGACY_NAMES,
    ),
    of_outputs(
        name="tokens",
        kind="counter",
        help="Deprecated: use vllm:prompt_tokens and vllm:generation_tokens, whose sum this is.",
        value=lambda stats: stats.num_prompt_tokens + stats.num_generation_tokens,
        condition=LEGACY_NAMES,
    ),
    of_outputs(
        name="time_per_output_token_seconds",
        kind="histogram",
        help="Deprecated: use vllm:inter_token_latency_seconds, which this equals.",
        counted=attrgetter("inter_token_latencies"),
        family="inter_token_latency",
        condition=LEGACY_NAMES,
    ),
    of_finished(
        name="time_in_queue_requests",
        help="Deprecated: use vllm:request_queue_time_seconds, which this equals.",
        value=attrgetter("queued_time"),
        family="request_latency",
        condition=LEGACY_NAMES,
    ),
)
"""Names of vLLM's first engine that can be computed."""
