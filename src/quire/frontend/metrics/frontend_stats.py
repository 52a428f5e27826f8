"""The statistics of one frontend: counts what happens, passes it to the loggers, and describes the present state."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from quire import envs
from quire.config.engine import CacheConfig, EngineConfig
from quire.frontend.metrics.catalog.spec import KV_SAMPLING, KV_TRANSFER, LEGACY_NAMES, LORA, NANS, SPEC_DECODE
from quire.frontend.metrics.collect.events import ControlOperations, IterationStats
from quire.frontend.metrics.collect.facts import NO_DRAFTS, AdapterLabels, AdapterLoad, FrontendFacts, Load
from quire.frontend.metrics.collect.ledger import RequestLedger, add_counts
from quire.frontend.metrics.collect.saturation import EngineLimits, Saturation, SaturationMeter
from quire.frontend.metrics.publish.prometheus import MetricsSetup, PrometheusStatLogger
from quire.frontend.metrics.publish.stat_loggers import (
    LoggingStatLogger,
    StatLogger,
    StatLoggerManager,
    load_stat_logger,
)
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.stats import SchedulerStats

MAX_STEPS_KEPT = 64
"""Number of steps collected before their saturation is computed, unless it is read earlier."""


class LiveRequest(Protocol):
    """A request that has not ended, as the statistics need it."""

    @property
    def request(self) -> EngineCoreRequest:
        """The request as the core has it."""

    @property
    def is_prefilling(self) -> bool:
        """Returns whether no token of it has come."""


class LiveRequests(Protocol):
    """Read access to all live requests."""

    @property
    def request_states(self) -> Mapping[str, LiveRequest]:
        """The requests by internal id."""

    @property
    def resting_sessions(self) -> Iterable[str]:
        """Ids of the sessions that wait for input from their users."""


class CoreHistory(Protocol):
    """History of an engine core, as its client knows it."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of resumed requests, recomputed tokens and dropped messages."""

    @property
    def restarts(self) -> Mapping[str, int]:
        """Counts of restarts, by cause."""

    @property
    def is_ready(self) -> bool:
        """Returns whether a request would be worked on now."""

    @property
    def num_engines_up(self) -> int:
        """Returns the number of engines that would."""


class FrontendStats:
    """Statistics of one frontend. Belongs to the thread that processes outputs. With `log_stats` off only the ledger is
    kept.

    `wall_clock` is the clock of arrivals; intervals of the core use the clock of its stamps.
    """

    def __init__(
        self,
        config: EngineConfig,
        ready: EngineCoreReadyResponse,
        requests: LiveRequests,
        *,
        ledger: RequestLedger,
        log_stats: bool,
        stat_loggers: Sequence[StatLogger] | None = None,
        wall_clock: Callable[[], float] = time.time,
        engines: Mapping[int, EngineCoreReadyResponse] | None = None,
    ) -> None:
        """`engines` are the responses that `ready` joins; None: there is one."""
        self.log_stats = log_stats
        self.ledger = ledger
        self._requests = requests
        self._wall_clock = wall_clock
        self._last_step_time = 0.0
        self._own_counts: dict[str, int] = {NO_DRAFTS: 0} if config.speculative_config.drafting is not None else {}
        self._scheduler_stats: dict[int, SchedulerStats] = {}
        """The last statistics of each engine."""
        self._steps: list[tuple[int, float, SchedulerStats]] = []
        """Steps that `_saturation` has not received: engine, time on the core's clock, statistics."""
        self._reported_load: Load | None = None
        self._core: CoreHistory | None = None
        self._rejections: Mapping[str, int] = {}
        self._adapters = AdapterLabels(config.lora_config.max_loras or 0)
        scheduler = config.scheduler_config
        limits = EngineLimits(
            max_num_seqs=scheduler.max_num_seqs or 1,
            max_num_batched_tokens=scheduler.max_num_batched_tokens or 1,
            max_num_queued_tokens=scheduler.max_num_queued_tokens,
        )
        engines = {ready.engine_index: ready} if engines is None else engines
        self._saturation = defaultdict(
            lambda: SaturationMeter(limits), {engine: SaturationMeter(limits) for engine in engines}
        )
        self.metrics: PrometheusStatLogger | None = None
        """The exporter; None where statistics are off or go elsewhere."""
        loggers: list[StatLogger] = []
        if log_stats:
            names = (config.observability_config.stat_loggers or "").split(",")
            custom = [load_stat_logger(name.strip(), config) for name in names if name.strip()]
            if stat_loggers is None:
                self.metrics = PrometheusStatLogger(make_setup(config, ready, engines), self.get_facts, wall_clock)
                stat_loggers = [LoggingStatLogger(), self.metrics]
            loggers = [*stat_loggers, *custom]
        self.loggers = StatLoggerManager(loggers, wall_clock)
        self.operations = ControlOperations(self.loggers.record_operation)

    def attach(self, core: CoreHistory, rejections: Mapping[str, int] | None = None) -> None:
        """Attaches the client, and the counts of requests that admission rejects, as further sources."""
        self._core = core
        self._rejections = self._rejections if rejections is None else rejections

    @property
    def exporter_failed(self) -> bool:
        """Returns whether the exporter has raised, after which it counts nothing."""
        metrics = self.metrics
        return metrics is not None and (metrics.has_failed or metrics not in self.loggers.loggers)

    def open_iteration(self) -> IterationStats | None:
        """Returns statistics to fill for a batch of outputs; None if nothing is counted."""
        return IterationStats(self._wall_clock()) if self.log_stats else None

    def close_iteration(self, stats: IterationStats | None) -> None:
        """Passes statistics of outputs that no step of the core has brought to the loggers."""
        if stats is not None:
            self.loggers.record(None, stats)

    def close_batch(self, outputs: EngineCoreOutputs, batch: IterationStats | None, *, is_last: bool = True) -> None:
        """Passes a processed batch of a step's outputs to the loggers; with the last one the state of the scheduler."""
        step = outputs.scheduler_stats if is_last else None
        if is_last:
            self._last_step_time = self._wall_clock()
        if step is not None:
            self._scheduler_stats[outputs.engine_index] = step
            self._steps.append((outputs.engine_index, outputs.timestamp, step))
            if step.spec_decoding_stats is not None:
                self._own_counts[NO_DRAFTS] = int(not step.spec_decoding_stats.is_enabled)
            if len(self._steps) >= MAX_STEPS_KEPT:
                self._feed_saturation()
        if batch is not None and batch.tokens_of_adapters:
            batch.tokens_of_adapters = self._adapters.relabel(batch.tokens_of_adapters)
        if step is not None or batch is not None:
            self.loggers.record(step, batch, outputs.engine_index)

    def _feed_saturation(self) -> None:
        for engine, timestamp, stats in self._steps:
            self._saturation[engine].add_step(
                timestamp,
                num_outputs=stats.num_decoded_reqs,
                num_prompt_tokens=max(0, stats.num_scheduled_tokens - stats.num_decoded_reqs),
                num_running=stats.num_running_reqs,
                kv_usage=stats.kv_cache_usage,
                has_work_left=bool(stats.num_running_reqs or stats.num_waiting_reqs),
            )
        self._steps.clear()

    def _read_saturation(self, num_queued_tokens: int = 0) -> Saturation:
        self._feed_saturation()
        now = time.monotonic()
        return Saturation.mean([meter.read(now, num_queued_tokens) for meter in self._saturation.values()])

    def note_load(self, load: Load) -> None:
        """Stores the load that another process, which receives the statistics of the core, has reported."""
        self._reported_load = load

    def get_load(self) -> Load:
        """Returns the load at the last step; where another process receives the steps, as of its last report."""
        if self._reported_load is not None:
            return self._reported_load
        all_stats = list(self._scheduler_stats.values()) or [SchedulerStats()]
        return Load(
            kv_cache_usage=sum(stats.kv_cache_usage for stats in all_stats) / len(all_stats),
            num_running=sum(stats.num_running_reqs for stats in all_stats),
            num_waiting=sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in all_stats),
            saturation=self._read_saturation().value,
        )

    def get_facts(self) -> FrontendFacts:
        """Returns the present state."""
        now = self._wall_clock()
        resting = set(self._requests.resting_sessions)
        num_waiting = num_queued_tokens = 0
        oldest = now
        adapters = []
        for request_id, state in self._requests.request_states.items():
            request = state.request
            if state.is_prefilling:
                num_waiting += 1
                num_queued_tokens += len(request.prompt_token_ids or ())
            if request.arrival_time < oldest and request_id not in resting:
                oldest = request.arrival_time
            if request.lora_request is not None:
                adapters.append((request.lora_request.lora_name, not state.is_prefilling))
        num_live = len(self._requests.request_states)
        core = self._core
        return FrontendFacts(
            time=now,
            ledger=self.ledger.plus(RequestLedger()),
            num_live={
                "waiting": num_waiting,
                "running": num_live - num_waiting - len(resting),
                "resting": len(resting),
            },
            num_queued_tokens=num_queued_tokens,
            admission_rejections=dict(self._rejections),
            core_counts=add_counts(self._own_counts, {} if core is None else core.counts),
            core_restarts={} if core is None else dict(core.restarts),
            is_core_ready=core is None or core.is_ready,
            num_engines_up=1 if core is None else core.num_engines_up,
            oldest_arrival=oldest if num_live > len(resting) else None,
            last_step_time=self._last_step_time,
            saturation=self._read_saturation(num_queued_tokens),
            sleep_level=self.operations.sleep_level,
            sleep_time=self.operations.sleep_time,
            operations_in_flight=dict(self.operations.in_flight),
            adapters=AdapterLoad.count(adapters),
            max_lora=self._adapters.max_lora,
        )


def make_setup(
    config: EngineConfig, ready: EngineCoreReadyResponse, engines: Mapping[int, EngineCoreReadyResponse] | None = None
) -> MetricsSetup:
    """Returns the settings of the exporter for these engines, or the one of `ready`."""
    engines = {ready.engine_index: ready} if engines is None else engines
    observability, drafting = config.observability_config, config.speculative_config.drafting
    conditions = {
        KV_SAMPLING: config.cache_config.kv_cache_metrics,
        NANS: envs.COMPUTE_NANS_IN_LOGITS.flag(),
        SPEC_DECODE: drafting is not None,
        LORA: config.lora_config.enable_lora,
        KV_TRANSFER: config.kv_transfer_config.kv_connector is not None,
        LEGACY_NAMES: observability.show_hidden_metrics_for_version is not None,
    }
    return MetricsSetup(
        model_name=config.model_config.name,
        max_model_len=ready.max_model_len,
        conditions=frozenset(name for name, holds in conditions.items() if holds),
        cache_configs={i: cache_config_labels(config.cache_config, one) for i, one in sorted(engines.items())},
        custom_buckets=observability.custom_histogram_buckets,
        engines=tuple(sorted(engines)),
        num_spec_tokens=0 if drafting is None else drafting.num_speculative_tokens,
    )


def cache_config_labels(config: CacheConfig, ready: EngineCoreReadyResponse) -> dict[str, str]:
    """Returns the labels of `vllm:cache_config_info`: the fields of the configuration, and values found at start-up."""
    found = {
        "block_size": ready.block_size,
        "num_gpu_blocks": ready.num_gpu_blocks,
        "kv_cache_size_tokens": ready.kv_cache_size_tokens,
        "kv_cache_max_concurrency": round(ready.kv_cache_max_concurrency, 2),
    }
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: str(value) for name, value in {**fields, **found}.items()}
