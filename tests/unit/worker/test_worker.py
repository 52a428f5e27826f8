"""The worker's start-up, sizing rules and steps, on a model of random weights."""

from __future__ import annotations

import gzip
import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError, ModelLoadError
from quire.sampling_params import SamplingParams
from quire.wire.execution import EMPTY_MODEL_RUNNER_OUTPUT, NewRequestData, SchedulerOutput
from quire.wire.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, SlidingWindowSpec
from quire.worker import host
from quire.worker.attention.torch_backend import TorchAttentionBackend
from quire.worker.kv_cache import allocate_kv_cache, make_null_config
from quire.worker.worker import Worker

MIB, GIB = 1 << 20, 1 << 30
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
PAGE_BYTES = 2 * 16 * 2 * 8 * 4
"""Keys and values of 16 tokens, 2 heads of 8 elements, float32."""


@pytest.fixture
def make_worker(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def make(**flags: Any) -> Worker:
        args = EngineArgs(str(tmp_path), load_format="dummy", device="cpu", **{"max_num_seqs": 4, **flags})
        worker = Worker(args.create_engine_config())
        worker.init_device()
        return worker

    return make


def cache_config(worker: Worker, num_blocks: int) -> KVCacheConfig:
    specs = worker.get_kv_cache_spec()
    tensors = [KVCacheTensor(num_blocks * spec.page_size_bytes, [name]) for name, spec in specs.items()]
    return KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(list(specs), next(iter(specs.values())))])


def test_from_start_to_shutdown(make_worker: Any) -> None:
    worker = make_worker()
    worker.load_model()
    model = worker.runner.model
    assert list(worker.get_kv_cache_spec().values()) == [FullAttentionSpec(16, 2, 8, "float32")] * 2
    assert worker.runner.model is model, "loaded once"
    worker.update_max_model_len(40)
    worker.initialize_from_config(cache_config(worker, 10))
    assert worker.runner.batch.token_ids.shape == (4, 40)
    worker.compile_or_warm_up_model()
    request = NewRequestData("a", [1, 2, 3], ([1],), 0, SamplingParams(temperature=0))
    assert (
        worker.execute_model(SchedulerOutput([request], num_scheduled_tokens={"a": 3}, total_num_scheduled_tokens=3))
        is None
    )
    output = worker.sample_tokens(None)
    assert output.req_ids == ["a"]
    assert 0 <= output.sampled_token_ids[0][0] < 64
    worker.execute_dummy_batch()
    assert worker.take_draft_token_ids() is None
    assert worker.get_supported_tasks() == ("generate",)
    worker.check_health()
    worker.shutdown()
    with pytest.raises(AssertionError, match="load_model comes first"):
        _ = worker.runner


def first_token(worker: Worker, request_id: str) -> int:
    request = NewRequestData(request_id, [1, 2, 3], ([1],), 0, SamplingParams(temperature=0))
    step = SchedulerOutput([request], num_scheduled_tokens={request_id: 3}, total_num_scheduled_tokens=3)
    assert worker.execute_model(step) is None
    return worker.sample_tokens(None).sampled_token_ids[0][0]


@pytest.mark.parametrize("level", [1, 2])
def test_a_worker_sleeps_and_wakes_up(make_worker: Any, level: int) -> None:
    worker = make_worker()
    worker.initialize_from_config(cache_config(worker, 10))
    token = first_token(worker, "a")
    worker.sleep(level)
    cache = next(iter(worker.runner.kv_cache.caches.values()))
    assert cache.key.shape[0] == 1, "the null block is left"
    assert all(parameter.is_meta for parameter in worker.get_model().parameters()) == (level == 2)
    forget = SchedulerOutput(finished_req_ids={"a"})
    assert worker.execute_model(forget) is EMPTY_MODEL_RUNNER_OUTPUT  # it receives the finished ids while it sleeps
    if level == 1:
        worker.execute_dummy_batch()  # and keeps in time with other ranks
    worker.wake_up(["weights"])
    assert next(iter(worker.runner.kv_cache.caches.values())).key.shape[0] == 1
    worker.wake_up(["kv_cache"])
    assert next(iter(worker.runner.kv_cache.caches.values())).key.shape[0] == 10
    assert first_token(worker, "a") == token


def test_a_step_that_was_broken_off_does_not_outlive_a_sleep(make_worker: Any) -> None:
    worker = make_worker()
    worker.initialize_from_config(cache_config(worker, 10))
    token = first_token(worker, "a")
    request = NewRequestData("b", [4], ([2],), 0, SamplingParams(temperature=0))
    worker.execute_model(SchedulerOutput([request], num_scheduled_tokens={"b": 1}, total_num_scheduled_tokens=1))
    worker.release_kv_cache_memory()
    worker.wake_up(["kv_cache"])
    assert worker.runner.batch.num_reqs == 0
    assert first_token(worker, "a") == token


def test_new_weights_for_a_worker(make_worker: Any, tiny_checkpoint: Any) -> None:
    worker = make_worker()
    worker.initialize_from_config(cache_config(worker, 10))
    hidden = torch.randn(5, MODEL["hidden_size"], generator=torch.Generator().manual_seed(0))
    before = worker.runner.model.compute_logits(hidden)
    with pytest.raises(ModelLoadError, match=r"config\.json has \w+ = .* the model that is loaded"):
        worker.check_weights(str(tiny_checkpoint("llama")))  # of another size
    worker.load_weights()
    worker.reload_weights()
    assert torch.equal(worker.runner.model.compute_logits(hidden), before)


def test_cache_dtype_follows_the_model_or_the_flag(make_worker: Any) -> None:
    assert {s.dtype for s in make_worker(dtype="bfloat16").get_kv_cache_spec().values()} == {"bfloat16"}
    assert {s.dtype for s in make_worker(kv_cache_dtype="bfloat16").get_kv_cache_spec().values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("flags", "environment", "free", "expected"),
    [
        ({"kv_cache_memory_bytes": 5 * MIB}, "2", GIB, 5 * MIB),  # the flag wins
        ({}, "2", GIB, 2 * GIB),  # then the environment, as it is
        ({}, "0.5", GIB, GIB // 2),
        ({"max_num_seqs": 4}, None, 100 * GIB, (4 * 16 + 1) * 2 * PAGE_BYTES),  # what 4 requests of 256 tokens fill
        ({"max_num_seqs": 4, "max_model_len": 100}, None, 100 * GIB, (4 * 7 + 1) * 2 * PAGE_BYTES),
        ({"max_num_seqs": 100_000, "max_num_batched_tokens": 100_000}, None, 100 * GIB, 4 * GIB),  # the default
        ({"max_num_seqs": 100_000, "max_num_batched_tokens": 100_000}, None, GIB, int(0.4 * GIB)),  # 40 % of the rest
    ],
)
def test_size_of_the_cache_on_cpu(
    make_worker: Any,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, int],
    environment: str | None,
    free: int,
    expected: int,
) -> None:
    monkeypatch.setattr(host, "available_cpu_memory", lambda: free)
    if environment is not None:
        monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", environment)
    worker = make_worker(**flags)
    worker.load_model()
    assert worker.determine_available_memory() == expected


def test_mapped_weights_are_not_free_memory(make_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts the pages of a mapped file among those it can take back; a model reads them in every step."""
    monkeypatch.setattr(host, "available_cpu_memory", lambda: GIB)
    worker = make_worker(max_num_seqs=100_000, max_num_batched_tokens=100_000)
    worker.load_model()
    worker.loaded[0].cache.mapped_bytes = GIB // 2
    assert worker.determine_available_memory() == int(0.4 * GIB / 2)


def test_engines_share_the_memory(make_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_cpu_memory", lambda: GIB)
    worker = make_worker(max_num_seqs=100_000, max_num_batched_tokens=100_000, data_parallel_size=4)
    worker.load_model()
    assert worker.determine_available_memory() == int(0.4 * (GIB // 4))


def test_a_cache_size_that_is_no_number(make_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "much")
    worker = make_worker()
    worker.load_model()
    with pytest.raises(ConfigError, match="QUIRE_CPU_KVCACHE_SPACE='much'"):
        worker.determine_available_memory()


def run_steps(worker: Worker, num_steps: int) -> None:
    for _ in range(num_steps):
        worker.execute_model(SchedulerOutput())


def trace_events(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


@pytest.fixture
def tracing_worker(make_worker: Any, tmp_path: Path) -> Any:
    def make(**profiler_config: Any) -> Worker:
        config = {"torch_profiler_dir": str(tmp_path / "new" / "traces"), "torch_profiler_with_stack": False}
        worker: Worker = make_worker(profiler_config=config | profiler_config)
        worker.initialize_from_config(cache_config(worker, 4))
        return worker

    return make


@pytest.mark.parametrize("gzipped", [True, False])
def test_a_trace_is_written(tracing_worker: Any, tmp_path: Path, gzipped: bool) -> None:
    worker = tracing_worker(torch_profiler_use_gzip=gzipped)
    worker.profile(False)  # never started: nothing to stop
    worker.profile(True, "run")
    worker.profile(True, "again")  # it records already
    torch.ones(2).sum()
    worker.profile(False)
    name = "run-rank0.trace.json" + (".gz" if gzipped else "")
    assert [path.name for path in (tmp_path / "new" / "traces").iterdir()] == [name]
    assert any(event["name"] == "aten::sum" for event in trace_events(tmp_path / "new" / "traces" / name))


def test_a_trace_of_some_steps(tracing_worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are told apart by what they compute: in step n, the sines of n elements."""
    worker = tracing_worker(delay_iterations=1, torch_profiler_record_shapes=True)
    number = iter(range(1, 100))
    monkeypatch.setattr(worker.runner, "execute_model", lambda output: torch.ones(next(number)).sin())
    worker.profile(True, "a", None, 2)
    run_steps(worker, 4)
    (path,) = (tmp_path / "new" / "traces").iterdir()
    sines = [e["args"]["Input Dims"] for e in trace_events(path) if e["name"] == "aten::sin"]
    assert [dims[0] for dims in sines] == [[2], [3]]
    worker.profile(False)
    worker.profile(True, "b", 0, 0)  # all, from the first
    run_steps(worker, 2)
    worker.profile(False)
    events = trace_events(tmp_path / "new" / "traces" / "b-rank0.trace.json.gz")
    assert len([e for e in events if e["name"] == "aten::sin"]) == 2


def test_a_trace_that_cannot_be_written_fails_no_step(
    tracing_worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "new").write_text("a file where a directory should be")
    worker = tracing_worker()
    worker.profile(True, "a", 0, 1)
    run_steps(worker, 3)
    assert "the profile is lost" in caplog.text
    worker.profile(True, "a")
    with pytest.raises(OSError, match="Not a directory"):
        worker.profile(False)


def test_tensors_are_shared_by_a_layer_of_each_group() -> None:
    full, sliding = FullAttentionSpec(16, 2, 8, "float32"), SlidingWindowSpec(16, 2, 8, "float32", 4)
    config = KVCacheConfig(
        6,
        [KVCacheTensor(6 * full.page_size_bytes, ["f0", "s0"]), KVCacheTensor(6 * full.page_size_bytes, ["f1"])],
        [KVCacheGroupSpec(["f0", "f1"], full), KVCacheGroupSpec(["s0"], sliding)],
    )
    memory = allocate_kv_cache(config, TorchAttentionBackend(), torch.device("cpu"))
    assert memory.layer_groups == {"f0": 0, "f1": 0, "s0": 1}
    assert memory.block_sizes == [16, 16]
    assert {name: cache.key.data_ptr() for name, cache in memory.caches.items()}.keys() == {"f0", "f1", "s0"}
    assert memory.caches["f0"].key.data_ptr() == memory.caches["s0"].key.data_ptr()
    assert memory.caches["f0"].key.data_ptr() != memory.caches["f1"].key.data_ptr()
    assert memory.caches["f1"].value.shape == (6, 16, 2, 8)


def test_a_cache_that_no_memory_holds_is_refused_in_words() -> None:
    spec = FullAttentionSpec(16, 2, 8, "float32")
    num_bytes = 1 << 60
    config = KVCacheConfig(6, [KVCacheTensor(num_bytes, ["a"])], [KVCacheGroupSpec(["a"], spec)])
    with pytest.raises(ConfigError, match=r"1073741824.0 GiB cannot be reserved .*--kv-cache-memory-bytes"):
        allocate_kv_cache(config, TorchAttentionBackend(), torch.device("cpu"))


def test_null_config_has_a_group_per_kind() -> None:
    full, sliding = FullAttentionSpec(16, 2, 8), SlidingWindowSpec(16, 2, 8, sliding_window=4)
    config = make_null_config({"a": full, "b": sliding, "c": full})
    assert [g.layer_names for g in config.kv_cache_groups] == [["a", "c"], ["b"]]
    assert [t.size for t in config.kv_cache_tensors] == [full.page_size_bytes] * 3


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads resident memory from /proc")
def test_cache_memory_is_reserved_not_taken() -> None:
    """8 GiB take milliseconds and no memory until blocks are written."""
    spec = FullAttentionSpec(16, 8, 128, "bfloat16")
    num_blocks = 8 * GIB // spec.page_size_bytes
    config = KVCacheConfig(num_blocks, [KVCacheTensor(8 * GIB, ["a"])], [KVCacheGroupSpec(["a"], spec)])
    resident, start = _resident_bytes(), time.thread_time()
    memory = allocate_kv_cache(config, TorchAttentionBackend(), torch.device("cpu"))
    memory.caches["a"].key[5] = 1
    assert time.thread_time() - start < 1
    assert _resident_bytes() - resident < 64 * MIB


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")
def test_cache_memory_is_in_small_pages() -> None:
    """A huge one would be cleared in the step that first writes to it."""
    spec = FullAttentionSpec(16, 8, 128, "bfloat16")
    num_blocks = 64 * MIB // spec.page_size_bytes
    config = KVCacheConfig(num_blocks, [KVCacheTensor(64 * MIB, ["a"])], [KVCacheGroupSpec(["a"], spec)])
    memory = allocate_kv_cache(config, TorchAttentionBackend(), torch.device("cpu"))
    address, flags = memory.caches["a"].key.data_ptr(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
        elif first == "VmFlags:" and start <= address < end:
            flags = line
    assert " nh" in flags


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
