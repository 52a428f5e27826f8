"""Connectors that are written for vLLM's interface: the one of docs/recipes/add_a_connector.md, and one of files."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from quire.cli.replay_report import read_recording
from quire.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from quire.config.hf_config import HFConfig
from quire.config.kv_transfer import CONNECTORS, FOREIGN, KVTransferConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.parallel import ParallelConfig
from quire.engine.core import EngineCore
from quire.engine.executor.late_answers import MAX_BYTES, TransferReports
from quire.engine.kv_cache import foreign
from quire.engine.kv_cache.foreign import ForeignScheduler
from quire.engine.request import RequestStatus
from quire.errors import ConfigError
from quire.kv_store.connector import TransferResults
from quire.sampling_params import SamplingParams
from quire.testing.fake_executor import FakeExecutor
from quire.testing.fake_model import expected_output
from quire.wire.engine_core import EngineCoreRequest, FinishReason
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from quire.wire.kv_transfer import KVConnectorMetadata
from quire.wire.serial import MsgpackDecoder, MsgpackEncoder
from quire.wire.worker_calls import TransferReport, decode_late, encode_transfer_report
from quire.worker.attention.backend import KVCache
from quire.worker.kv_transfer.compat import CompatWorker, join_parts
from quire.worker.kv_transfer.worker import KVConnectorWorker

from .disk_connector import DiskConnector

PAGE = Path(__file__).resolve().parents[4] / "docs" / "recipes" / "add_a_connector.md"
SIZE = 4
PROMPT = [(7 * i) % 50 for i in range(30)]
DISK = DiskConnector.__module__


class FakeMemoryWorker(CompatWorker):
    """The adapter's worker half on the fake executor's memory: one layer."""

    def describe_memory(self, memory: Any) -> tuple[dict[str, Any], KVCacheConfig]:
        layer = torch.frombuffer(memory._slots, dtype=torch.uint8).view(1, memory.num_blocks, -1)
        groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(SIZE, 1, 1))]
        return {"layer": layer}, KVCacheConfig(memory.num_blocks, [], groups)


class HalfMemoryWorker(FakeMemoryWorker):
    """One of two workers: half of the bytes of each slot are in its layer."""

    def describe_memory(self, memory: Any) -> tuple[dict[str, Any], KVCacheConfig]:
        layers, config = super().describe_memory(memory)
        parts = layers["layer"].unflatten(-1, (2, -1))
        return {"layer": parts[..., self.rank, :]}, config


class TwoHalves(KVConnectorWorker):
    """Two workers on the fake executor's memory. Orders and reports pass the encoding of processes."""

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        super().__init__(config, rank)
        self.workers = [HalfMemoryWorker(config, rank) for rank in range(2)]
        self.reports = TransferReports(2)
        for worker in self.workers:
            worker.report = lambda report, rank=worker.rank: self._pass(encode_transfer_report(rank, report))  # type: ignore[misc]
        self.late: deque[bytes] = deque()
        """Reports of the second worker, which come a step later; empty: they come at once."""
        self.is_late = False

    def _pass(self, data: bytes) -> None:
        assert len(data) <= MAX_BYTES
        report = decode_late(data)
        assert isinstance(report, TransferReport)
        if report.rank and self.is_late:
            self.late.append(data)
        else:
            self.reports.add(report.rank, report.output)

    def register_kv_caches(self, memory: Any) -> None:
        for worker in self.workers:
            worker.register_kv_caches(memory)

    def start(self, orders: KVConnectorMetadata) -> None:
        self.reports.register_callback(self.report)
        late, self.late = self.late, deque()
        for data in late:
            report: Any = decode_late(data)
            self.reports.add(report.rank, report.output)
        frames = MsgpackEncoder().encode(orders)
        for worker in self.workers:
            worker.start(MsgpackDecoder(KVConnectorMetadata).decode(frames))

    def end_step(self) -> None:
        for worker in self.workers:
            worker.end_step()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture(autouse=True)
def fake_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "POLL_S", 0.0)  # a step may be made at any time
    row = CONNECTORS[FOREIGN]
    monkeypatch.setitem(CONNECTORS, "FakeMemory", row._replace(worker=f"{__name__}:FakeMemoryWorker"))
    monkeypatch.setitem(CONNECTORS, "TwoFakeMemories", row._replace(worker=f"{__name__}:TwoHalves"))


@pytest.fixture
def memory_connector(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module of the page."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    module = types.ModuleType("memory_connector")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, str(PAGE), "exec"), vars(module))
    return module


def settle(module: str, name: str, policy: str = "recompute", **extra: Any) -> KVTransferConfig:
    values = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
    return KVTransferConfig(transfer=values).settle()


class Engine:
    """A core whose answers are compared with the model's."""

    def __init__(
        self, transfer: KVTransferConfig, num_blocks: int = 40, parallel: str = "", record: Path | None = None
    ) -> None:
        hf_config = HFConfig({"max_position_embeddings": 64}, Path())
        config = EngineConfig(
            model_config=ModelConfig(max_model_len=-1, hf_config=hf_config),
            cache_config=CacheConfig(block_size=SIZE, num_gpu_blocks_override=num_blocks),
            scheduler_config=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
            parallel_config=ParallelConfig(**{parallel: 2} if parallel else {}),
            kv_transfer_config=replace(transfer, kv_connector="TwoFakeMemories" if parallel else "FakeMemory"),
            observability_config=ObservabilityConfig(record=None if record is None else str(record)),
        )
        self.core = EngineCore(config, FakeExecutor, True)
        executor, scheduler = self.core.executor, self.core.scheduler
        assert isinstance(executor, FakeExecutor)
        self.executor = executor
        self.scheduler: Any = getattr(scheduler, "observed", scheduler)
        self.exchange = getattr(self.scheduler.exchange, "watched", self.scheduler.exchange)
        half = self.exchange.connector
        assert isinstance(half, ForeignScheduler)
        workers = executor.transfers.workers if isinstance(executor.transfers, TwoHalves) else [executor.transfers]
        self.scheduler_half: Any = half.foreign
        self.worker_halves: list[Any] = [worker.foreign for worker in workers]  # type: ignore[union-attr]
        self.worker_half: Any = self.worker_halves[0]
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason | None] = {}
        self.num_external: dict[str, int] = {}
        self.transfer_params: dict[str, dict[str, Any]] = {}
        self.params: dict[str, tuple[list[int], SamplingParams]] = {}

    def add(self, request_id: str, prompt: list[int] = PROMPT, max_tokens: int = 4) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.params[request_id], self.tokens[request_id] = (prompt, params), []
        request = EngineCoreRequest(request_id, prompt, params, None, 0.0)
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outputs, _ = self.core.step_fn()
            for output in [output for batch in (outputs or {}).values() for output in batch.outputs]:
                self.tokens[output.request_id] += output.new_token_ids
                self.reasons[output.request_id] = output.finish_reason
                if output.kv_transfer_params is not None:
                    self.transfer_params[output.request_id] = output.kv_transfer_params
                if output.prefill_stats is not None:
                    self.num_external[output.request_id] = output.prefill_stats.num_external_cached_tokens
            self.scheduler.kv_cache_manager.check_integrity()

    def finish(self) -> None:
        """Runs everything to its end, and compares the answers of what has not failed."""
        for _ in range(100):
            if not self.scheduler.requests:
                break
            self.await_loads()
            self.step()
        assert not self.scheduler.requests
        for request_id, (prompt, params) in self.params.items():
            if self.reasons.get(request_id) is FinishReason.LENGTH:
                assert self.tokens[request_id] == expected_output(self.executor.model, prompt, params, 64).token_ids

    def await_loads(self) -> None:
        """Waits for loads in threads, if they may load."""
        for half in getattr(self.worker_half, "parts", self.worker_halves):
            if isinstance(half, DiskConnector) and DiskConnector.may_load.is_set():
                wait(half.futures.values())

    def held(self) -> dict[str, int]:
        return dict(self.scheduler.kv_cache_manager.held.count())

    def status(self, request_id: str) -> RequestStatus:
        status: RequestStatus = self.scheduler.requests[request_id].status
        return status


def run(transfer: KVTransferConfig, **options: Any) -> Engine:
    """An engine that has answered the prompt."""
    engine = Engine(transfer, **options)
    engine.add("a")
    engine.finish()
    assert engine.reasons == {"a": FinishReason.LENGTH}
    return engine


def test_the_connector_of_the_recipe_finds_blocks_of_another_engine(memory_connector: types.ModuleType) -> None:
    transfer = settle("memory_connector", "MemoryConnector")
    first = run(transfer)
    assert first.num_external == {"a": 0}
    assert len(memory_connector.STORE) == 8, "of the prompt in two steps, and of the answer"
    second = run(transfer)
    assert second.num_external == {"a": 28}
    assert second.held() == {}
    assert second.executor.num_computed_tokens == 2 + 3
    second.add("longer", [*PROMPT, *range(10)])
    second.finish()
    assert len(memory_connector.STORE) > 8
    assert not second.scheduler_half._requests
    assert not second.scheduler_half._block_ids


def test_requests_that_are_preempted_load_again(memory_connector: types.ModuleType) -> None:
    engine = run(settle("memory_connector", "MemoryConnector"))
    engine.add("b", max_tokens=12)
    engine.step(3)
    assert engine.core.lifecycle.reset_prefix_cache(reset_running_requests=True)
    engine.finish()
    assert engine.exchange.loader.sent == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_files_are_read_by_another_engine(tmp_path: Path, is_async: bool) -> None:
    transfer = settle(DISK, "DiskConnector", shared_storage_path=str(tmp_path), is_async=is_async)
    DiskConnector.may_load.set()
    assert run(transfer).num_external == {"a": 0}
    assert len(list(tmp_path.iterdir())) == 4, "of the first step"
    engine = run(transfer)
    assert engine.num_external == {"a": 16}
    assert engine.held() == {}
    engine.core.shutdown()


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    run(settle(DISK, "DiskConnector", shared_storage_path=str(tmp_path)))
    DiskConnector.may_load.clear()
    yield tmp_path
    DiskConnector.may_load.set()


@pytest.fixture
def saved_by_two(tmp_path: Path) -> Path:
    DiskConnector.may_load.set()
    run(settle(DISK, "DiskConnector", shared_storage_path=str(tmp_path)), parallel="tensor_parallel_size")
    return tmp_path


def test_an_abort_while_a_load_is_under_way_leaks_nothing(saved: Path) -> None:
    engine = Engine(settle(DISK, "DiskConnector", shared_storage_path=str(saved), is_async=True))
    engine.add("a")
    engine.step(2)
    assert engine.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.held() == {"loading": 4}
    engine.core.abort_requests(["a"])
    assert engine.held() == {"zombie": 4}, "the connector may write them"
    engine.add("b", [9] * 20)
    engine.finish()
    assert engine.held() == {"zombie": 4}
    (load,) = engine.worker_half.futures.values()
    DiskConnector.may_load.set()
    load.result()
    engine.step(2)
    assert engine.held() == {}
    assert not engine.scheduler_half.futures
    engine.core.shutdown()


def test_while_a_load_is_under_way_steps_are_made(saved: Path) -> None:
    engine = Engine(settle(DISK, "DiskConnector", shared_storage_path=str(saved), is_async=True))
    alarms: list[float] = []
    engine.exchange.link.set_alarm = alarms.append
    engine.add("a")
    engine.step()
    assert alarms[-1] < 0.1, "the connector is asked what has ended"
    DiskConnector.may_load.set()
    engine.worker_half.futures["a"].result()
    engine.finish()
    engine.step()
    assert alarms[-1] == float("inf")


@pytest.mark.parametrize("is_async", [False, True])
def test_what_cannot_be_loaded_is_computed_or_fails(saved: Path, is_async: bool) -> None:
    DiskConnector.may_load.set()
    options = {"shared_storage_path": str(saved), "is_async": is_async}
    engine = Engine(settle(DISK, "DiskConnector", **options))
    engine.add("a")
    damaged = saved / engine.scheduler.requests["a"].block_hashes[2].hex() / "layer.safetensors"
    damaged.unlink()
    other = shutil.copytree(saved, saved.with_name(f"{saved.name}-damaged"))  # the first engine saves what it computes
    engine.finish()
    assert engine.num_external == {"a": 8}
    assert engine.reasons == {"a": FinishReason.LENGTH}
    options["shared_storage_path"] = str(other)
    failing = Engine(settle(DISK, "DiskConnector", policy="fail", **options))
    failing.add("a")
    failing.finish()
    assert failing.reasons == {"a": FinishReason.ERROR}
    assert failing.held() == {}


def test_blocks_stay_until_they_were_sent(tmp_path: Path) -> None:
    engine = run(settle(DISK, "DiskConnector", shared_storage_path=str(tmp_path), sends=True), num_blocks=10)
    assert engine.held() == {"pinned": 9}
    assert engine.transfer_params == {"a": {"num_blocks": 9}}
    engine.add("b", [9] * 30)
    engine.finish()  # waits for the blocks of the first
    assert engine.reasons["b"] is FinishReason.LENGTH
    engine.step(3)  # its id, what was sent, and the report of it
    assert engine.held() == {}
    assert not engine.exchange.connector.holds_blocks


def test_the_halves_shake_hands_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(DiskConnector, "get_handshake_metadata", lambda self: {"port": 1})
    monkeypatch.setattr(DiskConnector, "set_xfer_handshake_metadata", lambda self, metadata: taken.append(metadata))
    run(settle(DISK, "DiskConnector", shared_storage_path=str(tmp_path)))
    assert taken == [{0: {"port": 1}}]


def test_errors_of_a_connector_cost_the_load(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError

    for name in ("start_load_kv", "save_kv_layer", "get_finished", "update_connector_output", "request_finished"):
        with monkeypatch.context() as patch:
            patch.setattr(DiskConnector, name, fail)
            engine = run(settle(DISK, "DiskConnector", shared_storage_path=str(saved)))
        assert engine.num_external == {"a": 0 if name == "start_load_kv" else 16}
        assert engine.held() == {}


def test_an_error_at_the_end_names_the_connector(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = run(settle(DISK, "DiskConnector", shared_storage_path=str(saved)))
    monkeypatch.setattr(engine.worker_half, "shutdown", Mock(side_effect=OSError, __name__="shutdown"))
    engine.core.shutdown()
    assert "DiskConnector.shutdown failed" in caplog.text


def test_a_step_that_fails_ends_its_loads(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(settle(DISK, "DiskConnector", shared_storage_path=str(saved)))
    engine.exchange.clock = count(100.0, 0.05).__next__
    engine.exchange.link.wait = lambda seconds: None
    engine.add("a")

    def fail(self: Any) -> None:
        raise RuntimeError("the forward pass fails")

    with monkeypatch.context() as patch:
        patch.setattr(FakeExecutor, "_end_step", fail)
        with pytest.raises(RuntimeError):
            engine.step()
    engine.executor._unsampled = None
    engine.finish()
    engine.step(2)
    assert engine.held() == {}


LAYOUTS = pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])


@LAYOUTS
def test_the_recipe_runs_with_several_workers(memory_connector: types.ModuleType, parallel: str) -> None:
    """Workers in processes have a dict each; here each method gets its worker's."""
    transfer = settle("memory_connector", "MemoryConnector")
    stores: dict[int, dict[bytes, Any]] = {0: {}, 1: {}}

    engine = Engine(transfer, parallel=parallel)
    for half in engine.worker_halves:
        store = stores[half._vllm_config.parallel_config.rank]
        for name in ("start_load_kv", "save_kv_layer"):
            setattr(half, name, with_store(memory_connector, store, getattr(half, name)))
    engine.add("a")
    engine.finish()
    assert engine.num_external == {"a": 0}
    assert stores[0].keys() == stores[1].keys() == memory_connector.STORED
    assert engine.core.lifecycle.reset_prefix_cache()
    engine.add("b")
    engine.finish()
    assert engine.num_external["b"] == 28
    assert engine.held() == {}


def with_store(module: types.ModuleType, store: dict[bytes, Any], method: Any) -> Any:
    """Returns a method that is called with the dict of its worker."""

    def call(*args: Any, **kwargs: Any) -> Any:
        module.STORE = store  # type: ignore[attr-defined]
        return method(*args, **kwargs)

    return call


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@LAYOUTS
def test_several_workers_read_their_parts(tmp_path: Path, parallel: str, is_async: bool, is_late: bool) -> None:
    transfer = settle(DISK, "DiskConnector", shared_storage_path=str(tmp_path), is_async=is_async)
    DiskConnector.may_load.set()
    first = run(transfer, parallel=parallel)
    assert first.num_external == {"a": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    for damage in (False, True):
        engine = Engine(transfer, parallel=parallel)
        engine.executor.transfers.is_late = is_late  # type: ignore[union-attr]
        engine.add("a")
        if damage:  # of one worker's part
            digest = engine.scheduler.requests["a"].block_hashes[2].hex()
            (tmp_path / "1" / digest / "layer.safetensors").unlink()
        engine.finish()
        assert engine.num_external == {"a": 8 if damage else 16}
        engine.step(2)
        assert engine.held() == {}
        engine.core.shutdown()


@pytest.mark.parametrize("count_needed", [None, 1])
def test_a_load_ends_when_enough_workers_have_named_it(saved_by_two: Path, count_needed: int | None) -> None:
    """One of them never does: with a connector that says so the load ends, and without it waits."""
    transfer = settle(
        DISK, "DiskConnector", shared_storage_path=str(saved_by_two), is_async=True, count_needed=count_needed
    )
    engine = Engine(transfer, parallel="tensor_parallel_size")
    engine.worker_halves[1].get_finished = lambda finished: (None, None)
    engine.add("a")
    for _ in range(4):
        engine.await_loads()
        engine.step()
    assert (engine.held() == {"loading": 4}) == (count_needed is None)
    engine.worker_halves[1].get_finished = lambda finished: (None, {"a"} if count_needed is None else set())
    engine.step()
    engine.worker_halves[1].get_finished = lambda finished: (None, None)
    engine.finish()
    assert engine.num_external == {"a": 16}
    engine.core.shutdown()


def test_a_load_that_one_worker_calls_failed_is_computed(saved_by_two: Path) -> None:
    transfer = settle(DISK, "DiskConnector", shared_storage_path=str(saved_by_two), is_async=True)
    engine = Engine(transfer, parallel="tensor_parallel_size")
    half, outputs = engine.worker_halves[1], list[Any]()
    engine.scheduler_half.update_connector_output = outputs.append

    def fail(finished: set[str]) -> TransferResults:
        sent, received = half.get_finished(finished)
        return TransferResults(sent, received, set(received))

    half.get_transfer_results = fail
    engine.add("a")
    engine.finish()
    assert engine.num_external == {"a": 0}
    assert [output.failed_recving for output in outputs if output.finished_recving] == [{"a"}]
    engine.core.shutdown()


def test_blocks_of_several_workers_stay_until_all_have_sent_them(tmp_path: Path) -> None:
    transfer = settle(DISK, "DiskConnector", shared_storage_path=str(tmp_path), sends=True)
    engine = run(transfer, num_blocks=10, parallel="tensor_parallel_size")
    first, second = engine.worker_halves
    second.get_finished = lambda finished: (set(), set())
    engine.step(4)
    assert not first.to_send
    assert engine.held() == {"pinned": 9}
    second.get_finished = lambda finished: ({"a"}, set())
    engine.step(2)
    assert engine.held() == {}
    with pytest.raises(ConfigError, match="get_finished_count returns 3, and there are 2 workers"):
        Engine(settle(DISK, "DiskConnector", shared_storage_path="", count_needed=3), parallel="tensor_parallel_size")


@LAYOUTS
def test_what_workers_say_is_joined(tmp_path: Path, parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handshakes, outputs = list[Any](), list[Any]()
    rank = "_vllm_config.parallel_config.rank"
    monkeypatch.setattr(DiskConnector, "get_handshake_metadata", lambda self: attrgetter(rank)(self) + 100)
    name = "set_xfer_handshake_metadata_pp_aware"
    monkeypatch.setattr(DiskConnector, name, lambda self, found: handshakes.append(found))
    monkeypatch.setattr(DiskConnector, "get_kv_connector_stats", lambda self: Counter(steps=1))
    monkeypatch.setattr(DiskConnector, "build_connector_worker_meta", lambda self: Named({attrgetter(rank)(self)}))
    monkeypatch.setattr(DiskConnector, "update_connector_output", lambda self, output: outputs.append(output))
    run(settle(DISK, "DiskConnector", shared_storage_path=str(tmp_path)), parallel=parallel)
    assert handshakes == [{(0, 0): 100, (0, 1) if parallel.startswith("tensor") else (1, 0): 101}]
    metas = [output.kv_connector_worker_meta for output in outputs]
    assert metas == [Named({0, 1}), None] * (len(outputs) // 2), "joined"
    assert [output.kv_connector_stats for output in outputs] == [{"steps": 1}] * len(outputs), "one call for each"


@pytest.mark.parametrize("parallel", ["", "pipeline_parallel_size"])
def test_each_of_several_connectors_hears_of_its_own_workers_halves(
    tmp_path: Path, parallel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: dict[str, list[Any]] = {name: [] for name in ("handshakes", "stats", "events", "metas")}
    place = "_kv_transfer_config.kv_connector_extra_config"
    rank = "_vllm_config.parallel_config.rank"

    def name_of(half: Any) -> Any:
        return attrgetter(place)(half)["own"]

    def hear(half: Any, output: Any) -> None:
        if output.kv_connector_stats is not None:
            heard["stats"].append((name_of(half), output.kv_connector_stats))
        if output.kv_cache_events is not None:
            heard["events"].append((name_of(half), output.kv_cache_events))
        if output.kv_connector_worker_meta is not None:
            heard["metas"].append((name_of(half), output.kv_connector_worker_meta))

    def shake(half: Any, found: Any) -> None:
        heard["handshakes"].append((name_of(half), found))
        if name_of(half) == "a":
            raise OSError("it takes none")

    def only(name: str, make: Any) -> Any:
        return lambda half: make(half) if name in name_of(half) else None

    for method, answer in {
        "get_handshake_metadata": only("", lambda half: name_of(half) + str(attrgetter(rank)(half))),
        "set_xfer_handshake_metadata_pp_aware": shake,
        "get_kv_connector_stats": only("b", lambda half: Counter(steps=1)),
        "get_kv_connector_kv_cache_events": only("a", lambda half: Named({attrgetter(rank)(half)})),
        "build_connector_worker_meta": only("b", lambda half: Named({attrgetter(rank)(half)})),
        "update_connector_output": hear,
    }.items():
        monkeypatch.setattr(DiskConnector, method, answer)
    parts = [part(DISK, "DiskConnector", shared_storage_path=str(tmp_path / one), own=one) for one in "ab"]
    run(of_several(*parts), parallel=parallel)
    ranks = {0, 1} if parallel else {0}
    assert heard["handshakes"] == [(one, {(rank, 0): f"{one}{rank}" for rank in ranks}) for one in "ab"]
    assert "it takes none" in caplog.text
    num_steps = len(heard["metas"])
    assert num_steps > 2
    assert heard["metas"] == [("b", Named(ranks))] * num_steps
    assert heard["events"] == [("a", Named(ranks))] * num_steps
    assert heard["stats"] == [("b", {"steps": 1})] * (num_steps * len(ranks)), "one call for each: they are not joined"


@dataclass
class Named:
    """A message that knows how it is joined."""

    ranks: set[int]

    def aggregate(self, other: Named) -> Named:
        return Named(self.ranks | other.ranks)


def test_what_cannot_go_to_other_processes_costs_the_load(
    saved_by_two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = settle(DISK, "DiskConnector", shared_storage_path=str(saved_by_two))
    build = DiskConnector.build_connector_meta

    def with_lock(self: Any, output: Any) -> Any:
        meta: Any = build(self, output)
        meta.lock = threading.Lock()
        return meta

    monkeypatch.setattr(DiskConnector, "get_kv_connector_stats", lambda self: bytes(1 << 16))
    monkeypatch.setattr(DiskConnector, "build_connector_meta", with_lock)
    assert run(transfer, parallel="tensor_parallel_size").num_external == {"a": 0}
    assert "a _thread.lock cannot go to another process; use plain values" in caplog.text
    assert "kv_connector_stats of worker 1 are dropped: 65" in caplog.text


def test_reports_are_bounded(saved_by_two: Path) -> None:
    """Later steps bring what does not fit; what is wrong with a load comes no later than its end."""
    transfer = settle(DISK, "DiskConnector", shared_storage_path=str(saved_by_two))
    engine = Engine(transfer, parallel="tensor_parallel_size")
    outputs: list[Any] = []
    engine.scheduler_half.update_connector_output = outputs.append
    many = {f"{i:0100}" for i in range(500)}
    for half in engine.worker_halves:
        half.get_transfer_results = lambda finished: TransferResults(many, many, many)
        half.get_block_ids_with_load_errors = lambda: set(range(5000, 10000))
    engine.add("a", [9] * 9, max_tokens=1)
    engine.step()
    for half in engine.worker_halves:
        half.get_transfer_results = lambda finished: TransferResults()
        half.get_block_ids_with_load_errors = lambda: set()
    for index in range(20):
        engine.add(str(index), [index] * 9, max_tokens=1)
        engine.step()
    engine.finish()
    for name in ("finished_sending", "finished_recving", "failed_recving"):
        assert sorted(one for output in outputs for one in getattr(output, name) or ()) == sorted(many)
    assert set().union(*(output.invalid_block_ids for output in outputs)) == set(range(5000, 10000))
    first = next(index for index, output in enumerate(outputs) if output.finished_recving)
    assert not any(output.invalid_block_ids for output in outputs[first + 1 :])


def test_recordings_replay_without_the_connector(tmp_path: Path) -> None:
    """Blocks that are held until they were sent, loads that wait, and one whose failure ends its request."""
    DiskConnector.may_load.set()
    options = {"shared_storage_path": str(tmp_path / "store"), "is_async": True, "sends": True}
    run(settle(DISK, "DiskConnector", **options)).core.shutdown()
    for policy in ("recompute", "fail"):
        path = tmp_path / policy
        engine = Engine(settle(DISK, "DiskConnector", policy=policy, **options), num_blocks=20, record=path)
        engine.add("a")
        engine.finish()
        engine.step(3)
        assert engine.held() == {}
        engine.worker_half._load = lambda blocks, half=engine.worker_half: half.invalid.update(i for _, i in blocks)
        assert engine.core.lifecycle.reset_prefix_cache()
        engine.add("b", max_tokens=2)
        engine.finish()
        assert engine.reasons["b"] is (FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH)
        engine.core.shutdown()
        found, _ = read_recording(str(path))
        assert found.difference is None
        assert found.loads == {"ok": 1, "failed": 1}


def test_several_stages_need_a_connector_that_knows_them() -> None:
    half: Any = make_half(DISK, "DiskConnector", shared_storage_path="").foreign
    taken = list[Any]()
    half.set_xfer_handshake_metadata = taken.append
    half.set_xfer_handshake_metadata_pp_aware({(0, 0): "a", (0, 1): "b"})
    assert taken == [{0: "a", 1: "b"}]
    with pytest.raises(ValueError, match="several stages"):
        half.set_xfer_handshake_metadata_pp_aware({(0, 0): "a", (1, 0): "b"})


def test_connectors_of_several_agree_on_how_many_workers_name_a_request(tmp_path: Path) -> None:
    parts = [part(DISK, "DiskConnector", shared_storage_path=str(tmp_path), count_needed=n) for n in (1, None)]
    with pytest.raises(ConfigError, match="is not one number"):
        Engine(of_several(*parts))


def test_new_weights_drop_what_is_stored(memory_connector: types.ModuleType) -> None:
    engine = run(settle("memory_connector", "MemoryConnector"))
    calls: list[str] = []
    engine.scheduler_half.reset_cache = lambda: calls.append("reset")
    engine.core.lifecycle.update_weights("/other")
    assert calls == ["reset"]


def of_several(*parts: dict[str, Any]) -> KVTransferConfig:
    values = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return KVTransferConfig(transfer={**values, "kv_connector_extra_config": {"connectors": list(parts)}}).settle()


def part(module: str, name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": extra}


def test_several_connectors_load_from_the_first_and_save_to_all(
    memory_connector: types.ModuleType, tmp_path: Path
) -> None:
    disk = part(DISK, "DiskConnector", shared_storage_path=str(tmp_path), is_async=True, sends=True)
    transfer = of_several(part("memory_connector", "MemoryConnector"), disk)
    DiskConnector.may_load.set()
    engine = run(transfer)
    assert (len(memory_connector.STORE), len(list(tmp_path.iterdir()))) == (8, 4)
    engine.step(3)
    assert engine.held() == {}, "the second has sent"
    for digest in list(memory_connector.STORE)[:3]:
        del memory_connector.STORE[digest]
        memory_connector.STORED.remove(digest)
    engine = run(transfer)
    assert engine.num_external == {"a": 16}, "from the second: the first has not the first block"
    engine = run(transfer)
    assert engine.num_external == {"a": 28}, "what it lacked was saved"
    engine.core.shutdown()


def test_blocks_go_when_all_connectors_have_sent_them(tmp_path: Path) -> None:
    parts = [part(DISK, "DiskConnector", shared_storage_path=str(tmp_path / i), sends=True) for i in "ab"]
    engine = run(of_several(*parts))
    assert engine.held() == {"pinned": 9}
    _, second = engine.worker_half.parts
    second.get_finished = lambda finished: (set(), set())
    engine.step(4)
    assert engine.held() == {"pinned": 9}
    second.get_finished = lambda finished: ({"a"}, set())
    engine.step()
    second.get_finished = lambda finished: (set(), set())
    engine.step()
    assert engine.held() == {}
    assert not engine.worker_half._unsent


def test_one_store_is_not_several_connectors() -> None:
    with pytest.raises(ConfigError, match="MultiConnector"):
        of_several({"kv_connector": "StoreConnector"})


@pytest.mark.parametrize("parts", [[], [3], [{"kv_connector": ["x"]}, {"kv_connector": {}}]])
def test_several_connectors_are_foreign_ones(parts: list[Any]) -> None:
    config = EngineConfig(model_config=ModelConfig(), kv_transfer_config=of_several(*parts))
    with pytest.raises(ConfigError, match="MultiConnector"):
        ForeignScheduler(config, KVCacheConfig(10, [], [KVCacheGroupSpec(["0"], FullAttentionSpec(SIZE, 1, 1))]))


def test_a_benchmark_of_decoding_computes_no_prompts() -> None:
    values = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": {"fill_mean": 7}}
    engine = Engine(KVTransferConfig(transfer=values | extra).settle())
    engine.add("a")
    engine.step(3)
    assert engine.executor.num_computed_tokens == 2 + 1
    assert engine.num_external == {"a": 28}
    slots = engine.worker_half._layers["layer"][0]
    (table,) = engine.scheduler.kv_cache_manager.get_tables("a")
    assert all(bool((slots[block.block_id] == 7).all()) for block in table[:7])


def make_half(module: str, name: str, num_groups: int = 1, **extra: Any) -> ForeignScheduler:
    transfer = settle(module, name, **extra)
    config = EngineConfig(model_config=ModelConfig(), kv_transfer_config=transfer)
    groups = [KVCacheGroupSpec([str(i)], FullAttentionSpec(SIZE, 1, 1)) for i in range(num_groups)]
    return ForeignScheduler(config, KVCacheConfig(10, [], groups))


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("no.such.module", "X", "there is no module 'no.such.module'"),
        (DISK, "X", "has no 'X'"),
        (DISK, "DiskConnector", "cannot be made: TypeError"),
        (DISK, "Transfers", "its constructor takes"),
    ],
)
def test_what_is_no_connector_is_refused(module: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_half(module, name)


def test_several_groups_need_a_connector_that_knows_them(memory_connector: types.ModuleType) -> None:
    with pytest.raises(ConfigError, match="2 groups of KV cache layers"):
        make_half("memory_connector", "MemoryConnector", num_groups=2)


@pytest.mark.parametrize(("layout", "backend"), [(None, "native"), ("NHD", "torch")])
def test_blocks_in_a_layout_that_there_is(layout: str | None, backend: str) -> None:
    check_layout(layout, backend)


@pytest.mark.parametrize(
    ("layout", "backend", "words"), [("NHD", "native", "QUIRE_CPU_KERNELS=torch"), ("HND", "torch", "NHD only")]
)
def test_other_layouts_are_refused(layout: str, backend: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_layout(layout, backend)


def check_layout(layout: str | None, backend: str) -> None:
    class Foreign:
        _vllm_config = None

        @classmethod
        def get_required_kvcache_layout(cls, config: Any) -> str | None:
            return layout

    half: Any = Foreign()
    memory = types.SimpleNamespace(backend=types.SimpleNamespace(name=backend))
    CompatWorker(EngineConfig(model_config=ModelConfig()))._check_layout(half, memory)


@pytest.mark.parametrize("is_latent", [False, True])
def test_a_layer_is_one_view_of_keys_and_values(is_latent: bool) -> None:
    storage = torch.arange(2 * 5 * 24, dtype=torch.float32)
    parts = storage.view(1 if is_latent else 2, 5, -1)[..., 4:12]  # one of several layers that share the storage
    layer = join_parts(KVCache(parts[0], parts[-1]))
    assert torch.equal(layer, parts)
    layer[:, 3] = -1
    assert (storage == -1).sum() == (8 if is_latent else 16)
