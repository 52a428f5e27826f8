"""The metrics, one row each: name, kind, help, labels, buckets, and where the value comes from. Nothing else names one.

`VLLM` names are vLLM's, so that dashboards and autoscalers made for it work; `QUIRE` names are what it does not have.
`LEGACY` rows are names of its first engine that are gone from it: shown with --show-hidden-metrics-for-version.
`NOT_APPLICABLE` are those of its names that Quire does not export, each with the reason. A new metric is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from quire.frontend.metrics.exchange import HttpExchange
from quire.frontend.metrics.facts import FrontendFacts
from quire.frontend.metrics.ledger import DISCARD_REASONS, FINISH_REASONS, REJECTION_REASONS
from quire.frontend.metrics.operations import SLEEP_OPERATIONS, WEIGHT_OPERATIONS, ControlOperation
from quire.frontend.metrics.saturation import RESOURCES
from quire.frontend.metrics.snapshot import Kind, MergeRule
from quire.frontend.metrics.stats import FinishedRequestStats, IterationStats, RequestOwner
from quire.wire.engine_core import FINISH_REASON_STRINGS
from quire.wire.stats import SchedulerStats, SpecDecodingStats

VLLM = "vllm:"
QUIRE = "quire_"
ENGINE_LABELS = ("model_name", "engine")
MODEL_LABEL = ("model_name",)

Sample = tuple[tuple[str, ...], float]
"""Values of the row's own labels, and what to set, add or observe."""
Condition = str
"""Why a row is left out of a server: a feature that is off. Empty: never."""
SPEC_DECODE, LORA = "speculation", "LoRA"
KV_SAMPLING = "--kv-cache-metrics"
NANS = "QUIRE_COMPUTE_NANS_IN_LOGITS=1"
LEGACY_NAMES = "--show-hidden-metrics-for-version"
LAZY = frozenset({SPEC_DECODE, LORA})
"""Features whose rows show themselves as soon as they have something to say, too."""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """A row. `source` is the event its value is read from, by `values` or, where it has labels, by `samples`.

    A counter adds what is read and a histogram observes it, at each event. A gauge, and a counter with `is_total`, is
    what the last event says. `SchedulerStats` come once per step; `IterationStats` for each batch of outputs;
    `FrontendFacts` are made for each snapshot.
    """

    name: str
    kind: Kind
    help: str
    source: type
    values: Callable[[Any], Iterable[float]] | None = None
    samples: Callable[[Any], Iterable[Sample]] | None = None
    prefix: str = VLLM
    base_labels: tuple[str, ...] = ENGINE_LABELS
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()
    """Label values whose series are there from the start."""
    family: str = ""
    """Of its buckets (`buckets.FAMILIES`)."""
    owners: Callable[[Any], Iterable[RequestOwner]] | None = None
    """Whose the values are, for exemplars."""
    is_total: bool = False
    merge: MergeRule = "latest"
    """How gauges of several frontends become one."""
    condition: Condition = ""

    @property
    def full_name(self) -> str:
        """With its prefix, without `_total`."""
        return self.prefix + self.name


@dataclass(frozen=True, kw_only=True)
class InfoSpec:
    """A gauge of 1 whose labels say something that does not change."""

    name: str
    help: str
    prefix: str = VLLM

    @property
    def full_name(self) -> str:
        """With its prefix."""
        return self.prefix + self.name


_scheduler = partial(MetricSpec, source=SchedulerStats)
_iteration = partial(MetricSpec, source=IterationStats)
_finished = partial(MetricSpec, source=FinishedRequestStats, kind="histogram", owners=lambda f: (f.owner,))
_facts = partial(MetricSpec, source=FrontendFacts)
_ledger = partial(
    MetricSpec, source=FrontendFacts, kind="counter", prefix=QUIRE, base_labels=MODEL_LABEL, is_total=True
)
_http = partial(MetricSpec, source=HttpExchange, prefix="", base_labels=())


def _each(values: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


def _labelled(counts: Mapping[str, float]) -> list[Sample]:
    return [((label,), value) for label, value in counts.items()]


def _some(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)


def _spec_decode(read: Callable[[SpecDecodingStats], float]) -> Callable[[SchedulerStats], tuple[float, ...]]:
    return lambda stats: () if stats.spec_decoding_stats is None else (read(stats.spec_decoding_stats),)


def _accepted_per_position(stats: SchedulerStats) -> list[Sample]:
    spec = stats.spec_decoding_stats
    counts = () if spec is None else spec.num_accepted_tokens_per_pos
    return [((str(position),), count) for position, count in enumerate(counts)]


ENGINE_GAUGES: tuple[MetricSpec, ...] = (
    _scheduler(
        name="num_requests_running",
        kind="gauge",
        help="Requests that take part in steps, as of the last step.",
        values=lambda stats: (stats.num_running_reqs,),
    ),
    _scheduler(
        name="num_requests_waiting",
        kind="gauge",
        help="Requests that wait to be scheduled, for whatever reason, as of the last step.",
        values=lambda stats: (stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,),
    ),
    _scheduler(
        name="num_requests_waiting_by_reason",
        kind="gauge",
        help="The same by what they wait for: capacity, or something else (a grammar, a session's next input).",
        labels=("reason",),
        known=_each(("capacity", "deferred")),
        samples=lambda stats: (
            (("capacity",), stats.num_waiting_reqs),
            (("deferred",), stats.num_skipped_waiting_reqs),
        ),
    ),
    _facts(
        name="engine_sleep_state",
        kind="gauge",
        help="1 for the state the engine is in: awake, asleep with its weights kept, or without them.",
        labels=("sleep_state",),
        known=_each(("awake", "weights_offloaded", "discard_all")),
        samples=lambda facts: [
            ((state,), float(facts.sleep_level == level))
            for level, state in enumerate(("awake", "weights_offloaded", "discard_all"))
        ],
    ),
    _scheduler(
        name="kv_cache_usage_perc",
        kind="gauge",
        help="Share of the KV cache's blocks that requests hold; 1 is all of them.",
        values=lambda stats: (stats.kv_cache_usage,),
    ),
    _scheduler(
        name="gpu_cache_usage_perc",
        kind="gauge",
        help="Deprecated: use vllm:kv_cache_usage_perc, which this equals. Kept because autoscalers ask for it.",
        values=lambda stats: (stats.kv_cache_usage,),
    ),
    _facts(
        name="lora_requests_info",
        kind="gauge",
        help="Adapters with requests, as lists in its labels. The value is the time.",
        base_labels=(),
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        samples=lambda facts: (
            [
                (
                    (
                        str(facts.max_lora),
                        ",".join(sorted(facts.adapters.waiting)[:50]),
                        ",".join(sorted(facts.adapters.running)[:50]),
                    ),
                    facts.time,
                )
            ]
            if facts.max_lora or facts.adapters.running or facts.adapters.waiting
            else []
        ),
        condition=LORA,
    ),
)

COUNTERS: tuple[MetricSpec, ...] = (
    _scheduler(
        name="prefix_cache_queries",
        kind="counter",
        help="Prompt tokens looked up in the prefix cache, at the first admission of each request.",
        values=lambda stats: (stats.prefix_cache_stats.queries,),
    ),
    _scheduler(
        name="prefix_cache_hits",
        kind="counter",
        help="Prompt tokens that were found there.",
        values=lambda stats: (stats.prefix_cache_stats.hits,),
    ),
    _scheduler(
        name="external_prefix_cache_queries",
        kind="counter",
        help="Prompt tokens looked up in caches of other engines. There are none yet: always 0.",
        values=lambda stats: (),
    ),
    _scheduler(
        name="external_prefix_cache_hits",
        kind="counter",
        help="Prompt tokens that were found there. Always 0.",
        values=lambda stats: (),
    ),
    _scheduler(
        name="mm_cache_queries",
        kind="counter",
        help="Images and sounds looked up in the cache of processed ones. There are none yet: always 0.",
        values=lambda stats: (),
    ),
    _scheduler(
        name="mm_cache_hits",
        kind="counter",
        help="Images and sounds that were found there. Always 0.",
        values=lambda stats: (),
    ),
    _iteration(
        name="num_preemptions",
        kind="counter",
        help="Times a request lost its blocks to others.",
        values=lambda stats: (stats.num_preempted_reqs,),
    ),
    _iteration(
        name="prompt_tokens",
        kind="counter",
        help="Prompt tokens of requests with a first token, cached ones among them.",
        values=lambda stats: (stats.num_prompt_tokens,),
    ),
    _iteration(
        name="prompt_tokens_by_source",
        kind="counter",
        help="The same by where their keys and values came from.",
        labels=("source",),
        known=_each(("local_compute", "local_cache_hit", "external_kv_transfer")),
        samples=lambda stats: (
            (("local_compute",), stats.prompt_tokens.num_computed_tokens),
            (("local_cache_hit",), stats.prompt_tokens.num_local_cached_tokens),
            (("external_kv_transfer",), stats.prompt_tokens.num_external_cached_tokens),
        ),
    ),
    _iteration(
        name="prompt_tokens_cached",
        kind="counter",
        help="Those of them that were not computed.",
        values=lambda stats: (stats.prompt_tokens.num_cached_tokens,),
    ),
    _iteration(
        name="prompt_tokens_cached_by_source",
        kind="counter",
        help="The same by where the cache is. Quire's is the device's.",
        labels=("source",),
        known=_each(("device", "host", "p2p", "disk", "external_unspecified")),
        samples=lambda stats: (
            (("device",), stats.prompt_tokens.num_local_cached_tokens),
            (("external_unspecified",), stats.prompt_tokens.num_external_cached_tokens),
        ),
    ),
    _iteration(
        name="generation_tokens",
        kind="counter",
        help="Tokens generated for live requests.",
        values=lambda stats: (stats.num_generation_tokens,),
    ),
    MetricSpec(
        name="request_success",
        kind="counter",
        help="Requests that have ended, by the reason; each output of a prompt counts.",
        source=FinishedRequestStats,
        labels=("finished_reason",),
        known=_each(FINISH_REASON_STRINGS),
        samples=lambda finished: (((FINISH_REASON_STRINGS[finished.finish_reason],), 1),),
    ),
    _iteration(
        name="corrupted_requests",
        kind="counter",
        help="Requests with a NaN in their logits.",
        values=lambda stats: (stats.num_corrupted_reqs,),
        condition=NANS,
    ),
    _facts(
        name="admission_rejections",
        kind="counter",
        help="User requests refused because the queue was full, by the limit.",
        base_labels=MODEL_LABEL,
        labels=("reason",),
        known=_each(("max_num_queued_reqs", "max_num_queued_tokens")),
        samples=lambda facts: _labelled(facts.admission_rejections),
        is_total=True,
    ),
    _scheduler(
        name="spec_decode_num_drafts",
        kind="counter",
        help="Drafts verified.",
        values=_spec_decode(lambda spec: spec.num_drafts),
        condition=SPEC_DECODE,
    ),
    _scheduler(
        name="spec_decode_num_draft_tokens",
        kind="counter",
        help="Tokens of drafts.",
        values=_spec_decode(lambda spec: spec.num_draft_tokens),
        condition=SPEC_DECODE,
    ),
    _scheduler(
        name="spec_decode_num_accepted_tokens",
        kind="counter",
        help="Tokens of drafts that were accepted.",
        values=_spec_decode(lambda spec: spec.num_accepted_tokens),
        condition=SPEC_DECODE,
    ),
    _scheduler(
        name="spec_decode_num_accepted_tokens_per_pos",
        kind="counter",
        help="The same by position in the draft.",
        labels=("position",),
        samples=_accepted_per_position,
        condition=SPEC_DECODE,
    ),
)

HISTOGRAMS: tuple[MetricSpec, ...] = (
    _iteration(
        name="time_to_first_token_seconds",
        kind="histogram",
        help="From a request's arrival to its first token.",
        values=lambda stats: stats.time_to_first_tokens,
        owners=lambda stats: stats.first_token_owners,
        family="time_to_first_token",
    ),
    _iteration(
        name="inter_token_latency_seconds",
        kind="histogram",
        help="From one output of a request to the next, preemptions included.",
        values=lambda stats: stats.inter_token_latencies,
        family="inter_token_latency",
    ),
    _finished(
        name="request_time_per_output_token_seconds",
        help="Mean time between the tokens of a request that has ended; 0 for one token.",
        values=lambda finished: (finished.mean_time_per_output_token,),
        family="inter_token_latency",
    ),
    _finished(
        name="e2e_request_latency_seconds",
        help="From a request's arrival to its end, however it ended.",
        values=lambda finished: (finished.e2e_latency,),
        family="request_latency",
    ),
    _finished(
        name="request_queue_time_seconds",
        help="From a request's coming to the scheduler until it was first scheduled; of those that were.",
        values=lambda finished: _some(finished.queued_time),
        family="request_latency",
    ),
    _finished(
        name="request_inference_time_seconds",
        help="From being first scheduled to the last token, preemptions included.",
        values=lambda finished: _some(finished.inference_time),
        family="request_latency",
    ),
    _finished(
        name="request_prefill_time_seconds",
        help="From being first scheduled to the first token, preemptions included.",
        values=lambda finished: _some(finished.prefill_time),
        family="request_latency",
    ),
    _finished(
        name="request_decode_time_seconds",
        help="From the first token to the last, preemptions included.",
        values=lambda finished: _some(finished.decode_time),
        family="request_latency",
    ),
    _iteration(
        name="iteration_tokens_total",
        kind="histogram",
        help="Tokens of a step: prompt tokens computed for requests with a first token, and tokens generated.",
        values=lambda stats: _some(stats.num_step_tokens),
        family="iteration_tokens",
    ),
    _finished(
        name="request_prompt_tokens",
        help="Prompt tokens of a request that has ended.",
        values=lambda finished: (finished.num_prompt_tokens,),
        family="request_tokens",
    ),
    _finished(
        name="request_generation_tokens",
        help="Tokens a request that has ended was given.",
        values=lambda finished: (finished.num_generation_tokens,),
        family="request_tokens",
    ),
    _iteration(
        name="request_max_num_generation_tokens",
        kind="histogram",
        help="Tokens of the longest output of a user request that has ended.",
        values=lambda stats: stats.max_num_generation_tokens,
        family="request_tokens",
    ),
    _finished(
        name="request_params_max_tokens",
        help="The max_tokens of a request that has ended, where it had one.",
        values=lambda finished: _some(finished.max_tokens_param),
        family="request_tokens",
    ),
    _finished(
        name="request_prefill_kv_computed_tokens",
        help="Prompt tokens computed for a request that has ended: those not found in the cache.",
        values=lambda finished: (max(0, finished.num_prompt_tokens - finished.num_cached_tokens),),
        family="request_tokens",
    ),
    _iteration(
        name="request_params_n",
        kind="histogram",
        help="The n of a user request that has ended.",
        values=lambda stats: stats.n_params,
        family="num_outputs",
    ),
    _finished(
        name="request_num_preemptions",
        help="Preemptions of a request that has ended.",
        values=lambda finished: (finished.num_preemptions,),
        family="num_preemptions",
    ),
    _scheduler(
        name="kv_block_lifetime_seconds",
        kind="histogram",
        help="From a sampled block's allocation to its eviction from the prefix cache.",
        values=lambda stats: [event.lifetime_s for event in stats.kv_cache_eviction_events],
        family="kv_residency",
        condition=KV_SAMPLING,
    ),
    _scheduler(
        name="kv_block_idle_before_evict_seconds",
        kind="histogram",
        help="From a sampled block's last use to its eviction.",
        values=lambda stats: [event.idle_s for event in stats.kv_cache_eviction_events],
        family="kv_residency",
        condition=KV_SAMPLING,
    ),
    _scheduler(
        name="kv_block_reuse_gap_seconds",
        kind="histogram",
        help="Between two uses of a sampled block, of the last few before its eviction.",
        values=lambda stats: chain.from_iterable(event.reuse_gaps_s for event in stats.kv_cache_eviction_events),
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
            help=f"{what}: how long each took.",
            source=ControlOperation,
            labels=("operation",),
            known=_each(operations),
            samples=read_duration,
            family="operation",
        ),
        _facts(
            name=f"{name}_operations_in_flight",
            kind="gauge",
            help=f"{what}: how many are under way.",
            labels=("operation",),
            known=_each(operations),
            samples=read_in_flight,
            merge="sum",
        ),
    )


OPERATIONS: tuple[MetricSpec, ...] = (
    *_operation_rows("sleep_mode", "Operations of sleeping and waking", SLEEP_OPERATIONS),
    *_operation_rows("rl_weight_update", "Operations on the weights; Quire has `update`", WEIGHT_OPERATIONS),
)

LEDGER: tuple[MetricSpec, ...] = (
    _ledger(
        name="requests_received",
        help="Requests that came, one per output asked for.",
        values=lambda facts: (facts.ledger.num_received,),
    ),
    _ledger(
        name="requests_accepted",
        help="Requests that were taken in.",
        values=lambda facts: (facts.ledger.num_accepted,),
    ),
    _ledger(
        name="requests_rejected",
        help="Requests that were refused, or given up before they were taken in, by the reason. No work was done.",
        labels=("reason",),
        known=_each(REJECTION_REASONS),
        samples=lambda facts: _labelled(facts.ledger.rejected),
    ),
    _ledger(
        name="requests_in_admission",
        kind="gauge",
        help="Requests that came and are being read: received = accepted + rejected + in admission.",
        values=lambda facts: (facts.ledger.num_in_admission,),
        merge="sum",
    ),
    _ledger(
        name="requests_finished",
        help="Requests that were taken in and have ended, by the reason.",
        labels=("reason",),
        known=_each(FINISH_REASONS),
        samples=lambda facts: _labelled(facts.ledger.finished),
    ),
    _ledger(
        name="requests_live",
        kind="gauge",
        help="Requests that have not ended, as this server sees them: accepted = finished + live.",
        labels=("state",),
        known=_each(("waiting", "running", "resting")),
        samples=lambda facts: _labelled(facts.num_live),
        merge="sum",
    ),
    _ledger(
        name="queue_tokens",
        kind="gauge",
        help="Tokens of the prompts that wait for their first token.",
        values=lambda facts: (facts.num_queued_tokens,),
        merge="sum",
    ),
    _ledger(
        name="delivered_tokens",
        help="Tokens that became part of an answer: generation = delivered + discarded.",
        values=lambda facts: (facts.ledger.num_delivered_tokens,),
    ),
    _ledger(
        name="discarded_tokens",
        help="Tokens generated for a live request that are no part of its answer, by the reason.",
        labels=("reason",),
        known=_each(DISCARD_REASONS),
        samples=lambda facts: _labelled(facts.ledger.discarded_tokens),
    ),
    _ledger(
        name="late_tokens",
        help="Tokens that came for requests which had ended; in no other count.",
        values=lambda facts: (facts.ledger.num_late_tokens,),
    ),
    _ledger(
        name="requests_resumed",
        help="Requests that went on after a restart of the engine core.",
        values=lambda facts: (facts.core_counts.get("resumed_requests", 0),),
    ),
    _ledger(
        name="requests_poisoned",
        help="Requests failed alone because they kept ending the engine core.",
        values=lambda facts: (facts.core_counts.get("poisoned_requests", 0),),
    ),
    _ledger(
        name="restart_recomputed_tokens",
        help="Tokens computed again because the engine core was restarted.",
        values=lambda facts: (facts.core_counts.get("recomputed_tokens", 0),),
    ),
    _scheduler(
        name="preemption_recomputed_tokens",
        kind="counter",
        help="Tokens computed again because a request had lost its blocks.",
        values=lambda stats: (stats.num_recomputed_tokens,),
        prefix=QUIRE,
    ),
    _ledger(
        name="engine_restarts",
        help="Restarts of the engine core, by what had ended it.",
        labels=("cause",),
        known=_each(("crash", "hang", "killed", "start", "lost")),
        samples=lambda facts: _labelled(facts.core_restarts),
    ),
    _ledger(
        name="dropped_messages",
        help="Messages of the engine core, or parts of them, that could not be used, by the reason.",
        labels=("reason",),
        known=_each(("stale", "corrupt", "repeated", "lost", "unknown")),
        samples=lambda facts: [
            ((reason,), facts.core_counts.get(reason, 0))
            for reason in ("stale", "corrupt", "repeated", "lost", "unknown")
        ],
    ),
    _ledger(
        name="engine_ready",
        kind="gauge",
        help="1 if a request would be worked on now; 0 while the engine core is being started again.",
        values=lambda facts: (float(facts.is_core_ready),),
    ),
    _ledger(
        name="engine_step_age_seconds",
        kind="gauge",
        help="Since the last step, while there is something to compute; else 0.",
        values=lambda facts: (facts.step_age_s,),
        merge="max",
    ),
    _scheduler(
        name="kv_blocks",
        kind="gauge",
        help="Blocks of the KV cache: held by requests, free with content that may be hit, free without.",
        labels=("state",),
        known=_each(("used", "cached", "free")),
        samples=lambda stats: (
            (("used",), stats.num_used_blocks),
            (("cached",), stats.num_cached_blocks),
            (("free",), stats.num_free_blocks),
        ),
        prefix=QUIRE,
    ),
    _ledger(
        name="saturation",
        kind="gauge",
        help="How near the engine is to the most it can do, in [0, 1], whatever the shape of the requests.",
        values=lambda facts: (facts.saturation.value,),
        merge="max",
    ),
    _ledger(
        name="saturation_by_resource",
        kind="gauge",
        help="The shares whose largest is quire_saturation.",
        labels=("resource",),
        known=_each(RESOURCES),
        samples=lambda facts: _labelled(facts.saturation.by_resource),
        merge="max",
    ),
    _ledger(
        name="saturation_limit_tokens_per_second",
        kind="gauge",
        help="Prompt and output tokens per second at which compute is used up, in the present mix, as measured.",
        values=lambda facts: (facts.saturation.limit_tokens_per_s,),
        merge="max",
    ),
    _ledger(
        name="lora_requests",
        kind="gauge",
        help="Live requests by LoRA adapter: the busiest ones, and the rest as `other`.",
        labels=("adapter", "state"),
        samples=lambda facts: [((adapter, state), count) for adapter, state, count in facts.adapters.capped()],
        merge="sum",
        condition=LORA,
    ),
)

HTTP: tuple[MetricSpec, ...] = (
    _http(
        name="http_requests",
        kind="counter",
        help="HTTP requests by method, class of status and route; probes left out.",
        labels=("method", "status", "handler"),
        samples=lambda done: (((done.method, f"{done.status // 100}xx", done.handler), 1),),
    ),
    _http(
        name="http_request_duration_seconds",
        kind="histogram",
        help="From an HTTP request to the end of its answer, by method and route.",
        labels=("method", "handler"),
        samples=lambda done: (((done.method, done.handler), done.duration_s),),
        family="http",
    ),
    _http(
        name="http_request_duration_highr_seconds",
        kind="histogram",
        help="The same in finer buckets, without labels.",
        values=lambda done: (done.duration_s,),
        family="http_highr",
    ),
    _http(
        name="http_request_size_bytes",
        kind="summary",
        help="Bodies of HTTP requests, as announced, by route.",
        labels=("handler",),
        samples=lambda done: (((done.handler,), done.request_bytes),),
    ),
    _http(
        name="http_response_size_bytes",
        kind="summary",
        help="Bodies of the answers, by route.",
        labels=("handler",),
        samples=lambda done: (((done.handler,), done.response_bytes),),
    ),
)

LEGACY: tuple[MetricSpec, ...] = (
    _facts(
        name="num_requests_swapped",
        kind="gauge",
        help="Deprecated: requests are recomputed, never swapped out. Always 0.",
        values=lambda facts: (0.0,),
        condition=LEGACY_NAMES,
    ),
    _facts(
        name="cpu_cache_usage_perc",
        kind="gauge",
        help="Deprecated: there is no swap space. Always 0. See vllm:kv_cache_usage_perc.",
        values=lambda facts: (0.0,),
        condition=LEGACY_NAMES,
    ),
    _iteration(
        name="tokens",
        kind="counter",
        help="Deprecated: use vllm:prompt_tokens and vllm:generation_tokens, whose sum this is.",
        values=lambda stats: (stats.num_prompt_tokens + stats.num_generation_tokens,),
        condition=LEGACY_NAMES,
    ),
    _iteration(
        name="time_per_output_token_seconds",
        kind="histogram",
        help="Deprecated: use vllm:inter_token_latency_seconds, which this equals.",
        values=lambda stats: stats.inter_token_latencies,
        family="inter_token_latency",
        condition=LEGACY_NAMES,
    ),
    _finished(
        name="time_in_queue_requests",
        help="Deprecated: use vllm:request_queue_time_seconds, which this equals.",
        values=lambda finished: _some(finished.queued_time),
        family="request_latency",
        condition=LEGACY_NAMES,
    ),
)
"""Of the documents' older names, those that can be computed."""

METRICS: tuple[MetricSpec, ...] = (*ENGINE_GAUGES, *COUNTERS, *HISTOGRAMS, *OPERATIONS, *LEDGER, *HTTP, *LEGACY)

CACHE_CONFIG_INFO = InfoSpec(
    name="cache_config_info", help="The configuration of the KV cache, and what start-up made of it."
)
BUILD_INFO = InfoSpec(name="build_info", help="The version of Quire that runs here.", prefix=QUIRE)
INFOS: tuple[InfoSpec, ...] = (CACHE_CONFIG_INFO, BUILD_INFO)

NOT_APPLICABLE: dict[str, str] = {
    "num_requests_kv_fetch_by_stage": "there is no transfer of KV blocks between engines",
    "watermark_requests": "outputs are not watermarked",
    "diffusion_*": "no diffusion models are served",
    "estimated_flops_per_gpu_total": "work is measured, not estimated: --enable-mfu-metrics does not exist",
    "estimated_read_bytes_per_gpu_total": "as estimated_flops_per_gpu_total",
    "estimated_write_bytes_per_gpu_total": "as estimated_flops_per_gpu_total",
    "kv_offload_*": "KV blocks are not offloaded",
    "simple_kv_offload_*": "KV blocks are not offloaded",
    "nixl_*": "there is no NIXL connector",
    "hisparse_*": "there is no hierarchical sparse cache",
    "hf3fs_*": "there is no 3FS connector",
    "mooncake_store_*": "there is no Mooncake connector",
    "tool_call_parser_invocations_total": "its label values are not documented; http_requests_total counts the calls",
    "websocket_*": "there are no websocket routes",
    "model_forward_time_milliseconds": "the frontend does not see the parts of a step",
    "model_execute_time_milliseconds": "as model_forward_time_milliseconds",
    "gpu_prefix_cache_hit_rate": "a rate: divide prefix_cache_hits by prefix_cache_queries",
    "cpu_prefix_cache_hit_rate": "there is no swap space; see gpu_prefix_cache_hit_rate",
    "spec_decode_draft_acceptance_rate": "a rate: divide spec_decode_num_accepted_tokens by _num_draft_tokens",
    "spec_decode_efficiency": "a rate: make it of the spec_decode counters",
    "spec_decode_num_emitted_tokens": "it is spec_decode_num_accepted_tokens plus _num_drafts",
}
"""vLLM's names (without the prefix; `*` for any end) that are not exported, and why."""
