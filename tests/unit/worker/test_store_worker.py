"""The worker half of the store: blocks go to files and come back, and nothing else comes back."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import queue
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.kv_store.index import StoreIndex
from quire.testing.failpoints import injected
from quire.wire.block_hash import hash_block
from quire.wire.kv_cache import (
    AnyKVCacheSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LatentSpec,
    SlidingWindowSpec,
)
from quire.wire.kv_transfer import (
    BlockKey,
    KVConnectorMetadata,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
    TransferAggregator,
)
from quire.worker.attention.backend import AttentionBackend
from quire.worker.attention.native_backend import NativeAttentionBackend
from quire.worker.attention.torch_backend import TorchAttentionBackend
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.packs import commit_memory, take_memory
from quire.worker.kv_cache import KVCacheMemory, allocate_kv_cache
from quire.worker.kv_transfer import store_worker, transfers
from quire.worker.kv_transfer.record_worker import lower_priority
from quire.worker.kv_transfer.store_worker import StoreWorker
from quire.worker.kv_transfer.transfers import MIN_RUN, NO_PLACE, BlockBytes
from tests.checkpoints import MakeCheckpoint

BLOCK_SIZE, NUM_BLOCKS = 4, 40
CPU = torch.device("cpu")
FULL = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=2, head_size=8)
WINDOW = SlidingWindowSpec(BLOCK_SIZE, num_kv_heads=2, head_size=8, sliding_window=6)


def make_memory(specs: list[AnyKVCacheSpec], backend: AttentionBackend[Any] | None = None) -> KVCacheMemory:
    """Returns a cache of two layers for each spec, filled with noise."""
    groups = [KVCacheGroupSpec([f"{g}.0", f"{g}.1"], spec) for g, spec in enumerate(specs)]
    size = max(spec.page_size_bytes for spec in specs) * NUM_BLOCKS
    tensors = [KVCacheTensor(size, [f"{g}.{i}" for g in range(len(specs))]) for i in range(2)]
    memory = allocate_kv_cache(KVCacheConfig(NUM_BLOCKS, tensors, groups), backend or TorchAttentionBackend(), CPU)
    for cache in memory.caches.values():
        cache.key.copy_(torch.randn(cache.key.shape))
        cache.value.copy_(torch.randn(cache.value.shape))
    return memory


def make_config(directory: Path, **flags: Any) -> EngineConfig:
    return EngineArgs("demo", kv_store=str(directory), kv_store_size=1 << 30, **flags).create_engine_config()


def make_keys(num: int, extra_keys: tuple[tuple[Any, ...], ...] | None = None, first: int = 0) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for i in range(num):
        parent, tokens = keys[-1].digest if keys else None, tuple(range(first + i, first + i + BLOCK_SIZE))
        keys.append(BlockKey(hash_block(parent, tokens, extra_keys), parent, tokens, extra_keys))
    return keys


class Engine:
    """Stands for the engine: gives orders, waits for reports, and knows the directory."""

    def __init__(self, directory: Path, memory: KVCacheMemory, rank: int = 0, **flags: Any) -> None:
        self.worker = StoreWorker(make_config(directory, **flags), rank)
        self.memory = memory
        self.reports: queue.Queue[KVConnectorOutput] = queue.Queue()
        self.worker.report = self.reports.put
        self.worker.register_kv_caches(memory)
        info = self.wait().info
        assert info is not None
        self.fingerprint, self.payload_bytes = info["fingerprint"], info["payload_bytes"]
        self._next_id = 0

    def wait(self) -> KVConnectorOutput:
        return self.reports.get(timeout=120)

    def drop(self) -> str:
        """Orders a drop. Returns its outcome."""
        self.worker.start(KVConnectorMetadata(params={"drop": 1}))
        info = self.wait().info
        assert info is not None
        number, outcomes = info["dropped"]
        assert number == 1
        return str(outcomes[str(self.worker.directory.path)])

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def save_order(self, keys: list[BlockKey], block_ids: list[int], group: int = 0) -> SaveOrder:
        blocks = [SavedBlock(group, block_id, key) for key, block_id in zip(keys, block_ids, strict=True)]
        return SaveOrder(self.next_id(), SavedBlocks.of(blocks))

    def save(self, keys: list[BlockKey], block_ids: list[int], group: int = 0) -> SaveResult:
        self.worker.start(KVConnectorMetadata(saves=[self.save_order(keys, block_ids, group)]))
        (result,) = self.wait().saves
        return result

    def load_order(self, keys: list[BlockKey], block_ids: list[list[int]]) -> LoadOrder:
        index = StoreIndex(self.worker.directory, self.fingerprint)
        index.scan()
        extents: dict[str, int] = {}
        places = []
        for group in range(len(block_ids)):
            found = [index.find(key.digest, group) for key in keys]
            places.append(
                [
                    NO_PLACE if place is None else extents.setdefault(place.extent, len(extents)) << 32 | place.offset
                    for place in found
                ]
            )
        part = {"extents": list(extents), "places": places}
        parts: list[dict[str, Any]] = [{} for _ in range(self.worker.rank)]  # a worker reads its own
        return LoadOrder(self.next_id(), "disk", 0, keys, block_ids, {"parts": [*parts, part]})

    def load(self, keys: list[BlockKey], block_ids: list[list[int]]) -> LoadResult:
        self.worker.start(KVConnectorMetadata(loads=[self.load_order(keys, block_ids)]))
        (result,) = self.wait().loads
        return result

    def content(self, block_id: int, group: int = 0) -> list[torch.Tensor]:
        caches = [self.memory.caches[name] for name, g in self.memory.layer_groups.items() if g == group]
        return [part[block_id].clone() for cache in caches for part in cache]

    def is_equal(self, block_id: int, content: list[torch.Tensor], group: int = 0) -> bool:
        pairs = zip(self.content(block_id, group), content, strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(memory: KVCacheMemory | None = None, **flags: Any) -> Engine:
        engines.append(Engine(tmp_path / "store", memory or make_memory([FULL]), **flags))
        return engines[-1]

    yield make
    for engine in engines:
        engine.worker.close()


def native_backend() -> NativeAttentionBackend:
    library = native_library()
    if library is None:
        pytest.skip("no native kernels")
    return NativeAttentionBackend(NativeKernels(Context(library, 1, "portable")))


@pytest.mark.parametrize("spec", [FULL, WINDOW, LatentSpec(BLOCK_SIZE, num_kv_heads=1, head_size=24)])
@pytest.mark.parametrize("is_native", [False, True])
def test_a_block_comes_back_bit_by_bit(
    make_engine: Callable[..., Engine], spec: AnyKVCacheSpec, is_native: bool
) -> None:
    engine = make_engine(make_memory([spec], native_backend() if is_native else None))
    assert engine.payload_bytes == [2 * spec.page_size_bytes]
    keys, sources, targets = make_keys(3), [5, 6, 7], [20, 22, 21]
    before = [engine.content(block_id) for block_id in range(NUM_BLOCKS)]
    assert engine.save(keys, sources).num_saved == 3
    result = engine.load(keys, [targets])
    assert (result.outcome, result.num_verified) == ("ok", 3)
    assert result.num_bytes > 3 * engine.payload_bytes[0]
    for block_id in range(NUM_BLOCKS):
        expected = before[sources[targets.index(block_id)] if block_id in targets else block_id]
        assert engine.is_equal(block_id, expected), block_id


def test_each_of_several_workers_has_its_own_part_of_a_block(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    workers = [make_engine(rank=rank, tensor_parallel_size=2) for rank in range(2)]
    staged = [make_engine(rank=rank, pipeline_parallel_size=2) for rank in range(2)]
    fingerprints = {one.fingerprint for one in [*workers, *staged, make_engine()]}
    assert len(fingerprints) == 5, "none reads what another has written"
    keys, aggregator = make_keys(4), TransferAggregator(2)
    contents = [[one.content(block_id) for block_id in (1, 2, 3, 4)] for one in workers]
    for one in workers:
        assert one.save(keys, [1, 2, 3, 4]).num_saved == 4
    for one, content in zip(workers, contents, strict=True):
        assert one.load(keys, [[21, 22, 23, 24]]).num_verified == 4
        assert all(one.is_equal(21 + i, content[i]) for i in range(4))
    for extent in (tmp_path / "store").glob(f"{workers[1].fingerprint.hex()[:16]}*"):
        with extent.open("r+b") as file:
            file.seek(int(extent.stat().st_size * 2.5 / 4))  # in the payload of the third
            file.write(b"damage")
    joined = [
        aggregator.add(rank, KVConnectorOutput([one.load(keys, [[31, 32, 33, 34]])]))
        for rank, one in enumerate(workers)
    ]
    assert [report.loads for report in joined[:1]] == [[]]
    (result,) = joined[1].loads
    assert (result.num_verified, result.outcome, result.reason) == (2, "partial", "mac")


def test_a_stage_without_layers_of_a_group_has_empty_records(make_engine: Callable[..., Engine]) -> None:
    """They prove the tokens, and all stages count alike."""
    memory = make_memory([FULL, WINDOW])
    names = {name: group for name, group in memory.layer_groups.items() if group == 0}
    engine = make_engine(replace(memory, layer_groups=names), rank=1, pipeline_parallel_size=2)
    assert engine.payload_bytes == [2 * FULL.page_size_bytes, 0]
    keys = make_keys(2)
    for group in (0, 1):
        assert engine.save(keys, [1, 2], group).num_saved == 2
    assert engine.load(keys, [[21, 22], [0, 32]]).num_verified == 2
    liars = [keys[0], replace_tokens(keys[1])]
    assert engine.load(liars, [[21, 22], [0, 32]]).num_verified == 1


def test_an_update_that_is_taken_back_leaves_the_namespace(
    make_engine: Callable[..., Engine], tiny_checkpoint: MakeCheckpoint
) -> None:
    """After a failure in another worker nothing is stored under the name of the new weights."""
    engine = make_engine()
    engine.worker.set_weights(str(tiny_checkpoint("llama")))
    update = engine.wait().info
    engine.worker.undo_weights()
    again = engine.wait().info
    assert update is not None
    assert again is not None
    assert update["fingerprint"] != engine.fingerprint
    assert (update["generation"], again["generation"]) == (1, 0)
    assert again["fingerprint"] == engine.fingerprint
    keys = make_keys(2)
    engine.save(keys, [1, 2])
    assert engine.load(keys, [[21, 22]]).num_verified == 2


def test_groups_are_stored_apart_and_a_window_takes_what_it_reads(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(make_memory([FULL, WINDOW]))
    keys = make_keys(4)
    full, window = [engine.content(b, 0) for b in (1, 2, 3, 4)], [engine.content(b, 1) for b in (11, 12, 13, 14)]
    engine.save(keys, [1, 2, 3, 4], group=0)
    engine.save(keys, [11, 12, 13, 14], group=1)
    assert engine.load(keys, [[21, 22, 23, 24], [0, 0, 33, 34]]).num_verified == 4
    assert all(engine.is_equal(21 + i, full[i], 0) for i in range(4))
    assert all(engine.is_equal(31 + i, window[i], 1) for i in (2, 3))


def test_a_window_proves_blocks_that_it_does_not_load(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine(make_memory([WINDOW]))
    keys = make_keys(4)
    engine.save(keys, [1, 2, 3, 4])
    assert engine.load(keys, [[0, 0, 23, 24]]).num_verified == 4
    liars = [replace_tokens(keys[0]), *keys[1:]]  # the hash of other tokens
    result = engine.load(liars, [[0, 0, 23, 24]])
    assert (result.num_verified, result.outcome, result.reason) == (0, "failed", "tokens")


def replace_tokens(key: BlockKey) -> BlockKey:
    return BlockKey(key.digest, key.parent, tuple(token + 1 for token in key.token_ids), key.extra_keys)


def test_only_the_verified_beginning_counts(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    keys = make_keys(8)
    engine.save(keys, list(range(1, 9)))
    for change, reason in (
        (lambda key: replace_tokens(key), "tokens"),
        (lambda key: BlockKey(key.digest, bytes(32), key.token_ids), "key"),
        (lambda key: BlockKey(key.digest, key.parent, key.token_ids, (("lora", "a", "b"),)), "key"),
        (lambda key: BlockKey(bytes(32), key.parent, key.token_ids), "gone"),
    ):
        asked = [*keys[:5], change(keys[5]), *keys[6:]]
        result = engine.load(asked, [list(range(20, 28))])
        assert (result.num_verified, result.outcome, result.reason) == (5, "partial", reason)
    (extent,) = (tmp_path / "store").glob("*.kvx")
    with extent.open("r+b") as file:
        file.seek(int(extent.stat().st_size * 3.5 / 8))  # in the payload of the fourth
        file.write(b"damage")
    result = engine.load(keys, [list(range(20, 28))])
    assert (result.num_verified, result.outcome, result.reason) == (3, "partial", "mac")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (lambda path: path.unlink(), "gone"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "io"),
        (lambda path: (path.unlink(), path.mkdir()), "io"),
        (lambda path: os.truncate(path, 100), "truncated"),
    ],
)
def test_an_extent_that_is_not_what_it_was_is_a_miss(
    make_engine: Callable[..., Engine], tmp_path: Path, action: Callable[[Path], Any], reason: str
) -> None:
    engine = make_engine()
    keys = make_keys(3)
    engine.save(keys, [1, 2, 3])
    order = engine.load_order(keys, [[20, 21, 22]])
    (extent,) = (tmp_path / "store").glob("*.kvx")
    action(extent)
    engine.worker.start(KVConnectorMetadata(loads=[order]))
    (result,) = engine.wait().loads
    assert (result.num_verified, result.outcome, result.reason) == (0, "failed", reason)


def test_read_errors_are_misses(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    keys = make_keys(3)
    engine.save(keys, [1, 2, 3])

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "preadv", fail)
    assert engine.load(keys, [[20, 21, 22]]).reason == "io"
    monkeypatch.undo()
    assert engine.load(keys, [[20, 21, 22]]).num_verified == 3
    with injected("kv.read", fail):
        assert engine.load(keys, [[20, 21, 22]]).reason == "io"


@pytest.mark.parametrize("place", ["kv.write", "kv.seal", "kv.evict"])
def test_a_thread_outlives_any_error(make_engine: Callable[..., Engine], place: str) -> None:
    engine = make_engine()
    keys = make_keys(3)
    engine.save(keys[:1], [1])
    hits: list[str] = []

    def fail(name: str, key: str) -> None:
        hits.append(name)
        raise RuntimeError("injected")

    with injected(place, fail):
        if place == "kv.write":
            result = engine.save(keys[1:2], [2])
            assert (result.num_saved, result.outcome, result.reason) == (0, "failed", "error")
        else:  # a reset seals and deletes
            assert engine.drop() == ("dropped" if place == "kv.seal" else "an error of this engine")
    assert hits == [place]
    assert engine.save(keys, [1, 2, 3]).num_saved == 3
    assert engine.load(keys, [[20, 21, 22]]).num_verified == 3


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "full"), (errno.EIO, "error")])
def test_write_errors_make_the_writer_rest(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    engine = make_engine()
    keys = make_keys(3)

    def fail(*args: Any) -> int:
        raise OSError(code, "injected")

    monkeypatch.setattr("quire.kv_store.extent.write", fail)
    assert engine.save(keys[:1], [1]).reason == reason
    monkeypatch.undo()
    result = engine.save(keys, [1, 2, 3])
    assert (result.num_saved, result.outcome, result.reason) == (0, "failed", reason)


def test_a_late_save_gives_way_to_the_next_one(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    keys = make_keys(6)
    first, second = engine.save_order(keys[:3], [1, 2, 3]), engine.save_order(keys[3:], [4, 5, 6])
    begun, go_on = threading.Event(), threading.Event()

    def wait(name: str, key: str) -> None:
        begun.set()
        assert go_on.wait(120)

    monkeypatch.setattr(transfers, "LATE_S", 0.0)
    with injected("kv.write", wait):
        engine.worker.start(KVConnectorMetadata(saves=[first]))
        assert begun.wait(120)
        engine.worker.start(KVConnectorMetadata(saves=[second]))
        go_on.set()
        (result,) = engine.wait().saves
        assert (result.num_saved, result.outcome, result.reason) == (1, "partial", "rate")
        (result,) = engine.wait().saves
    assert (result.num_saved, result.outcome, result.reason) == (3, "ok", ""), "none waits behind it"


@pytest.mark.parametrize(("seconds", "num_patient"), [(1e9, 3), (0.0, 0)])
def test_an_old_save_is_left_to_a_thread_of_the_engines_priority(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, seconds: float, num_patient: int
) -> None:
    engine = make_engine()
    keys, threads = make_keys(3), list[str]()
    monkeypatch.setattr(transfers, "HURRY_S", seconds)
    with injected("kv.write", lambda name, key: threads.append(threading.current_thread().name)):
        assert engine.save(keys, [1, 2, 3]).num_saved == 3
    assert threads == num_patient * ["kv-store"] + (3 - num_patient) * ["kv-store-hurry"]
    assert engine.save(make_keys(1, first=50), [4]).num_saved == 1
    assert engine.load(keys, [[20, 21, 22]]).num_verified == 3
    assert engine.is_equal(20, engine.content(1))


def test_a_cancel_ends_a_load_between_records_and_is_answered_once(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    keys = make_keys(30)
    engine.save(keys, list(range(1, 31)))
    order = engine.load_order(keys, [list(range(1, 31))])
    begun, go_on = threading.Event(), threading.Event()

    def wait(name: str, key: str) -> None:
        begun.set()
        assert go_on.wait(120)

    with injected("kv.read", wait):
        engine.worker.start(KVConnectorMetadata(loads=[order]))
        assert begun.wait(120)
        engine.worker.start(KVConnectorMetadata(cancels=[order.load_id]))
        engine.worker.start(KVConnectorMetadata(cancels=[order.load_id]))
        assert engine.reports.empty(), "its blocks are still being written"
        go_on.set()
        (result,) = engine.wait().loads
    assert result.outcome == "cancelled"
    assert 1 <= result.num_verified <= 2  # one for each thread
    engine.worker.start(KVConnectorMetadata(cancels=[order.load_id]))
    assert engine.load(keys, [list(range(1, 31))]).num_verified == 30
    assert engine.reports.empty()


def test_a_cancelled_load_that_had_not_begun_ends_at_once(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    keys = make_keys(4)
    engine.save(keys, [1, 2, 3, 4])
    first, second = (engine.load_order(keys, [[20, 21, 22, 23]]) for _ in range(2))
    begun, go_on = threading.Event(), threading.Event()

    def wait(name: str, key: str) -> None:
        begun.set()
        assert go_on.wait(120)

    with injected("kv.read", wait):
        engine.worker.start(KVConnectorMetadata(loads=[first]))
        assert begun.wait(120)
        engine.worker.start(KVConnectorMetadata(loads=[second]))
        engine.worker.start(KVConnectorMetadata(cancels=[second.load_id]))
        (result,) = engine.wait().loads
        assert (result.load_id, result.outcome, result.num_verified) == (second.load_id, "cancelled", 0)
        go_on.set()
        assert engine.wait().loads[0].num_verified == 4


def test_a_cancel_of_what_never_came_is_answered(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.worker.start(KVConnectorMetadata(cancels=[99]))
    output = engine.wait()
    assert output.loads[0].outcome == "unknown"
    assert output.loads[0].load_id == 99


def test_another_worker_of_the_same_model_shares_and_of_other_weights_does_not(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    first, second = make_engine(), make_engine()
    assert first.fingerprint == second.fingerprint
    keys = make_keys(3)
    content = [first.content(b) for b in (1, 2, 3)]
    first.save(keys, [1, 2, 3])
    assert second.load(keys, [[20, 21, 22]]).num_verified == 3
    assert all(second.is_equal(20 + i, content[i]) for i in range(3))
    weights = tmp_path / "weights"
    weights.mkdir()
    for file in first.worker.config.model_config.model_dir.iterdir():
        (weights / file.name).write_bytes(file.read_bytes())
    second.worker.set_weights(str(weights))
    info = second.wait().info
    assert info is not None
    assert (info["fingerprint"], info["generation"]) == (first.fingerprint, 1), "the same bytes under another name"
    with (weights / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x5a")
    second.worker.set_weights(str(weights))
    info = second.wait().info
    assert info is not None
    assert info["fingerprint"] != first.fingerprint
    result = second.load(keys, [[20, 21, 22]])
    assert (result.num_verified, result.reason) == (0, "key")


def test_a_salt_separates(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    salted, other = make_keys(2, (("cache_salt", "a"),)), make_keys(2, (("cache_salt", "b"),))
    engine.save(salted, [1, 2])
    assert engine.load(salted, [[20, 21]]).num_verified == 2
    lying = [BlockKey(s.digest, s.parent, s.token_ids, o.extra_keys) for s, o in zip(salted, other, strict=True)]
    assert engine.load(lying, [[20, 21]]).reason == "key"


def test_a_worker_that_ends_has_written_what_was_ordered(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    keys = make_keys(20)
    engine.worker.start(KVConnectorMetadata(saves=[engine.save_order(keys, list(range(1, 21)))]))
    engine.worker.close()
    engine.worker.close()
    assert make_engine().load(keys, [list(range(1, 21))]).num_verified == 20


def test_a_reset_deletes_what_is_stored_of_this_model(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    keys = make_keys(3)
    engine.save(keys, [1, 2, 3])
    assert engine.drop() == "dropped"
    assert list((tmp_path / "store").glob("*.kvx")) == []


@pytest.mark.parametrize("hangs", [False, True])
def test_a_reset_says_that_the_disk_fails(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    engine, goes_on = make_engine(), threading.Event()
    engine.save(make_keys(1), [1])
    if hangs:
        monkeypatch.setattr(store_worker, "DROP_S", 0.01)

    def fail(name: str, key: str) -> None:
        if hangs:
            goes_on.wait(120)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with injected("kv.evict", fail):
        assert engine.drop() == ("not within 0 s" if hangs else "its disk fails: Read-only file system")
        goes_on.set()
        assert engine.save(make_keys(2), [1, 2]).num_saved == 2, "its thread goes on, and has reported once"


def test_a_reset_before_the_namespace_is_known_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    namespace, engine.worker.namespace = engine.worker.namespace, None
    assert engine.drop() == "the namespace is not known yet"
    engine.worker.namespace = namespace
    assert engine.save(make_keys(1), [1]).num_saved == 1, "its thread goes on"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_threads_of_low_priority_interrupt_no_other() -> None:
    found: list[tuple[int, int]] = []

    def run() -> None:
        lower_priority()
        thread = threading.get_native_id()
        found.append((os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(19, os.SCHED_BATCH)]


def test_released_memory_is_not_held(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    keys = make_keys(3)
    engine.save(keys, [1, 2, 3])
    engine.load(keys, [[20, 21, 22]])
    former = weakref.ref(engine.worker._blocks)
    engine.memory = make_memory([FULL])
    engine.worker.register_kv_caches(engine.memory)
    assert engine.load(keys, [[20, 21, 22]]).num_verified == 3
    engine.worker.close()  # waits for the threads, each of which may have been at its end only
    assert former() is None


def test_memory_of_other_types_is_another_namespace(make_engine: Callable[..., Engine]) -> None:
    wide = make_engine(make_memory([replace_dtype(FULL)]))
    assert wide.fingerprint != make_engine().fingerprint


def replace_dtype(spec: FullAttentionSpec) -> FullAttentionSpec:
    return FullAttentionSpec(spec.block_size, spec.num_kv_heads, spec.head_size, "float32")


def test_more_pieces_than_one_system_call_takes(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    specs = [FULL]
    groups = [KVCacheGroupSpec([str(i) for i in range(600)], FULL)]
    tensors = [KVCacheTensor(FULL.page_size_bytes * NUM_BLOCKS, [str(i)]) for i in range(600)]
    memory = allocate_kv_cache(KVCacheConfig(NUM_BLOCKS, tensors, groups), TorchAttentionBackend(), CPU)
    assert memory.specs == specs
    for i, cache in enumerate(memory.caches.values()):
        cache.key.fill_(i)
        cache.value.fill_(-i)
    engine = make_engine(memory)
    keys = make_keys(1)
    expected = engine.content(3)
    engine.save(keys, [3])
    for cache in memory.caches.values():
        cache.key[5] = cache.value[5] = 9
    assert engine.load(keys, [[5]]).num_verified == 1
    assert engine.is_equal(5, expected)


def test_the_namespace_is_reported_to_a_callback_that_comes_later(tmp_path: Path) -> None:
    worker = StoreWorker(replace(make_config(tmp_path / "store")))
    worker.register_kv_caches(make_memory([FULL]))
    if worker._hasher is not None:
        worker._hasher.join()
    reports: list[KVConnectorOutput] = []
    worker.report = reports.append
    assert [report.info is not None for report in reports] == [True]
    worker.close()


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
def test_the_pieces_of_a_block_are_its_rows_whatever_their_sizes(step: int) -> None:
    """`step` 2: the parts are not in one piece."""
    parts = [np.arange(step * size * 5, dtype=np.uint8).reshape(5, -1)[:, ::step] for size in (8, 8, 4, 8)]
    blocks = BlockBytes([parts, []])
    assert blocks.payload_bytes == [28, 0]
    for block_id in range(5):
        pieces = blocks.pieces(0, block_id)
        assert [piece.tobytes() for piece in pieces] == [part[block_id].tobytes() for part in parts]
    blocks.pieces(0, 3)[2][:] = b"here"
    assert parts[2][3].tobytes() == b"here"
    assert blocks.pieces(1, 3) == []


def test_memory_of_blocks_in_a_row_is_committed_and_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [np.arange(48 * size, dtype=np.uint8).reshape(48, size) for size in (16, 16, 8)]
    before = [part.copy() for part in parts]
    blocks, lengths = BlockBytes([parts]), list[int]()

    def commit(memory: memoryview) -> None:
        lengths.append(len(memory))
        commit_memory(memory)

    monkeypatch.setattr(transfers, "commit_memory", commit)
    rows = [0, 0, *range(4, 4 + MIN_RUN), *range(40, 30, -1), *range(21, 21 + MIN_RUN + 2)]
    blocks.commit(0, rows)
    assert lengths == [MIN_RUN * 16, MIN_RUN * 16, MIN_RUN * 8, *(each * (MIN_RUN + 2) for each in (16, 16, 8))]
    assert all(np.array_equal(*pair) for pair in zip(parts, before, strict=True))
    BlockBytes([[part[:, ::2] for part in parts]]).commit(0, rows)
    assert len(lengths) == 6, "nothing is done for memory that is not in one piece"
    commit_memory(memoryview(bytearray()))


def test_committed_memory_is_written_without_faults() -> None:
    if sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14):
        pytest.skip("the system cannot map pages at once")
    memory = take_memory(256 * mmap.PAGESIZE, huge_pages=False).numpy()
    commit_memory(memory.data[100:])
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[:: mmap.PAGESIZE] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults < 128, "256 pages were written"
