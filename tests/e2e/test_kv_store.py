"""The KV store and the real engine: what is read has the bits of what is computed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs, LoRARequest, SamplingParams
from quire.cli.replay_report import read_recording
from quire.engine.kv_cache.changes import Change
from quire.engine.kv_cache.loader import BlockLoader
from quire.engine.kv_cache.store_scheduler import StoreScheduler
from quire.engine.kv_events import KVEventPublisher
from quire.errors import ConfigError, ServerError
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import open_extent, read_header
from quire.kv_store.index import StoreIndex, StoreScanner
from quire.kv_store.peer.server import BlockServer, DirectorySource, Record
from quire.kv_store.record import CODEC_PLANES, CODEC_RAW
from quire.testing.metrics_audit import MetricsAudit
from quire.testing.tiny_models import make_tiny_checkpoint
from quire.wire.kv_events import AllBlocksCleared, BlockRemoved, decode_batch
from quire.wire.kv_peers import RecordName
from quire.worker.kv_transfer import tiers
from tests.adapters import tensors, write_adapter
from tests.unit.engine.kv_cache.disk_connector import DiskConnector

from .test_oracle import FEW_BLOCKS
from .test_sessions import DRAFTS, answers, make_engine

PROMPT = {"prompt_token_ids": [3 + i * i % 200 for i in range(200)]}
NUM_STORED = 200 // 16
RECIPE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "add_a_connector.md"
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=5, detokenize=False)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")


@contextmanager
def engine(model: Path, directory: Path | None, **flags: Any) -> Iterator[LLM]:
    store = {} if directory is None else {"kv_store": str(directory), "kv_store_size": 1 << 30}
    with LLM(
        str(model), kv_cache_memory_bytes=8 << 20, skip_tokenizer_init=True, disable_log_stats=False, **store, **flags
    ) as llm:
        yield llm


def audited(llm: LLM) -> MetricsSnapshot:
    """Returns the metrics, whose laws hold."""
    metrics = llm.llm_engine.pipeline.stats.metrics
    assert metrics is not None
    MetricsAudit(one_clock=False).check(metrics.snapshot())
    return metrics.snapshot()


def answer(llm: LLM, adapter: LoRARequest | None = None) -> tuple[list[list[tuple[int, float]]], int]:
    """Returns the log-probabilities of an answer, and how much of its prompt was cached."""
    (output,) = llm.generate([PROMPT], GREEDY, lora_request=adapter, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    rows = [[(token, value.logprob) for token, value in position.items()] for position in logprobs]
    return rows, output.num_cached_tokens or 0


@pytest.mark.parametrize(("kind", "is_compressed"), [("llama", False), ("gemma2", True)])
def test_an_engine_that_reads_has_the_bits_of_one_that_computes(kind: str, is_compressed: bool, tmp_path: Path) -> None:
    """gemma2 has two groups, of which one has a window. What is compressed is read by any engine."""
    model, directory = make_tiny_checkpoint(tmp_path / kind, kind), tmp_path / "store"
    with engine(model, None) as llm:
        expected, _ = answer(llm)
    with engine(model, directory, kv_store_compress=is_compressed) as llm:  # it has written what it has computed
        assert answer(llm) == (expected, 0)
    assert codecs_of(directory) == {CODEC_PLANES if is_compressed else CODEC_RAW}
    recording = tmp_path / "recording"
    with engine(model, directory, max_num_batched_tokens=64, max_num_seqs=8, record=str(recording)) as llm:
        assert answer(llm) == (expected, NUM_STORED * 16)
    replayed, _ = read_recording(str(recording))
    assert (replayed.difference, replayed.loads, replayed.num_loaded_tokens) == (None, {"ok": 1}, NUM_STORED * 16)
    with engine(make_tiny_checkpoint(tmp_path / "other", kind, seed=1), directory) as llm:
        found, num_cached = answer(llm)
        assert num_cached == 0, "other weights"
        assert found != expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("drafts", [None, DRAFTS, {"method": "draft_model", "num_speculative_tokens": 3}])
def test_sessions_with_drafts_read_what_was_computed(kind: str, drafts: dict[str, Any] | None, tmp_path: Path) -> None:
    """Sessions, chunks, preemptions and drafts: each answer is the one of an engine without a store."""
    model = str(make_tiny_checkpoint(tmp_path / kind, kind))
    if drafts is not None and drafts["method"] == "draft_model":
        drafts = drafts | {"model": str(make_tiny_checkpoint(tmp_path / "draft", kind, seed=1))}
    flags = {"dtype": "bfloat16", "max_num_batched_tokens": 64, "max_num_seqs": 16, "speculative_config": drafts}
    flags |= {**FEW_BLOCKS, "num_gpu_blocks_override": 42 if kind == "llama" else 60}  # gemma2 has two groups
    expected, num_preemptions = answers(make_engine(model, **flags))
    assert num_preemptions
    for is_first in (True, False):
        llm = make_engine(model, **flags, kv_store=str(tmp_path / "store"), kv_store_size=1 << 30)
        assert answers(llm)[0] == expected
        metrics = llm.pipeline.stats.metrics
        assert metrics is not None
        assert is_first or metrics.snapshot().value("vllm:prompt_tokens_cached_by_source", "disk") > 0
        llm.shutdown()


LAYOUTS: dict[str, dict[str, Any]] = {
    "shared layers": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
SEVERAL = [
    *[(kind, layout) for kind in ("llama", "gemma2", "deepseek_v2") for layout in ("shared layers", "stages")],
    ("qwen3", "both"),
    ("gemma3_text", "both"),
    ("qwen3_moe", "experts"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), SEVERAL)
def test_several_workers_read_what_they_wrote(kind: str, layout: str, tmp_path: Path) -> None:
    """Several workers compute what one computes, have it in their cache, and read it, in the next engine too."""
    model, directory = make_tiny_checkpoint(tmp_path / kind, kind), tmp_path / "store"
    with engine(model, None) as llm:
        expected, _ = answer(llm)
    with engine(model, directory, **LAYOUTS[layout]) as llm:
        assert answer(llm) == (expected, 0)
        assert answer(llm) == (expected, NUM_STORED * 16)  # from the cache
        llm.reset_prefix_cache()  # waits for the saves
        client: Any = llm.llm_engine.engine_core
        connector = client.engine_core.scheduler.exchange.connector
        connector._index.scan()
        assert connector.count_stored()[0] >= NUM_STORED
        assert answer(llm) == (expected, NUM_STORED * 16)  # from the directory
    with engine(model, directory, **LAYOUTS[layout]) as llm:
        assert answer(llm) == (expected, NUM_STORED * 16)
    with engine(model, directory) as llm:
        assert answer(llm) == (expected, 0), "one worker has blocks of another form"
    (damaged, *_) = sorted(directory.glob("*.kvx"))  # the part of one worker
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(os.urandom(32))
    with engine(model, directory, **LAYOUTS[layout]) as llm:
        assert answer(llm)[0] == expected


def test_an_adapter_counts_by_its_content(tmp_path: Path) -> None:
    """Under another name and place its blocks are found; other files of the same name and place have none."""
    model, directory = make_tiny_checkpoint(tmp_path / "llama", "llama"), tmp_path / "store"
    path = write_adapter(tmp_path / "adapter", tensors(seed=1))
    with engine(model, None, enable_lora=True) as llm:
        base = answer(llm)[0]
        expected = answer(llm, LoRARequest("one", 1, str(path)))[0]
        assert expected != base
    with engine(model, directory, enable_lora=True) as llm:
        assert answer(llm, LoRARequest("one", 1, str(path))) == (expected, 0)
    copy = shutil.copytree(path, tmp_path / "copy")
    with engine(model, directory, enable_lora=True) as llm:
        assert answer(llm, LoRARequest("another name", 7, str(copy))) == (expected, NUM_STORED * 16)
        assert answer(llm) == (base, 0)
    write_adapter(path, tensors(seed=2))
    with engine(model, directory, enable_lora=True) as llm:
        found, num_cached = answer(llm, LoRARequest("one", 1, str(path)))
        assert num_cached == 0
        assert found not in (expected, base)
        assert answer(llm, LoRARequest("the first", 2, str(copy))) == (expected, NUM_STORED * 16)


@pytest.mark.slow
def test_an_adapter_counts_by_its_content_at_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are stored there by an engine without a directory, and found by another under another name."""
    monkeypatch.setattr(tiers, "ASK_S", 60.0)
    monkeypatch.setattr(BlockLoader, "check_deadlines", lambda self, now: [])
    model = make_tiny_checkpoint(tmp_path / "llama", "llama")
    path = write_adapter(tmp_path / "adapter", tensors(seed=1))
    store = StoreDirectory.open(tmp_path / "served", 1 << 30)
    server = BlockServer(DirectorySource(store, 1 << 30), store.key, "tcp://127.0.0.1:0")
    monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
    with engine(model, None, enable_lora=True, kv_store_remote=server.address) as llm:
        expected, _ = answer(llm, LoRARequest("one", 1, str(path)))
        while audited(llm).value("quire_kv_remote_saves", "stored") < NUM_STORED:
            make_step(llm)
    copy = shutil.copytree(path, tmp_path / "copy")
    with engine(model, None, enable_lora=True, kv_store_remote=server.address) as llm:
        num_cached = 0
        while not num_cached:  # the server finds them within a second
            assert llm.reset_prefix_cache()
            found, num_cached = answer(llm, LoRARequest("another name", 7, str(copy)))
            assert found == expected
        assert num_cached == NUM_STORED * 16
        assert answer(llm)[1] == 0
    server.close()
    store.close()


def test_torch_kernels_read_what_they_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    model, directory = make_tiny_checkpoint(tmp_path / "llama", "llama"), tmp_path / "store"
    with engine(model, directory) as llm:
        expected, _ = answer(llm)
    with engine(model, directory) as llm:
        found, num_cached = answer(llm)
    assert num_cached == NUM_STORED * 16
    assert [row[0][0] for row in found] == [row[0][0] for row in expected]


def test_damage_costs_computing_from_there_on(tmp_path: Path) -> None:
    model, directory = make_tiny_checkpoint(tmp_path / "llama", "llama"), tmp_path / "store"
    with engine(model, directory) as llm:
        expected, _ = answer(llm)
    (extent,) = directory.glob("*.kvx")
    with extent.open("r+b") as file:
        file.seek(extent.stat().st_size // 2)
        file.write(os.urandom(32))
    with engine(model, directory) as llm:
        found, num_cached = answer(llm)
        assert found == expected
        assert 0 < num_cached < NUM_STORED * 16
        metrics = audited(llm)
        assert metrics.value("quire_kv_records_accepted") >= num_cached // 16
        assert metrics.value("quire_kv_records_rejected", "mac") == 1
    with engine(model, directory) as llm:  # the damaged block was written again
        found, num_cached = answer(llm)
        assert (found, num_cached) == (expected, NUM_STORED * 16)


@pytest.mark.parametrize("layout", ["", pytest.param("both", marks=pytest.mark.slow)])
def test_new_weights_have_a_store_of_their_own(layout: str, tmp_path: Path) -> None:
    flags = LAYOUTS.get(layout, {})
    first, second = (make_tiny_checkpoint(tmp_path / str(seed), "llama", seed=seed) for seed in (0, 1))
    directory = tmp_path / "store"
    with engine(second, None) as llm:
        expected, _ = answer(llm)
    with engine(first, directory, **flags) as llm:
        answer(llm)
        llm.update_weights(second)
        assert answer(llm) == (expected, 0)
        llm.reset_prefix_cache()
        llm.update_weights(first)
    with engine(second, directory, **flags) as llm:
        assert answer(llm) == (expected, NUM_STORED * 16)


def fail_next_update(worker: Any) -> None:
    """Makes one of two workers fail to read the next weights. Runs in the workers."""
    weights = worker.loaded[0].weights
    load = weights._load

    def fail(source: Path) -> None:
        weights._load = load
        raise OSError("the disk is gone")

    if worker.rank == 1:
        weights._load = fail


@pytest.mark.slow
def test_an_update_that_fails_in_one_worker_leaves_all_as_they_were(tmp_path: Path) -> None:
    first, second = (make_tiny_checkpoint(tmp_path / str(seed), "llama", seed=seed) for seed in (0, 1))
    directory, flags = tmp_path / "store", LAYOUTS["shared layers"]
    with engine(first, directory, **flags) as llm:
        expected, _ = answer(llm)
        llm.collective_rpc(fail_next_update)
        with pytest.raises(ServerError, match="the disk is gone"):
            llm.update_weights(second)
        llm.reset_prefix_cache()
        assert answer(llm)[0] == expected
    with engine(second, directory, **flags) as llm:
        found, num_cached = answer(llm)
        assert (found != expected, num_cached) == (True, 0), "nothing is stored under the name of the new weights"
    with engine(first, directory, **flags) as llm:
        assert answer(llm) == (expected, NUM_STORED * 16)


def count_blocks(directory: Path) -> int:
    """Returns the number of records, of whatever namespace there is."""
    store = StoreDirectory.open(directory, 1 << 30)
    total = 0
    for extent in store.list_extents():
        table = store.load_table(extent)
        assert table is not None
        index = StoreIndex(store, table.fingerprint)
        index.scan()
        total += index.num_blocks
    store.close()
    return total


def codecs_of(directory: Path) -> set[int]:
    """Returns by which codecs records are stored."""
    store, codecs = StoreDirectory.open(directory, 1 << 30), set()
    for extent in store.list_extents():
        table = store.load_table(extent)
        assert table is not None
        descriptor = open_extent(store.descriptor, extent.name)
        codecs |= {read_header(descriptor, entry.offset).codec for entry in table.entries}
        os.close(descriptor)
    store.close()
    return codecs


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    model, directory = make_tiny_checkpoint(tmp_path / "llama", "llama"), tmp_path / "store"
    sizes = []
    for _ in range(2):
        with engine(model, directory) as llm:
            answer(llm)
        sizes.append(count_blocks(directory))
    assert sizes[0] >= NUM_STORED
    assert sizes[0] == sizes[1]


def ask(llm: LLM, params: dict[str, Any] | None, max_tokens: int = 8) -> tuple[list[int], Any, dict[str, float]]:
    """Returns the tokens, the kv_transfer_params, and how much of all prompts came from where. Checks the metrics."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params},
    )
    (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    found = audited(llm)
    family = found.find("vllm:prompt_tokens_cached_by_source")
    source = family.label_names.index("source")
    cached = {series.labels[source]: series.value for series in family.series if series.value}
    return list(output.outputs[0].token_ids), output.kv_transfer_params, cached


def make_step(llm: LLM) -> None:
    """Lets an engine take reports and send orders: one in this process does so only in steps."""
    llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)


def prefill(llm: LLM) -> Any:
    """Returns the kv_transfer_params of the prompt, whose lease has begun."""
    _, params, _ = ask(llm, {"do_remote_decode": True}, 1)
    make_step(llm)
    return params


def test_a_store_beside_peers_has_what_a_dead_peer_has_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags together are one engine that takes from peers, or from the store that they share."""
    monkeypatch.setattr(BlockLoader, "check_deadlines", lambda self, now: [])  # a slow machine takes blocks, too
    model = make_tiny_checkpoint(tmp_path / "llama", "llama")
    extra = {"kv_connector_extra_config": {"path": str(tmp_path / "key")}}
    peers = {"kv_connector": "NixlConnector", "kv_role": "kv_both", **extra}
    with (
        engine(model, tmp_path / "first", kv_transfer_config=peers) as p,
        engine(model, tmp_path / "second", kv_transfer_config=peers) as d,
    ):
        expected, *_ = ask(p, None)
        alive = prefill(p)
        make_step(d)
        assert ask(d, alive) == (expected, None, {"p2p": NUM_STORED * 16})
        dead = prefill(p)
    with engine(model, tmp_path / "first", kv_transfer_config=peers) as d:
        make_step(d)
        assert ask(d, dead) == (expected, None, {"disk": NUM_STORED * 16})


@pytest.mark.parametrize("is_beside_a_store", [False, True])
def test_a_remote_store_has_the_bits_of_what_is_computed(
    is_beside_a_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups, of which one has a window. Whatever the server sends afterwards, an answer has its bits."""
    monkeypatch.setattr(tiers, "ASK_S", 60.0)
    monkeypatch.setattr(BlockLoader, "check_deadlines", lambda self, now: [])  # a slow machine takes blocks, too
    model = make_tiny_checkpoint(tmp_path / "gemma2", "gemma2")
    with engine(model, tmp_path / "served", kv_store_compress=is_beside_a_store) as llm:
        expected, _ = answer(llm)
    monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
    store = StoreDirectory.open(tmp_path / "served", 0, is_made=False)
    source = DirectorySource(store)
    server = BlockServer(source, store.key, "tcp://127.0.0.1:0")
    own = tmp_path / "own" if is_beside_a_store else None
    with engine(model, own, kv_store_remote=server.address) as llm:
        make_step(llm)
        assert answer(llm) == (expected, NUM_STORED * 16)
        found = audited(llm)
        assert found.value("vllm:prompt_tokens_cached_by_source", "p2p") == NUM_STORED * 16
        assert found.value("quire_kv_tier_loads", "remote", "ok") == 1
        honest = source.read

        def lie(fingerprint: bytes, lease: str, key: RecordName) -> Record | None:
            record = honest(fingerprint, lease, key)
            assert record is not None
            return record[0], bytes(record[1][:-1]) + bytes([record[1][-1] ^ 1])

        monkeypatch.setattr(source, "read", lie)
        llm.reset_prefix_cache()
        assert answer(llm) == (expected, 0)
        assert audited(llm).value("quire_kv_records_rejected", "mac") == 1
        llm.reset_prefix_cache()
        assert answer(llm) == (expected, 0), "it rests"
        assert audited(llm).value("quire_kv_loads_begun") == 2
    server.close()
    store.close()


def test_an_audit_compares_what_was_computed_with_what_is_stored(tmp_path: Path) -> None:
    """Computes all blocks that could be read; they have the bits of the stored ones. One that has others is not read
    any more."""
    model, directory = make_tiny_checkpoint(tmp_path / "gemma2", "gemma2"), tmp_path / "store"
    with engine(model, directory) as llm:
        expected, _ = answer(llm)
    extra = {"path": str(directory), "max_bytes": 1 << 30, "audit_share": 1.0}
    auditing = {"kv_connector": "StoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def audit() -> dict[str, float]:
        with engine(model, None, kv_transfer_config=auditing) as llm:
            assert answer(llm) == (expected, 0)
            while not (found := audited(llm)).value("quire_kv_audited_blocks"):
                make_step(llm)
            return {o: found.value("quire_kv_audited_blocks", o) for o in ("same", "differs", "skipped")}

    all_same = audit()
    assert all_same["same"] >= NUM_STORED, "two groups, of which one may have dropped blocks"
    assert all_same["differs"] == all_same["skipped"] == 0
    store = StoreDirectory.open(directory, 1 << 30)
    (extent,) = store.list_extents()
    table = store.load_table(extent)
    assert table is not None
    entry, descriptor = table.entries[3], open_extent(store.descriptor, extent.name)
    header = read_header(descriptor, entry.offset)
    payload = bytearray(os.pread(descriptor, entry.stored_bytes, entry.offset + entry.head_bytes))
    os.close(descriptor)
    payload[7] ^= 1
    writer = store.create_extent(table.fingerprint)
    writer.append(header, [memoryview(payload)])
    writer.seal()
    assert audit() == {"same": all_same["same"] - 1, "differs": 1, "skipped": 0}
    assert [found.name for found in store.list_extents()] == [extent.name]
    store.close()
    with engine(model, directory) as llm:
        assert answer(llm) == (expected, NUM_STORED * 16)


class StoreEvents:
    """Follows by KV cache events which blocks a store holds."""

    def __init__(self, locality: str, patch: pytest.MonkeyPatch) -> None:
        self.locality = locality
        self.known: set[tuple[int, int]] = set()
        """Groups and hashes of its blocks."""
        self.num_cleared = 0
        patch.setattr(KVEventPublisher, "publish", lambda publisher, changes: self.take(publisher, changes))
        patch.setattr(StoreScanner.__init__, "__defaults__", (0.01,))

    def take(self, publisher: KVEventPublisher, changes: list[Change]) -> None:
        for event in decode_batch(publisher._encoder.encode(0.0, changes)).events:
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
                self.num_cleared += 1
            elif event.medium == "STORAGE":
                assert event.locality == self.locality
                names = {(event.group_idx or 0, int(each)) for each in event.block_hashes}
                self.known.difference_update(names) if isinstance(event, BlockRemoved) else self.known.update(names)

    def until(self, llm: LLM, is_true: Callable[[set[tuple[int, int]]], bool]) -> None:
        """Makes steps until it holds such blocks."""
        while not is_true(self.known):
            make_step(llm)


def test_events_tell_what_the_store_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies the events of an engine that finds a store, stores more, and loses all."""
    stored = StoreEvents("LOCAL", monkeypatch)
    model, directory = make_tiny_checkpoint(tmp_path / "gemma2", "gemma2"), tmp_path / "store"
    extra = {"path": str(directory), "max_bytes": 1 << 30, "publish_store": True}
    transfer = {"kv_connector": "StoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    flags = {"kv_transfer_config": transfer, "kv_events_config": events}

    with engine(model, None, **flags) as llm:
        answer(llm)
        stored.until(llm, lambda known: len(known) >= NUM_STORED)
    num_stored = count_blocks(directory)
    with engine(model, None, **flags) as llm:
        stored.until(llm, lambda known: len(known) == num_stored)
        assert llm.reset_prefix_cache()
        assert stored.num_cleared >= 3
        stored.until(llm, lambda known: len(known) == num_stored)
        for extent in directory.glob("*.kvx"):
            extent.unlink()
        stored.until(llm, lambda known: not known)
    with pytest.raises(ConfigError, match="enable them with --kv-events-config"):
        StoreScheduler.check_config(EngineArgs(str(model), kv_transfer_config=transfer).create_engine_config())


@pytest.mark.slow
def test_events_tell_what_a_server_holds_and_a_reset_drops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine stores its blocks there, another one finds them and drops them."""
    stored = StoreEvents("REMOTE", monkeypatch)
    monkeypatch.setattr(tiers, "WATCH_S", 0.01)
    model = make_tiny_checkpoint(tmp_path / "gemma2", "gemma2")
    store = StoreDirectory.open(tmp_path / "served", 1 << 30)
    server = BlockServer(DirectorySource(store, 1 << 30), store.key, "tcp://127.0.0.1:0")
    monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
    extra = {"path": str(tmp_path / "own"), "tiers": [server.address], "publish_store": True}
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    flags = {"kv_transfer_config": transfer, "kv_events_config": events}

    with engine(model, None, **flags) as llm:
        expected, _ = answer(llm)
        stored.until(llm, lambda known: len(known) >= NUM_STORED)
    with engine(model, None, **flags) as llm:
        stored.until(llm, lambda known: len(known) >= NUM_STORED)
        assert llm.reset_prefix_cache(reset_connector=True)
        stored.until(llm, lambda known: not known)
        assert answer(llm) == (expected, 0)
        stored.until(llm, lambda known: len(known) >= NUM_STORED)
    server.close()
    store.close()


def foreign(name: str, module: str, **extra: Any) -> dict[str, Any]:
    """The configuration of a connector that is written for vLLM's interface."""
    names = {"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both"}
    return {**names, "kv_connector_extra_config": extra}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("llama", "shared layers"), ("llama", "stages"), ("qwen3", "both")])
def test_a_connector_written_for_vllms_interface_has_several_workers(
    kind: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of the recipe keeps blocks in the workers; the one of files loads in threads, and the next engine finds
    what it has saved. What several workers load has the bits of what one computes."""
    (source,) = re.findall(r"```python\n(.*?)```", RECIPE.read_text(encoding="utf-8"), re.S)
    (tmp_path / "memory_connector.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *map(os.path.abspath, sys.path)]))
    model, directory = make_tiny_checkpoint(tmp_path / kind, kind), tmp_path / "store"
    with engine(model, None) as llm:
        expected, _ = answer(llm)
    memory = foreign("MemoryConnector", "memory_connector")
    with engine(model, None, kv_transfer_config=memory, **LAYOUTS[layout]) as llm:
        assert answer(llm) == (expected, 0)
        assert llm.reset_prefix_cache()
        assert answer(llm) == (expected, NUM_STORED * 16)
    files = foreign(
        "DiskConnector", DiskConnector.__module__, shared_storage_path=str(directory), is_async=True, waits=False
    )
    with engine(model, None, kv_transfer_config=files, **LAYOUTS[layout]) as llm:
        assert answer(llm) == (expected, 0)
    with engine(model, None, kv_transfer_config=files, **LAYOUTS[layout]) as llm:
        assert answer(llm) == (expected, NUM_STORED * 16)
    last = sorted(directory.iterdir())[-1]  # of the last worker
    for saved in last.glob("*/*"):
        saved.unlink()
    with engine(model, None, kv_transfer_config=files, **LAYOUTS[layout]) as llm:
        assert answer(llm) == (expected, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_connector_written_for_vllms_interface(is_async: bool, tmp_path: Path) -> None:
    """Bytes are opaque to this one, so native kernels do: an answer has the same bits. While its thread loads, the
    engine has nothing else to do, and asks it."""
    DiskConnector.may_load.set()
    directory = str(tmp_path / "store")
    transfer = foreign("DiskConnector", DiskConnector.__module__, shared_storage_path=directory, is_async=is_async)
    with engine(make_tiny_checkpoint(tmp_path / "llama", "llama"), None, kv_transfer_config=transfer) as llm:
        expected, num_cached = answer(llm)
        assert num_cached == 0
        assert llm.reset_prefix_cache()
        assert answer(llm) == (expected, NUM_STORED * 16)
