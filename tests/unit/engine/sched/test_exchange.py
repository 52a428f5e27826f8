"""Loads and saves of requests, one situation each. tests/simulation meets them at random."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from quire.config.hf_config import HFConfig
from quire.config.kv_transfer import KVTransferConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.engine.core import EngineCore
from quire.engine.kv_cache import saver as saver_module
from quire.engine.kv_cache.block import KVCacheBlock, KVCacheBlocks
from quire.engine.kv_cache.connector import RESET_S, LoadAudits, RemoteSaves
from quire.engine.kv_cache.saver import _Postponed
from quire.engine.request import RequestStatus
from quire.engine.sched.exchange import KVExchange
from quire.engine.sched.interface import NoExchange
from quire.errors import ConfigError
from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_model import expected_output
from quire.testing.fake_tier import FakeTier, FakeTierWorker, Manner
from quire.wire.engine_core import EngineCoreRequest
from quire.wire.execution import SchedulerOutput
from quire.wire.kv_transfer import AWAY, KVConnectorMetadata, KVConnectorOutput, SavedBlock, SaveResult
from quire.wire.stats import KVTransferStats, PrefillStats

SIZE = 4
PROMPT = [(7 * i) % 50 for i in range(30)]
EMPTY = KVCacheBlocks(([],)), 0


class Clock:
    """Seconds of the exchange."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A core with a store, whose transfers a test moves. Outputs are compared with the model's."""

    def __init__(
        self,
        tier: FakeTier,
        *,
        num_blocks: int = 40,
        max_num_seqs: int = 4,
        workers: int = 1,
        record: Path | None = None,
        **transfer: Any,
    ) -> None:
        options = {"min_load_tokens": 1, "load_bias": 1e9, "max_pinned_share": 1.0} | transfer
        extra = {"tier": "test", "workers": workers}
        config = KVTransferConfig(kv_connector="FakeTier", kv_connector_extra_config=extra, **options)
        observability = ObservabilityConfig(record=None if record is None else str(record))
        whole = replace(make_config(config, num_blocks, max_num_seqs), observability_config=observability)
        self.core = EngineCore(whole, FakeExecutor, True)
        executor: Any = self.core.executor
        scheduler: Any = getattr(self.core.scheduler, "observed", self.core.scheduler)
        self.executor, self.scheduler, self.tier = executor, scheduler, tier
        exchange, worker = getattr(scheduler.exchange, "watched", scheduler.exchange), executor.transfers
        assert isinstance(exchange, KVExchange)
        assert isinstance(worker, FakeTierWorker)
        self.exchange, self.worker, self.clock = exchange, worker, Clock()
        exchange.clock = self.clock
        exchange.link.set_alarm = lambda seconds: None  # type: ignore[method-assign]
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prefills: dict[str, PrefillStats] = {}
        self.load_spans: dict[str, tuple[float, float] | None] = {}
        self.leases: dict[str, dict[str, Any]] = {}
        self.transfers = KVTransferStats()

    def add(self, request_id: str, prompt: list[int] = PROMPT, max_tokens: int = 3, **fields: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, skip_reading_prefix_cache=fields.pop("skips", None))
        request = EngineCoreRequest(request_id, prompt, params, None, 0.0, **fields)
        self.requests[request_id], self.tokens[request_id] = request, list(request.output_token_ids)
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outputs, _ = self.core.step_fn()
            for batch in (outputs or {}).values():
                for output in batch.outputs:
                    self.tokens[output.request_id] += output.new_token_ids
                    if output.kv_transfer_params is not None:
                        self.leases[output.request_id] = output.kv_transfer_params
                    if output.prefill_stats is not None:
                        self.prefills[output.request_id] = msgspec.structs.replace(output.prefill_stats, load_span=None)
                        self.load_spans[output.request_id] = output.prefill_stats.load_span
                if batch.scheduler_stats is not None and batch.scheduler_stats.kv_transfer is not None:
                    self.add_stats(batch.scheduler_stats.kv_transfer)
        self.scheduler.kv_cache_manager.check_integrity()

    def add_stats(self, new: KVTransferStats) -> None:
        total = self.transfers
        for outcome, number in new.num_loads.items():
            total.num_loads[outcome] = total.num_loads.get(outcome, 0) + number
        for reason, number in new.num_dropped_blocks.items():
            total.num_dropped_blocks[reason] = total.num_dropped_blocks.get(reason, 0) + number
        for reason, number in new.num_rejected_records.items():
            total.num_rejected_records[reason] = total.num_rejected_records.get(reason, 0) + number
        num_rejected = sum(new.num_rejected_records.values())
        assert new.num_read_records == new.num_accepted_records + num_rejected
        total.num_accepted_records += new.num_accepted_records
        for end, number in new.num_leases.items():
            total.num_leases[end] = total.num_leases.get(end, 0) + number
        total.num_loads_begun += new.num_loads_begun
        total.num_saves_begun += new.num_saves_begun
        total.num_saved_blocks += new.num_saved_blocks
        total.num_waiting_saves = new.num_waiting_saves
        total.save_lags += new.save_lags
        num_dropped, num_waiting = sum(total.num_dropped_blocks.values()), sum(total.num_waiting_saves.values())
        assert total.num_saves_begun == total.num_saved_blocks + num_dropped + num_waiting
        for outcome, number in new.num_audited_blocks.items():
            total.num_audited_blocks[outcome] = total.num_audited_blocks.get(outcome, 0) + number
        for tier, outcomes in new.num_tier_loads.items():
            counts = total.num_tier_loads.setdefault(tier, {})
            for outcome, number in outcomes.items():
                counts[outcome] = counts.get(outcome, 0) + number
        for outcome, number in new.num_remote_saves.items():
            total.num_remote_saves[outcome] = total.num_remote_saves.get(outcome, 0) + number
        total.prefix_cache_stats.queries += new.prefix_cache_stats.queries
        total.prefix_cache_stats.hits += new.prefix_cache_stats.hits

    def move(self, count: int = 1000) -> None:
        """Moves a block of a transfer, so many times, or until all have ended."""
        for _ in range(count):
            if not self.worker.advance():
                return

    def finish(self, limit: int = 200) -> None:
        """Runs everything to its end, and compares the answers."""
        for _ in range(limit):
            if self.core.is_blocked() or not self.core.has_work():
                if not self.worker.active:
                    break
                self.move()
            self.step()
        assert not self.scheduler.requests
        for request_id, request in self.requests.items():
            assert request.prompt_token_ids is not None
            assert request.sampling_params is not None
            right = expected_output(self.executor.model, request.prompt_token_ids, request.sampling_params, 64)
            assert self.tokens[request_id] == right.token_ids

    def finish_but(self, held: list[str]) -> None:
        """Runs all requests to their end; only blocks in these states are held then."""
        for _ in range(50):
            self.step()
        assert not self.scheduler.requests
        assert sorted(self.held()) == held

    def held(self) -> dict[str, int]:
        return dict(self.scheduler.kv_cache_manager.held.count())

    def status(self, request_id: str) -> RequestStatus:
        status: RequestStatus = self.scheduler.requests[request_id].status
        return status


def make_config(transfer: KVTransferConfig, num_blocks: int = 40, max_num_seqs: int = 4) -> EngineConfig:
    hf_config = HFConfig({"max_position_embeddings": 64}, Path())
    return EngineConfig(
        model_config=ModelConfig(max_model_len=-1, hf_config=hf_config),
        cache_config=CacheConfig(block_size=SIZE, num_gpu_blocks_override=num_blocks),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=max_num_seqs),
        kv_transfer_config=transfer,
    )


@pytest.fixture
def tier() -> Iterator[FakeTier]:
    yield FakeTier("test")
    del FakeTier.by_name["test"]


@pytest.fixture
def filled(tier: FakeTier) -> FakeTier:
    """A store that has the blocks of PROMPT and its answer."""
    engine = Engine(tier)
    engine.add("first", max_tokens=10)
    engine.finish()
    engine.core.shutdown()
    assert len(tier.records) == 9
    return tier


def begin(tier: FakeTier, *manners: Manner, **options: Any) -> Engine:
    """An engine that has just ordered the load of request "a"."""
    engine = Engine(tier, **options)
    engine.worker.manners = list(manners) or ["good"]
    engine.add("a")
    engine.step()
    assert engine.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.held() == {"loading": 7}
    return engine


# -- loads -----------------------------------------------------------------------------------------------------


def test_a_prompt_is_loaded_and_counted_when_it_was(filled: FakeTier) -> None:
    engine = begin(filled)
    assert not engine.transfers.prefix_cache_stats.queries, "it was not admitted yet"
    engine.finish()
    assert engine.prefills["a"] == PrefillStats(30, 2, 0, 28, {"disk": 28})
    assert engine.transfers.num_loads == {"ok": 1}
    assert engine.load_spans["a"] == (100.0, 100.0)
    assert (engine.transfers.prefix_cache_stats.queries, engine.transfers.prefix_cache_stats.hits) == (30, 28)
    assert engine.executor.num_computed_tokens == 2 + 2
    assert engine.held() == {}


def test_while_only_loads_are_pending_the_loop_sleeps_until_one_ends(filled: FakeTier) -> None:
    engine = begin(filled)
    assert engine.core.is_blocked()
    engine.move(7)  # the blocks; the end is another move
    engine.step()  # progress is news, and nothing to compute
    assert engine.core.is_blocked()
    engine.move(1)
    assert not engine.core.is_blocked()
    engine.finish()


def test_loads_are_outside_of_the_limit_of_running_requests(filled: FakeTier) -> None:
    engine = begin(filled, max_num_seqs=1)
    engine.add("b", [9] * 10)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["b"]
    engine.finish()


def test_a_request_that_needs_a_block_that_is_being_loaded_waits_for_it(filled: FakeTier) -> None:
    engine = begin(filled)
    engine.add("b", [*PROMPT[:17], 1, 2, 3])
    engine.step()
    assert engine.status("b") is RequestStatus.WAITING
    assert engine.transfers.num_loads_begun == 1
    engine.move()
    engine.finish()
    assert engine.transfers.num_loads_begun == 1
    assert engine.prefills["b"] == PrefillStats(20, 4, 16, 0), "it has hit what was loaded for another: locally"


def test_an_abort_frees_the_one_that_waits_for_its_load(filled: FakeTier) -> None:
    engine = begin(filled)
    engine.add("b")
    engine.step()
    engine.core.abort_requests(["a"])
    del engine.requests["a"]
    assert engine.held() == {"zombie": 7}
    engine.step()  # sends the cancel; b loads by itself
    assert engine.status("b") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.transfers.num_loads == {"cancelled": 1}
    engine.finish()
    assert engine.prefills["b"].num_external_cached_tokens == 28


def test_a_load_continues_after_local_hits(filled: FakeTier) -> None:
    engine = Engine(filled)
    engine.add("short", PROMPT[:9], skips=True)  # computes two blocks
    engine.finish()
    engine.add("a")
    engine.finish()
    assert engine.prefills["a"] == PrefillStats(30, 2, 8, 20, {"disk": 20})


def test_after_a_restart_prompt_and_outputs_are_loaded(filled: FakeTier) -> None:
    """The journal sends a request again with its outputs: an ordinary admission."""
    engine = Engine(filled)
    params = SamplingParams(max_tokens=10)
    received = expected_output(engine.executor.model, PROMPT, params, 64).token_ids[:7]
    engine.add("a", max_tokens=10, output_token_ids=received)
    engine.finish()
    assert engine.transfers.prefix_cache_stats.hits == 36, "nine blocks of 30 + 7 tokens"


def test_a_preempted_request_loads_again(filled: FakeTier) -> None:
    engine = Engine(filled)
    engine.add("a", max_tokens=12)
    engine.step(), engine.move(), engine.step(2)
    assert engine.status("a") is RequestStatus.RUNNING
    assert engine.core.lifecycle.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert engine.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.move()
    engine.step(0)
    engine.finish()
    assert engine.transfers.num_loads == {"ok": 2}
    assert engine.transfers.prefix_cache_stats.hits == 28, "re-admissions are counted apart"


@pytest.mark.parametrize("kind", ["lost", "damaged"])
def test_what_is_before_a_bad_record_is_used(filled: FakeTier, kind: str) -> None:
    place = next(p for p, record in filled.records.items() if record.key.token_ids == tuple(PROMPT[12:16]))
    if kind == "lost":
        del filled.records[place]
    else:
        filled.records[place] = replace(filled.records[place], slots=b"")
    engine = begin(filled)
    engine.finish()
    assert engine.prefills["a"] == PrefillStats(30, 18, 0, 12, {"disk": 12})
    assert engine.transfers.num_loads == {"partial": 1}
    assert engine.transfers.num_rejected_records == {"io" if kind == "lost" else "mac": 1}
    assert engine.transfers.num_accepted_records == 3
    assert place in filled.records, "it was computed, and saved again"


@pytest.mark.parametrize("num_good", [0, 3])
def test_what_one_source_has_not_brought_another_brings(filled: FakeTier, num_good: int) -> None:
    filled.has_peer = True
    first = SIZE * num_good
    place = next(p for p, r in filled.records.items() if list(r.key.token_ids) == PROMPT[first : first + SIZE])
    record = filled.records[place]
    filled.records[place] = replace(record, slots=b"")
    engine = begin(filled)
    engine.move()
    filled.records[place] = record
    engine.step()
    assert engine.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS, "it is loaded from the other source"
    engine.finish()
    by_source = {"p2p": first, "disk": 28 - first}
    assert engine.prefills["a"] == PrefillStats(30, 2, 0, 28, {k: v for k, v in by_source.items() if v})
    assert engine.transfers.num_loads == {"partial" if num_good else "failed": 1, "ok": 1}
    assert engine.held() == {}


def audited(tier: FakeTier, share: float = 1.0, **transfer: Any) -> Engine:
    """Returns an engine whose loads from the disk are computed instead."""
    engine = Engine(tier, **transfer)
    engine.exchange.connector.audits = LoadAudits(share, "disk")
    engine.add("a")
    return engine


def test_an_audited_load_is_computed_and_its_blocks_compared(filled: FakeTier) -> None:
    engine = audited(filled)
    engine.finish()
    assert engine.prefills["a"] == PrefillStats(30, 30, 0, 0, {})
    assert (engine.transfers.num_loads, engine.transfers.num_audited_blocks) == ({}, {"same": 7})
    assert engine.transfers.num_dropped_blocks == {}
    engine = audited(filled, share=0.0)
    engine.finish()
    assert (engine.transfers.num_tier_loads, engine.transfers.num_audited_blocks) == ({"disk": {"ok": 1}}, {})


def test_blocks_that_differ_are_told_to_the_store(filled: FakeTier) -> None:
    engine, told = audited(filled), list[SavedBlock]()
    engine.exchange.connector.on_difference = lambda block, audit: told.append(block)  # type: ignore[method-assign]
    while not engine.exchange.saver.sent:
        engine.step()
    ((save_id, order),) = engine.exchange.saver.sent.items()
    assert engine.transfers.num_waiting_saves == {"pinned": 0, "postponed": 0}, "nothing is to be saved"
    engine.exchange.saver.end(SaveResult(save_id, 4, differing=[1, 5]), 0.0)
    assert told == [order.blocks[1], order.blocks[5]]
    assert engine.held() == {}
    engine.finish()
    assert engine.transfers.num_audited_blocks == {"same": 4, "differs": 2, "skipped": 1}


def test_an_audit_gives_way(filled: FakeTier) -> None:
    """Without a pin, and when room is needed before it was sent."""
    engine = audited(filled, max_pinned_share=0.0)
    engine.finish()
    assert engine.transfers.num_audited_blocks == {"same": 1, "skipped": 6}
    engine = audited(filled)
    while not engine.exchange.saver.unsent:
        engine.step()
    assert engine.exchange.saver.drop_unsent()
    engine.finish()
    assert engine.transfers.num_audited_blocks == {"skipped": 7}


def test_no_source_is_asked_twice(filled: FakeTier) -> None:
    filled.has_peer = True
    place = next(p for p, r in filled.records.items() if list(r.key.token_ids) == PROMPT[:SIZE])
    filled.records[place] = replace(filled.records[place], slots=b"")
    engine = begin(filled)
    engine.finish()
    assert engine.transfers.num_loads == {"failed": 2}
    assert engine.prefills["a"] == PrefillStats(30, 30, 0, 0, {})


def test_a_late_load_is_cancelled_and_its_verified_part_used(filled: FakeTier) -> None:
    engine = begin(filled)
    engine.move(2)
    engine.step()
    assert engine.core.is_blocked()
    engine.clock.now += 1.9
    engine.step()
    engine.clock.now += 1.9  # no progress for 2 s, and not measured before: that is late
    assert not engine.core.is_blocked()
    engine.step()
    assert engine.worker.active[1].is_cancelled
    engine.move()
    engine.finish()
    assert engine.transfers.num_loads == {"cancelled": 1}
    assert engine.prefills["a"].num_external_cached_tokens in (8, 12, 28)


def test_a_hung_source_costs_a_bound_and_then_rests(filled: FakeTier) -> None:
    engine = begin(filled, "wedged")
    engine.clock.now += 2.0
    engine.step()  # the cancel
    engine.clock.now += 0.05
    engine.step()
    assert engine.status("a") is RequestStatus.RUNNING, "it computes now"
    assert engine.held()["zombie"] == 7
    engine.add("b", [*PROMPT[:-1], 1])
    engine.step()
    assert engine.transfers.num_loads_begun == 1, "nothing is loaded from a source that rests"
    engine.clock.now += 5.0
    engine.step()
    assert engine.held()["quarantined"] == 7
    engine.worker.manners = ["good"]
    engine.worker.free()
    engine.move()
    engine.finish()
    assert engine.held() == {}
    assert engine.transfers.num_loads == {"failed": 1}


@pytest.fixture
def of_two(tier: FakeTier) -> FakeTier:
    """A store that has the parts of two workers of PROMPT and its answer."""
    engine = Engine(tier, workers=2)
    engine.add("first", max_tokens=10)
    engine.finish()
    engine.core.shutdown()
    assert len(tier.records) == 18
    return tier


def test_a_load_ends_with_the_last_of_several_workers(of_two: FakeTier) -> None:
    engine = begin(of_two, workers=2)
    worker: Any = engine.worker
    while worker.ranks[0].advance():
        pass
    engine.step()
    assert engine.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.core.is_blocked()
    while worker.ranks[1].advance():
        pass
    engine.worker.advance()
    engine.finish()
    assert engine.prefills["a"] == PrefillStats(30, 2, 0, 28, {"disk": 28})
    engine.add("b")
    engine.finish()
    assert engine.prefills["b"] == PrefillStats(30, 2, 28), "from the cache"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_of_several_workers_cannot_read_all_compute(of_two: FakeTier, rank: int) -> None:
    tokens = tuple(PROMPT[12:16])
    place = next(p for p, r in of_two.records.items() if r.key.token_ids == tokens and r.namespace == f"#{rank}")
    del of_two.records[place]
    engine = begin(of_two, workers=2)
    engine.finish()
    assert engine.prefills["a"] == PrefillStats(30, 18, 0, 12, {"disk": 12})
    assert engine.transfers.num_rejected_records == {"io": 1}
    assert place in of_two.records, "it was computed, and saved again"


def test_one_of_several_workers_that_hangs_costs_what_a_hung_source_does(of_two: FakeTier) -> None:
    engine = begin(of_two, workers=2)
    worker: Any = engine.worker
    (transfer,) = worker.ranks[1].active.values()
    transfer.manner = "wedged"
    while worker.ranks[0].advance():
        pass
    engine.clock.now += 2.0
    engine.step()  # the cancel
    engine.clock.now += 0.05
    engine.step()
    assert engine.status("a") is RequestStatus.RUNNING, "it computes now"
    assert engine.held()["zombie"] == 7, "one of them writes yet"
    worker.free()
    engine.move()
    engine.finish()
    assert engine.held() == {}


def test_a_second_end_of_a_load_is_ignored(filled: FakeTier) -> None:
    engine = begin(filled, "twice")
    engine.finish()
    assert engine.transfers.num_loads == {"ok": 1}


def test_later_is_asked_again_in_each_step(filled: FakeTier) -> None:
    engine = Engine(filled)
    filled.asks_again = True
    engine.add("a")
    engine.step(3)
    assert engine.status("a") is RequestStatus.WAITING
    assert not engine.core.is_blocked(), "nothing would wake it"
    filled.asks_again = False
    engine.step()
    assert engine.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.finish()


def test_a_message_of_a_postponed_answer_is_sent_at_once(filled: FakeTier) -> None:
    engine, sent = Engine(filled), list[KVConnectorMetadata]()
    connector: Any = engine.exchange.connector
    connector.asks_again, filled.asks_again = False, True
    connector.take_message = lambda: {"ask": 1}
    send, engine.exchange.link.send = engine.exchange.link.send, sent.append
    engine.add("a")
    engine.step()
    assert [orders.params for orders in sent] == [{"ask": 1}, {"ask": 1}], "when it was added, and when it was its turn"
    engine.exchange.link.send, filled.asks_again = send, False
    engine.exchange.link.put(KVConnectorOutput())
    engine.finish()
    assert engine.prefills["a"].num_external_cached_tokens == 28


def test_who_must_compute_all_or_has_an_adapter_does_not_load(filled: FakeTier) -> None:
    engine = Engine(filled)
    engine.add("a", skips=True)
    engine.step()
    assert engine.status("a") is RequestStatus.RUNNING
    request: Any = engine.scheduler.requests["a"]
    other = EngineCoreRequest("b", PROMPT, SamplingParams(), None, 0.0, lora_request=LoRARequest("l", 1, "/l"))
    request.origin = other
    hits = engine.scheduler.kv_cache_manager.empty_kv_cache_blocks
    assert not engine.exchange.begins_load(request, hits, 0, [], 0)


def test_few_tokens_are_computed(filled: FakeTier) -> None:
    engine = Engine(filled, min_load_tokens=29)
    engine.add("a")
    engine.step()
    assert engine.status("a") is RequestStatus.RUNNING
    engine.finish()


# -- room ------------------------------------------------------------------------------------------------------


def test_a_request_waits_for_blocks_that_a_transfer_holds(filled: FakeTier) -> None:
    """Nothing runs beside the request, and it does not fit now: to fail it would be wrong."""
    engine = begin(filled, "hung", num_blocks=17)
    engine.core.abort_requests(["a"])
    del engine.requests["a"]
    engine.add("b", [9] * 40)  # ten blocks, eleven with its output; nine are free
    engine.step(2)
    assert engine.status("b") is RequestStatus.WAITING
    assert engine.core.is_blocked()
    engine.finish()


def test_a_request_fails_if_blocks_do_not_come_back(filled: FakeTier) -> None:
    engine = begin(filled, "wedged", num_blocks=17)
    engine.core.abort_requests(["a"])
    engine.add("b", [9] * 40)
    engine.step()
    engine.clock.now += 5.0
    engine.step(2)
    assert not engine.scheduler.requests, "it would wait for ever"


def test_loaded_blocks_are_given_to_a_running_request_before_one_is_preempted(filled: FakeTier) -> None:
    engine = begin(filled, num_blocks=20, max_num_seqs=1)
    engine.add("b", [9] * 24, max_tokens=30)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["b"]
    engine.move()
    engine.step()
    assert engine.held()["loaded"] == 7
    engine.step(28)
    assert "loaded" not in engine.held()
    assert not engine.scheduler.requests["a"].num_preemptions
    engine.finish()


def test_pins_have_a_bound_and_what_exceeds_it_is_saved_later(tier: FakeTier) -> None:
    engine = Engine(tier, max_pinned_share=0.05)
    engine.add("a")
    engine.step(2)
    assert engine.held() == {"pinned": 2}
    assert engine.transfers.num_waiting_saves == {"pinned": 2, "postponed": 5}
    engine.clock.now += 3.0
    engine.finish()
    assert engine.held() == {}
    assert len(tier.records) == 8
    assert (engine.transfers.num_saved_blocks, engine.transfers.num_dropped_blocks) == (8, {})
    assert engine.transfers.save_lags[0] == 3.0


def test_blocks_that_were_there_are_dropped_and_what_is_put_elsewhere_is_counted(tier: FakeTier) -> None:
    engine = Engine(tier)
    engine.exchange.connector.remote_saves = saves = RemoteSaves()
    engine.add("a")
    engine.step(2)
    ((save_id, order),) = engine.exchange.saver.sent.items()
    engine.exchange.saver.end(SaveResult(save_id, 7, num_present=5), engine.clock.now)
    saves.add(0, {"begun": 7, "outcomes": {"stored": 2, "present": 5}, "waiting": 0})
    engine.step()
    assert len(order.blocks) == 7
    assert (engine.transfers.num_saved_blocks, engine.transfers.num_dropped_blocks) == (2, {"present": 5})
    assert len(engine.transfers.save_lags) == 1
    assert engine.transfers.num_remote_saves == {"stored": 2, "present": 5}
    engine.finish()


def test_a_save_ends_when_its_report_comes_and_not_when_the_loop_takes_it(tier: FakeTier) -> None:
    engine = Engine(tier)
    engine.add("a")
    engine.step(2)
    engine.clock.now += 1.5
    engine.move()
    engine.clock.now += 3.0  # a step that takes long
    engine.finish()
    assert engine.transfers.save_lags[0] == 1.5


def postpone(tier: FakeTier, **options: Any) -> Engine:
    """An engine with an ended request, whose blocks are in memory; the store could not take them."""
    engine = Engine(tier, **options)
    tier.takes_saves = False
    engine.add("a")
    engine.finish()
    assert engine.held() == {}
    assert engine.transfers.num_waiting_saves == {"pinned": 0, "postponed": 8}
    return engine


def test_what_a_store_had_when_it_failed_is_saved_later(tier: FakeTier) -> None:
    engine = Engine(tier)
    engine.worker.manners = ["away"]
    engine.add("a")
    engine.step(2)
    tier.takes_saves = False
    engine.clock.now += 1.0
    engine.move()
    engine.step()
    assert engine.held() == {}
    counts = engine.transfers
    assert counts.num_waiting_saves == {"pinned": 0, "postponed": 4}, "one has come since"
    assert (counts.num_saves_begun, counts.num_saved_blocks, counts.num_dropped_blocks) == (8, 4, {})
    engine.worker.manners, tier.takes_saves = ["good"], True
    engine.exchange.link.put(KVConnectorOutput())
    engine.finish()
    assert len(tier.records) == 8
    assert (engine.transfers.num_saved_blocks, engine.transfers.num_dropped_blocks) == (8, {})
    assert engine.transfers.save_lags[0] == engine.transfers.save_lags[1] == 1.0


def test_what_a_store_had_when_it_failed_is_postponed_within_a_bound(
    tier: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that has lost its content meanwhile is not, and the oldest go first."""
    monkeypatch.setattr(saver_module, "MAX_POSTPONED", 4)
    engine = Engine(tier)
    engine.worker.manners = ["hung"]
    engine.add("a")
    engine.step(2)
    saver = engine.exchange.saver
    ((save_id, order),) = saver.sent.items()
    tier.takes_saves = False
    engine.scheduler.kv_cache_manager.block_pool.blocks[order.blocks.block_ids[6]].forgotten_at = 1 << 40
    saver.end(SaveResult(save_id, 1, "partial", reason=AWAY), engine.clock.now)
    assert list(saver.postponed) == order.blocks.block_ids[2:6]
    assert saver._held.stats.num_dropped_blocks == {"evicted": 2}
    engine.worker.kill()


def test_a_block_that_is_postponed_twice_was_evicted_in_between(tier: FakeTier) -> None:
    """Its first entry stays until it is offered, and a save of what the block has now may end with a failed store."""
    engine = Engine(tier)
    engine.worker.manners = ["hung"]
    engine.add("a")
    engine.step(2)
    saver = engine.exchange.saver
    ((save_id, order),) = saver.sent.items()
    saver.postponed = {order.blocks.block_ids[3]: _Postponed(0, b"evicted", None, "", 0, 0.0)}
    tier.takes_saves = False
    saver.end(SaveResult(save_id, 0, "failed", reason=AWAY), engine.clock.now)
    assert list(saver.postponed) == order.blocks.block_ids
    assert saver.postponed[order.blocks.block_ids[3]].digest == order.blocks.digests[3]
    assert saver._held.stats.num_dropped_blocks == {"evicted": 1}
    engine.worker.kill()


def test_what_is_computed_before_the_store_can_take_it_is_saved_later(tier: FakeTier) -> None:
    engine = postpone(tier)
    tier.takes_saves = True
    assert not engine.core.has_work(), "a report makes the news"
    engine.exchange.link.put(KVConnectorOutput())
    engine.finish()
    assert len(tier.records) == 8
    assert not engine.transfers.num_dropped_blocks


def test_a_store_that_rests_is_asked_again_when_it_said(tier: FakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = postpone(tier)
    tier.takes_saves = True
    now = engine.clock.now
    monkeypatch.setattr(
        engine.exchange.connector, "seconds_to_save", lambda: max(0.0, now + 1.0 - engine.clock.now), raising=True
    )
    engine.exchange.link.put(KVConnectorOutput())
    engine.step()
    assert not engine.core.has_work()
    engine.clock.now += 1.0
    engine.finish()
    assert len(tier.records) == 8


def test_a_postponed_block_that_was_evicted_is_not_saved(tier: FakeTier) -> None:
    engine = postpone(tier, num_blocks=12)
    engine.add("b", [9] * 30)
    engine.finish()
    tier.takes_saves = True
    engine.exchange.link.put(KVConnectorOutput())
    engine.finish()
    assert engine.transfers.num_dropped_blocks["evicted"] >= 4
    assert len(tier.records) == 16 - engine.transfers.num_dropped_blocks["evicted"]
    restarted = Engine(tier)
    restarted.add("a")
    restarted.add("b", [9] * 30)
    restarted.finish()  # compares the answers
    assert restarted.transfers.prefix_cache_stats.hits >= 28


def test_a_postponed_block_that_is_filled_again_is_not_saved_before_it_is_computed(tier: FakeTier) -> None:
    """Its content can be hit as soon as the step is scheduled, under the digest that was postponed."""
    engine = postpone(tier)
    pool, hashes = engine.scheduler.kv_cache_manager.block_pool, {b.block_hash: b for b in cached_blocks(engine)}
    postponed = [pool.blocks[block_id] for block_id in engine.exchange.saver.postponed]
    pool.evict_blocks(pool.blocks)
    pool.free_blocks([*postponed, *(b for b in pool.get_new_blocks(39) if b not in postponed)])
    engine.add("b", skips=True)
    engine.scheduler.schedule()  # another may be scheduled before its result is in
    assert {b.block_hash: b for b in cached_blocks(engine)}.items() <= hashes.items(), "as when they were postponed"
    tier.takes_saves = True
    engine.scheduler.schedule()
    assert engine.held() == {}


def cached_blocks(engine: Engine) -> list[KVCacheBlock]:
    pool = engine.scheduler.kv_cache_manager.block_pool
    return [block for block in pool.blocks if block.block_hash is not None]


def test_a_reset_forgets_postponed_blocks(tier: FakeTier) -> None:
    engine = postpone(tier)
    assert engine.core.lifecycle.reset_prefix_cache()
    tier.takes_saves = True
    engine.exchange.link.put(KVConnectorOutput())
    engine.finish()
    assert not tier.records
    assert engine.transfers.num_dropped_blocks == {"evicted": 8}


def test_nothing_is_offered_while_a_request_waits_for_an_answer_or_for_room(tier: FakeTier) -> None:
    """Blocks that were just given back would be pinned again."""
    engine = postpone(tier)
    tier.asks_again = True
    engine.add("b", [9] * 10)
    engine.step()
    tier.takes_saves = True
    engine.step(2)
    assert engine.status("b") is RequestStatus.WAITING
    assert engine.held() == {}
    tier.asks_again = False
    engine.finish()
    assert not any(engine.transfers.num_waiting_saves.values())


# -- saves -----------------------------------------------------------------------------------------------------


def test_a_block_is_saved_when_the_result_of_its_step_is_in(tier: FakeTier) -> None:
    engine = Engine(tier)
    engine.add("a", max_tokens=6)
    engine.step()
    assert not engine.worker.active, "the result is in, and the order goes with the next step"
    assert engine.held() == {"pinned": 7}
    engine.step()
    assert len(engine.worker.active) == 1
    engine.core.abort_requests(["a"])
    assert engine.held() == {"pinned": 7}, "a save outlives its request"
    engine.move()
    engine.step()
    assert len(tier.records) == 7
    assert engine.held() == {}


def test_blocks_of_two_requests_that_compute_the_same_side_by_side_are_saved_once(tier: FakeTier) -> None:
    engine = Engine(tier)
    engine.add("a", max_tokens=6)
    engine.add("b", skips=True, max_tokens=6)
    engine.step(2)
    (order,) = engine.exchange.saver.sent.values()
    assert len(order.blocks) == len(set(order.blocks.digests)) == 7
    assert engine.held() == {"pinned": 7}
    engine.add("c", skips=True)
    engine.step(2)
    assert engine.held() == {"pinned": 8}, "one more, which both have filled; the others are in progress"
    engine.finish()
    assert not engine.transfers.num_dropped_blocks


def test_blocks_are_named_while_their_step_is_in_flight_and_saved_with_their_salt(tier: FakeTier) -> None:
    engine = Engine(tier)
    engine.add("a", max_tokens=6, cache_salt="salt")
    engine.scheduler.schedule()
    filled = engine.exchange.saver.find_filled()
    assert filled == {block.block_id for block in cached_blocks(engine)}
    assert len(filled) == 7
    engine.exchange.saver.note_computed(1, 0.0)
    (order,) = engine.exchange.saver.unsent
    assert order.blocks.extra_keys == [(("cache_salt", "salt"),), *[None] * 6]
    assert [block.block_id for block in order.blocks] == sorted(filled, key=order.blocks.block_ids.index)


@pytest.mark.parametrize("most", [1, 3])
def test_a_store_takes_as_many_as_it_can_and_the_rest_later(tier: FakeTier, most: int) -> None:
    tier.most_at_once = most
    engine = Engine(tier)
    engine.add("a")
    engine.step()
    assert engine.held() == {"pinned": most}
    assert engine.exchange.saver.count_waiting() == {"pinned": most, "postponed": 7 - most}
    order = [block.digest for block in engine.exchange.saver.postponed.values()]
    engine.step()
    assert engine.exchange.saver.next_deadline > engine.clock.now
    assert order[most:] == [block.digest for block in engine.exchange.saver.postponed.values()], "the oldest first"
    for _ in range(20):
        engine.clock.now += 0.01
        engine.finish()
    assert len(tier.records) == 8
    assert not engine.transfers.num_dropped_blocks


def test_a_block_that_is_stored_is_not_saved_again(filled: FakeTier) -> None:
    engine = Engine(filled)
    engine.add("a", skips=True)
    engine.step(2)
    assert not engine.worker.active


# -- the rest of life --------------------------------------------------------------------------------------------


def wait_by_moving(engine: Engine, does_move: bool) -> list[float]:
    """Replaces waiting: time passes, and transfers move if they can. Returns what was waited."""
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        engine.clock.now += seconds / 2 + 0.01
        if does_move:
            engine.move()

    engine.exchange.link.wait = wait  # type: ignore[method-assign]
    return waited


def test_a_reset_ends_loads_and_succeeds(filled: FakeTier) -> None:
    engine = begin(filled, "hung")
    wait_by_moving(engine, does_move=True)
    assert not engine.core.lifecycle.reset_prefix_cache(), "blocks are in use, and nothing may be ended"
    assert engine.held() == {"loading": 7}
    assert engine.core.lifecycle.reset_prefix_cache(reset_running_requests=True)
    assert engine.held() == {}
    engine.worker.manners = ["good"]
    engine.finish()


def test_a_reset_waits_a_second_and_succeeds_without_wedged_blocks(filled: FakeTier) -> None:
    engine = begin(filled, "wedged")
    start = engine.clock.now
    waited = wait_by_moving(engine, does_move=False)
    assert engine.core.lifecycle.reset_prefix_cache(reset_running_requests=True)
    assert waited
    assert engine.clock.now - start < 1.2
    assert engine.held() == {"zombie": 7}, "they are expected for 5 s, as others"
    assert not engine.scheduler.kv_cache_manager.block_pool.cached_blocks.num_blocks
    engine.worker.manners = ["good"]
    engine.worker.free()
    engine.finish()


def test_after_a_reset_a_request_waits_for_the_blocks_of_saves_that_go_on(tier: FakeTier) -> None:
    engine = Engine(tier, num_blocks=12)
    engine.worker.manners = ["wedged"]
    engine.add("a", max_tokens=1)
    engine.step(2)
    wait_by_moving(engine, does_move=False)
    assert engine.core.lifecycle.reset_prefix_cache(reset_running_requests=True)
    assert engine.held() == {"pinned": 7}
    engine.add("b", [8] * 30)
    engine.step()
    assert engine.status("b") is RequestStatus.WAITING
    engine.worker.manners = ["good"]
    engine.worker.free()
    engine.finish()


def test_new_weights_are_another_namespace(filled: FakeTier) -> None:
    engine = begin(filled)
    wait_by_moving(engine, does_move=True)
    engine.core.lifecycle.update_weights("/other")
    engine.step()
    assert engine.status("a") is RequestStatus.RUNNING, "nothing that is stored fits"
    engine.finish()


def test_sleep_with_a_load_under_way(filled: FakeTier) -> None:
    engine = begin(filled)
    wait_by_moving(engine, does_move=True)
    engine.core.lifecycle.sleep(1, "keep")
    assert engine.held() == {}
    assert engine.core.lifecycle.wake_up()
    engine.finish()
    assert engine.prefills["a"].num_external_cached_tokens == 28, "waking is warm"


def test_the_store_can_be_dropped(filled: FakeTier) -> None:
    engine = Engine(filled)
    assert engine.core.lifecycle.reset_prefix_cache(reset_connector=True)
    engine.add("a")
    engine.step()
    assert engine.status("a") is RequestStatus.RUNNING


@pytest.mark.parametrize("outcome", [True, False])
def test_a_store_that_is_dropped_later_is_waited_for(tier: FakeTier, outcome: bool) -> None:
    """A core with a loop of its own goes on meanwhile; another waits, within a bound."""
    engine, sent, end = Engine(tier), list[KVConnectorMetadata](), Future[bool]()
    connector: Any = engine.exchange.connector
    connector.reset_cache, connector.take_message = lambda: end, lambda: {"drop": 1}
    connector.update_connector_output = lambda report: end.done() or end.set_result(outcome)
    engine.exchange.link.send = sent.append
    lifecycle = engine.core.lifecycle
    waited = wait_by_moving(engine, does_move=False)
    assert lifecycle.reset_prefix_cache(reset_connector=True) is False
    assert RESET_S / 2 <= sum(waited) <= 2 * RESET_S
    lifecycle.can_wait = True
    assert lifecycle.reset_prefix_cache(reset_connector=True) is end
    assert [order.params for order in sent] == [{"drop": 1}, {"drop": 1}]
    lifecycle.pause_scheduler("keep")
    engine.exchange.link.put(KVConnectorOutput())
    while engine.core.has_work():
        engine.step()
    assert end.result(timeout=0) is outcome, "also in a pause"
    lifecycle.can_wait = False
    assert lifecycle.reset_prefix_cache(reset_connector=True) is outcome
    assert lifecycle.reset_prefix_cache() is True


def test_a_snapshot_shows_what_is_held(filled: FakeTier) -> None:
    engine = begin(filled)
    snapshot = engine.scheduler.make_snapshot()
    assert snapshot.held_blocks == {"loading": 7}
    assert [request.place for request in snapshot.requests] in (["blocked"], ["waiting"])


def test_without_a_connector_there_is_a_null_object() -> None:
    core: Any = EngineCore(make_config(KVTransferConfig()), FakeExecutor, True)
    assert type(core.scheduler.exchange) is NoExchange
    assert core.scheduler.waiting.gates[1:] == ()
    assert core.scheduler.make_stats().kv_transfer is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_config": CacheConfig(enable_prefix_caching=False)}, "needs the prefix cache"),
    ],
)
def test_what_cannot_work_yet_is_refused(tier: FakeTier, changes: dict[str, Any], words: str) -> None:
    transfer = KVTransferConfig(kv_connector="FakeTier", kv_connector_extra_config={"tier": "test"})
    config = replace(make_config(transfer), **changes)
    with pytest.raises(ConfigError, match=words):
        EngineCore(config, FakeExecutor, True)


def test_an_unknown_connector_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'FakeTeir' is not known.*FakeTier"):
        KVTransferConfig(kv_connector="FakeTeir")


# -- leases ----------------------------------------------------------------------------------------------------


def lease(tier: FakeTier, *manners: Manner, **options: Any) -> Engine:
    """An engine that holds the blocks of an ended request."""
    tier.lease_interval = 1
    engine = Engine(tier, **options)
    engine.worker.manners = list(manners) or ["hung"]
    engine.exchange.saver._max_pinned_blocks = 0
    engine.add("a", max_tokens=1)
    engine.step(2)
    assert engine.leases == {"a": {"lease": "lease 1", "num_tokens": 28}}
    assert engine.held() == {"leased": 7}
    assert not engine.core.has_work()
    return engine


def test_a_lease_holds_the_blocks_of_the_prompt_until_it_is_released(tier: FakeTier) -> None:
    engine = lease(tier)
    engine.add("b", [8] * 30)
    engine.finish_but(["leased"])
    assert engine.held() == {"leased": 14}
    engine.worker.free()
    engine.finish()
    assert engine.held() == {}
    assert engine.transfers.num_leases == {"released": 2}


def test_a_request_that_runs_breaks_the_oldest_lease_before_one_is_preempted(tier: FakeTier) -> None:
    engine = lease(tier, num_blocks=17)  # 9 are left
    tier.lease_interval = 0
    engine.add("b", [8] * 30, max_tokens=20)
    engine.finish()
    assert engine.transfers.num_leases == {"broken": 1}
    assert engine.held() == {}


def test_a_request_that_waits_breaks_leases_only_where_nothing_runs(tier: FakeTier) -> None:
    engine = lease(tier, num_blocks=19)
    tier.lease_interval = 0
    engine.add("b", [8] * 15, max_tokens=2)
    engine.step()
    engine.add("c", [9] * 45, max_tokens=2)
    engine.step()
    assert engine.status("c") is RequestStatus.WAITING
    assert engine.held() == {"leased": 7}, "b runs, and will end"
    engine.finish()
    assert engine.transfers.num_leases == {"broken": 1}


def test_a_lease_that_was_not_sent_is_broken_at_once(tier: FakeTier) -> None:
    tier.lease_interval = 1
    engine = Engine(tier, num_blocks=12)
    engine.exchange.saver._max_pinned_blocks = 0
    engine.add("a", max_tokens=1)
    engine.step()
    engine.add("b", [9] * 40, max_tokens=1)
    engine.finish()
    assert engine.transfers.num_leases["broken"] == 1


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_reset_and_an_end_break_leases(tier: FakeTier, is_sent: bool) -> None:
    tier.lease_interval = 1
    engine = Engine(tier)
    engine.worker.manners = ["hung"]
    engine.exchange.saver._max_pinned_blocks = 0
    engine.add("a", max_tokens=1)
    engine.step(2 if is_sent else 1)
    assert engine.held() == {"leased": 7}
    engine.exchange.link.wait = lambda seconds: engine.move()  # type: ignore[method-assign]
    assert engine.core.lifecycle.reset_prefix_cache()
    assert engine.held() == {}
    engine.core.shutdown()


def test_a_block_that_a_step_in_flight_fills_is_not_leased(tier: FakeTier) -> None:
    """Another request may compute the same content, and its block be found."""
    tier.lease_interval = 1
    engine = Engine(tier)
    engine.exchange.saver.find_filled = lambda: {3}  # type: ignore[method-assign]
    engine.add("a", max_tokens=1)
    engine.finish()
    assert engine.leases == {"a": {"lease": "lease 1", "num_tokens": 0}}
    assert engine.held() == {}


def test_aborted_requests_and_those_with_adapters_are_not_leased(tier: FakeTier) -> None:
    tier.lease_interval = 1
    engine = Engine(tier)
    engine.add("a", max_tokens=9)
    engine.step()
    engine.core.abort_requests(["a"])
    del engine.requests["a"]
    engine.add("b", PROMPT[:3], max_tokens=1)
    engine.finish()
    assert engine.leases == {"b": {"lease": "lease 1", "num_tokens": 0}}, "less than a block: nothing is held"
    assert engine.held() == {}


@pytest.mark.parametrize(
    "event",
    [
        lambda s: s.add("other"),
        lambda s: s.core.abort_requests(["waits"]),
        lambda s: s.exchange.make_room(s.scheduler.running[0]),
        lambda s: s.exchange.begins_load(s.scheduler.requests["waits"], *EMPTY, [], 0),
        lambda s: s.exchange.let_go(loads_too=True),
        lambda s: s.exchange.set_weights("others"),
        lambda s: s.exchange.reset_store(can_wait=False),
        lambda s: s.exchange.link.put(KVConnectorOutput()),
    ],
)
def test_the_connector_sees_steps_after_events_only(
    tier: FakeTier, event: Callable[[Engine], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    s, seen = Engine(tier, max_num_seqs=1), list[SchedulerOutput]()
    s.add("runs", PROMPT[:1], max_tokens=20)
    s.add("waits", PROMPT[:6])
    s.step()
    monkeypatch.setattr(s.exchange.connector, "build_connector_meta", seen.append)
    s.step()
    assert len(seen) == 0, "idle"
    event(s)
    s.step()
    assert len(seen) == 1
    s.step()
    monkeypatch.setattr(s.exchange.connector, "sees_all_steps", True)
    s.exchange.reset_store(can_wait=False)
    s.step(2)
    assert len(seen) == 3


def test_blocks_with_an_adapter_that_is_not_known_by_its_files_are_noted_and_not_saved(tier: FakeTier) -> None:
    engine = Engine(tier)
    engine.add("a", PROMPT[:SIZE], max_tokens=6)
    engine.step()
    known, saver = engine.scheduler.requests["a"], engine.exchange.saver
    fields = {"sampling_params": known.sampling_params, "report": known.report, "block_hashes": [b"hash"]}
    request: Any = SimpleNamespace(adapter=("l", 1), lora_request=LoRARequest("l", 1, "/l"), **fields)
    tables = engine.scheduler.kv_cache_manager.get_tables("a")
    saver.note_full(request, 0, 1, tables)
    saver.note_scheduled(100)
    assert saver.find_filled() == {tables[0][0].block_id}
    num_orders = len(saver.unsent)
    saver.note_computed(100, 0.0)
    assert (saver.steps, len(saver.unsent)) == (deque(), num_orders)
