"""Statistics of a frontend about itself: its age, its load, and its exports by flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError
from quire.frontend.metrics.catalog.spec import KV_SAMPLING, LEGACY_NAMES, NANS
from quire.frontend.metrics.collect.events import IterationStats
from quire.frontend.metrics.collect.ledger import RequestLedger
from quire.frontend.metrics.frontend_stats import FrontendStats, make_setup
from quire.frontend.metrics.publish.stat_loggers import StatLogger
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from quire.wire.stats import SchedulerStats, SpecDecodingStats

READY = EngineCoreReadyResponse(4096, 100, 16, 1584, 1.5, ("generate",))


@dataclass
class State:
    request: EngineCoreRequest
    is_prefilling: bool = True


@dataclass
class Requests:
    request_states: dict[str, State] = field(default_factory=dict)
    resting_sessions: set[str] = field(default_factory=set)

    def add(self, name: str, arrival_time: float, adapter: str | None = None) -> State:
        lora = None if adapter is None else LoRARequest(adapter, 1)
        request = EngineCoreRequest(name, [1, 2, 3], SamplingParams(), None, arrival_time, lora_request=lora)
        self.request_states[name] = State(request)
        return self.request_states[name]


class Setting:
    def __init__(self, log_stats: bool = True, loggers: list[StatLogger] | None = None, **flags: Any) -> None:
        self.now = 1000.0
        self.requests = Requests()
        config = EngineArgs("demo", skip_tokenizer_init=True, **flags).create_engine_config("serving")
        self.stats = FrontendStats(
            config,
            READY,
            self.requests,
            ledger=RequestLedger(),
            log_stats=log_stats,
            stat_loggers=loggers,
            wall_clock=lambda: self.now,
        )

    def step(self, **stats: Any) -> None:
        outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(**stats), timestamp=self.now)
        self.stats.close_batch(outputs, None)

    @property
    def age(self) -> float:
        return self.stats.get_facts().step_age_s


def test_the_age_of_the_last_step_counts_while_there_is_work() -> None:
    s = Setting()
    s.now += 100
    assert s.age == 0, "nobody wants anything"
    s.requests.add("a", s.now)
    s.now += 3
    assert s.age == 3, "since the request came: nothing was to be done before"
    s.step()
    assert s.age == 0
    s.now += 7
    s.requests.add("b", s.now)
    assert s.age == 7, "newcomers do not hide a hang"
    s.requests.resting_sessions.update({"a", "b"})
    assert s.age == 0, "they wait for their users"


def test_who_is_live() -> None:
    s = Setting()
    s.requests.add("a", 1.0)
    s.requests.add("b", 1.0, adapter="poems").is_prefilling = False
    s.requests.add("c", 1.0).is_prefilling = False
    s.requests.resting_sessions.add("c")
    facts = s.stats.get_facts()
    assert facts.num_live == {"waiting": 1, "running": 1, "resting": 1}
    assert facts.num_queued_tokens == 3
    assert facts.adapters.running == {"poems": 1}
    assert facts.is_core_ready, "of a core nobody tells of"


@dataclass
class Core:
    counts: Mapping[str, int] = field(default_factory=lambda: {"resumed_requests": 4})
    restarts: Mapping[str, int] = field(default_factory=lambda: {"crash": 1})
    is_ready: bool = False
    num_engines_up: int = 0


def test_several_engines_have_one_load() -> None:
    """The mean of the shares, and the sum of the requests; an engine that joins later counts, too."""
    s = Setting()
    for engine, running, usage in ((0, 3, 0.5), (1, 1, 0.25), (2, 2, 0.75)):
        stats = SchedulerStats(num_running_reqs=running, num_waiting_reqs=1, kv_cache_usage=usage)
        s.stats.close_batch(EngineCoreOutputs(engine, scheduler_stats=stats), None)
    load = s.stats.get_load()
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (6, 3, 0.5)


def test_what_others_tell() -> None:
    s = Setting()
    s.stats.attach(Core(), {"max_num_queued_reqs": 2})
    assert s.stats.metrics is not None
    seen = s.stats.metrics.snapshot()
    assert seen.value("quire_requests_resumed") == 4
    assert seen.value("quire_engine_restarts", "crash") == 1
    assert seen.value("quire_engine_ready") == 0
    assert seen.value("vllm:admission_rejections", "max_num_queued_reqs") == 2


def test_the_load_is_that_of_the_last_step() -> None:
    s = Setting()
    s.step(num_running_reqs=3, num_waiting_reqs=1, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
    load = s.stats.get_load()
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (3, 2, 0.5)
    assert 0 <= load.saturation <= 1


def test_flags_decide_what_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_COMPUTE_NANS_IN_LOGITS", "1")
    flags = {
        "kv_cache_metrics": True,
        "show_hidden_metrics_for_version": "0.7",
        "custom_histogram_buckets": {"request_latency": [1, 2]},
    }
    setup = make_setup(EngineArgs("demo", **flags).create_engine_config("serving"), READY)
    assert setup.conditions == {KV_SAMPLING, NANS, LEGACY_NAMES}
    assert (setup.cache_configs[0]["block_size"], setup.cache_configs[0]["num_gpu_blocks"]) == ("16", "100")
    assert setup.cache_configs[0]["enable_prefix_caching"] == "True"
    assert setup.custom_buckets == {"request_latency": [1, 2]}


@pytest.mark.parametrize(
    "flags",
    [
        {"show_hidden_metrics_for_version": "latest"},
        {"custom_histogram_buckets": {"request_latency": [2, 1]}},
        {"custom_histogram_buckets": {"latency": [1]}},
        {"stat_loggers": "nowhere:Logger"},
    ],
)
def test_flags_that_cannot_work(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Setting(**flags)


class Mine(StatLogger):
    def __init__(self, config: object) -> None:
        self.num_records = 0

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_index: int = 0
    ) -> None:
        self.num_records += 1


def test_loggers_of_ones_own() -> None:
    s = Setting(stat_loggers=f"{__name__}:Mine, {__name__}:Mine")
    s.step()
    *_, one, two = s.stats.loggers.loggers
    assert isinstance(one, Mine)
    assert isinstance(two, Mine)
    assert (one.num_records, two.num_records) == (1, 1)
    mine = Mine(None)
    given = Setting(loggers=[mine])
    given.step()
    assert given.stats.metrics is None, "who brings loggers gets those only"
    assert mine.num_records == 1


def test_without_statistics_only_the_ledger_is_kept() -> None:
    s = Setting(log_stats=False, stat_loggers=f"{__name__}:Mine")
    s.step()
    assert (s.stats.metrics, s.stats.loggers.loggers) == (None, [])
    assert s.stats.open_iteration() is None


def test_the_gauge_of_speculation_falls_when_the_drafter_has_failed_and_rises_with_another_core() -> None:
    def gauge(s: Setting) -> float:
        assert s.stats.metrics is not None
        return s.stats.metrics.snapshot().value("quire_spec_decode_enabled")

    s = Setting(spec_method="ngram", spec_tokens=2)
    assert gauge(s) == 1
    s.step(spec_decoding_stats=SpecDecodingStats(2))
    assert gauge(s) == 1
    s.step(spec_decoding_stats=SpecDecodingStats(2, is_enabled=False))
    s.step()
    assert gauge(s) == 0
    s.step(spec_decoding_stats=SpecDecodingStats(2))
    assert gauge(s) == 1
    metrics = Setting().stats.metrics
    assert metrics is not None
    assert "spec_decode" not in metrics.exposition()
