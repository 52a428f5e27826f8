"""The worker half of peers: blocks under a lease are served, and what is not the block that was asked for is not used.

Two workers in one process: P has the blocks, D takes them over a socket.
"""

from __future__ import annotations

import itertools
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine_args import EngineArgs
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.peer import client
from quire.kv_store.peer.server import BlockServer, DirectorySource
from quire.testing.failpoints import injected
from quire.wire.kv_peers import pack_bits
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
)
from quire.worker.kv_cache import KVCacheMemory
from quire.worker.kv_transfer import peer_worker, tiers
from quire.worker.kv_transfer.peer_worker import PeerWorker, address_of
from quire.worker.kv_transfer.transfers import Namespace

from .test_store_worker import FULL, WINDOW, make_keys, make_memory, replace_tokens


class Engine:
    """Stands for an engine: gives orders, and waits for reports."""

    def __init__(
        self, directory: Path, memory: KVCacheMemory, rank: int = 0, num_workers: int = 1, **extra: Any
    ) -> None:
        transfer = {
            "kv_connector": "PeerConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"path": str(directory), **extra},
        }
        args = EngineArgs("demo", kv_transfer_config=transfer, tensor_parallel_size=num_workers)
        self.worker = PeerWorker(args.create_engine_config(), rank)
        self.memory = memory
        self.reports: queue.Queue[KVConnectorOutput] = queue.Queue()
        self.worker.report = self.reports.put
        self.worker.register_kv_caches(memory)
        info = self.wait().info
        assert info is not None
        self.address, self.incarnation = info["listen"], info["incarnation"]
        self._next_id = 0

    def wait(self) -> KVConnectorOutput:
        return self.reports.get(timeout=120)

    def lease(self, keys: list[BlockKey], block_ids: list[list[int]], name: str = "lease") -> SaveOrder:
        self._next_id += 1
        blocks = [
            SavedBlock(group, block_id, key)
            for group, ids in enumerate(block_ids)
            for key, block_id in zip(keys, ids, strict=True)
            if block_id
        ]
        order = SaveOrder(self._next_id, SavedBlocks.of(blocks), name)
        self.worker.start(KVConnectorMetadata(saves=[order]))
        return order

    def ended_lease(self) -> SaveResult:
        (result,) = self.wait().saves
        return result

    def begin_load(self, engine: Engine, keys: list[BlockKey], block_ids: list[list[int]], **params: Any) -> int:
        self._next_id += 1
        site = params.get("peer", engine.address), params.get("incarnation", engine.incarnation)
        sites = [("tcp://127.0.0.1:1", "another worker's")] * self.worker.rank + [site]
        load = {"peers": sites, "lease": params.get("lease", "lease")}
        order = LoadOrder(self._next_id, "p2p", 0, keys, block_ids, load)
        self.worker.start(KVConnectorMetadata(loads=[order]))
        return self._next_id

    def load(self, engine: Engine, keys: list[BlockKey], block_ids: list[list[int]], **params: Any) -> LoadResult:
        self.begin_load(engine, keys, block_ids, **params)
        (result,) = self.wait().loads
        return result

    def content(self, block_id: int, group: int = 0) -> list[torch.Tensor]:
        caches = [self.memory.caches[name] for name, g in self.memory.layer_groups.items() if g == group]
        return [part[block_id].clone().view(torch.uint8) for cache in caches for part in cache]


MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on how quickly a peer answers."""
    monkeypatch.setattr(client, "SILENCE_S", 60.0)
    monkeypatch.setattr(client, "CONNECT_S", 60.0)
    monkeypatch.setattr(tiers, "ASK_S", 60.0)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(*specs: Any, **extra: Any) -> Engine:
        engines.append(Engine(tmp_path / "key", make_memory(list(specs or [FULL])), **extra))
        return engines[-1]

    yield make
    for engine in engines:
        engine.worker.close()


def are_equal(p: Engine, d: Engine, source: int, target: int, group: int = 0) -> bool:
    pairs = zip(p.content(source, group), d.content(target, group), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_leased_blocks_come_over_bit_by_bit(make_engine: MakeEngine) -> None:
    p, d = make_engine(FULL, WINDOW), make_engine(FULL, WINDOW)
    keys = make_keys(20, (("cache_salt", "secret"),))
    order = p.lease(keys, [list(range(1, 21)), [0] * 18 + [31, 32]])
    others = d.content(9)
    result = d.load(p, keys, [list(range(10, 30)), [0] * 18 + [38, 39]])
    assert (result.outcome, result.num_verified) == ("ok", 20)
    assert result.num_bytes > 22 * sum(part.numel() for part in p.content(1))
    assert all(are_equal(p, d, 1 + i, 10 + i) for i in range(20))
    assert are_equal(p, d, 31, 38, 1)
    assert are_equal(p, d, 32, 39, 1)
    assert all(torch.equal(a, b) for a, b in zip(others, d.content(9), strict=True))
    d.worker.start(
        KVConnectorMetadata(params={"keep": [("lease", [(p.address, p.incarnation)])], "release": ["lease"]})
    )
    assert p.ended_lease() == SaveResult(order.save_id, 0, "ok", reason="released")
    assert d.load(p, keys, [list(range(10, 30)), [0] * 20]).reason == "gone"


def test_only_the_block_that_was_asked_for_is_used(make_engine: MakeEngine) -> None:
    p, d = make_engine(), make_engine()
    keys = make_keys(6)
    p.lease([*keys[:3], replace_tokens(keys[3]), *keys[4:]], [[1, 2, 3, 4, 5, 6]])
    result = d.load(p, keys, [[10, 11, 12, 13, 14, 15]])
    assert (result.outcome, result.num_verified, result.reason) == ("partial", 3, "tokens")
    assert d.load(p, make_keys(2, first=50), [[10, 11]]).reason == "gone"  # blocks of another prompt


def test_damaged_bytes_are_not_used(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make_engine(), make_engine()
    keys, read = make_keys(3), p.worker._leases.read

    def damage(fingerprint: bytes, lease: str, key: tuple[int, bytes]) -> Any:
        record = read(fingerprint, lease, key)
        assert record is not None
        head, payload = bytes(record[0]), bytearray(record[1])
        payload[7] ^= key[1] == keys[1].digest
        return head, bytes(payload)

    monkeypatch.setattr(p.worker._leases, "read", damage)
    p.lease(keys, [[1, 2, 3]])
    result = d.load(p, keys, [[10, 11, 12]])
    assert (result.outcome, result.num_verified, result.reason) == ("partial", 1, "mac")


def test_the_ends_of_a_lease(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make_engine(kv_lease_duration=0.1), make_engine()
    keys = make_keys(2)
    order = p.lease(keys, [[1, 2]])
    assert p.ended_lease() == SaveResult(order.save_id, 0, "ok", reason="expired")
    p.worker._leases._duration_s = 60.0
    order = p.lease(keys, [[1, 2]], "needed")
    p.worker.start(KVConnectorMetadata(cancels=[order.save_id]))
    assert p.ended_lease() == SaveResult(order.save_id, 0, "cancelled", reason="broken")
    assert d.load(p, keys, [[10, 11]], lease="needed").reason == "gone"
    p.worker.start(KVConnectorMetadata(cancels=[99]))  # it was lost on its way
    assert p.ended_lease().outcome == "unknown"
    monkeypatch.setattr(peer_worker, "RENEW_S", 0.01)
    monkeypatch.setattr(peer_worker, "RENEWED_S", 1000.0)
    keeper = make_engine()
    before = time.monotonic()
    p.lease(keys, [[1, 2]], "kept")
    keeper.worker.start(KVConnectorMetadata(params={"keep": [("kept", [(p.address, p.incarnation)])]}))
    while p.worker._leases._leases["kept"].expires < before + 1000:
        time.sleep(0.001)


def test_a_worker_takes_its_part_from_the_one_of_its_rank(make_engine: MakeEngine) -> None:
    p, d = ([make_engine(rank=rank, num_workers=2) for rank in range(2)] for _ in range(2))
    keys = make_keys(2)
    for one in p:
        one.lease(keys, [[1, 2]])
    for theirs, ours in zip(p, d, strict=True):
        assert ours.load(theirs, keys, [[10, 11]]).num_verified == 2
        assert all(are_equal(theirs, ours, 1 + i, 10 + i) for i in range(2))
    assert d[1].load(p[0], keys, [[10, 11]]).reason == "refused", "it has the other part"
    assert d[1].load(p[1], keys, [[20, 21]]).num_verified == 2


def test_a_peer_that_does_not_fit(make_engine: MakeEngine) -> None:
    p, d = make_engine(), make_engine()
    keys = make_keys(2)
    p.lease(keys, [[1, 2]])
    assert d.load(p, keys, [[10, 11]], incarnation="before").reason == "stale"
    namespace = d.worker.namespace
    assert namespace is not None
    d.worker.namespace = Namespace(os.urandom(32), d.worker.directory.key, namespace.blocks)
    assert d.load(p, keys, [[10, 11]]).reason == "refused"
    p.worker.close()
    assert d.load(p, keys, [[10, 11]]).reason == "unreachable"


def test_a_session_that_ends_between_two_blocks_and_a_cancel(make_engine: MakeEngine) -> None:
    p, d = make_engine(), make_engine()
    keys, numbers = make_keys(4), itertools.count()
    p.lease(keys, [[1, 2, 3, 4]])

    def die(name: str, key: str) -> None:
        if next(numbers) == 2:
            raise OSError("dead")

    with injected("kv.peer.send", die):
        result = d.load(p, keys, [[10, 11, 12, 13]])
    assert (result.outcome, result.num_verified, result.reason) == ("partial", 2, "stale")
    waits = d.begin_load(p, keys, [[10, 11, 12, 13]], lease="to come")
    d.worker.start(KVConnectorMetadata(cancels=[waits]))
    (result,) = d.wait().loads
    assert (result.outcome, result.num_verified) == ("cancelled", 0)


def test_block_servers_are_asked_and_read(make_engine: MakeEngine, tmp_path: Path) -> None:
    p = make_engine()
    assert p.worker.namespace is not None
    store = StoreDirectory.open(tmp_path / "key", 1 << 30)
    writer = store.create_extent(p.worker.namespace.fingerprint)
    keys = make_keys(3)
    for key, block_id in zip(keys, (1, 2, 3), strict=True):
        header = p.worker.namespace.header_of(0, key)
        writer.append(header, [p.worker.namespace.blocks.copy_out(0, block_id)])
    server = BlockServer(DirectorySource(store), store.key, "tcp://127.0.0.1:0")
    dead = BlockServer(DirectorySource(store), store.key, "tcp://127.0.0.1:0")
    dead.close()
    d = make_engine(tiers=[dead.address, server.address])
    asked = [(0, key.digest) for key in [*keys, *make_keys(1, first=70)]]
    d.worker.start(KVConnectorMetadata(params={"ask": {"r": asked}}))
    infos = [d.wait().info or {}, d.wait().info or {}]  # the dead one is asked whether it takes blocks, too
    have = {"have": {"r": {server.address: pack_bits([True, True, True, False])}}}
    assert sorted(infos, key=str) == [have, {"store_state": "away"}]
    result = d.load(p, keys, [[10, 11, 12]], peer=server.address, lease="", incarnation="")
    assert (result.outcome, result.num_verified) == ("ok", 3)
    assert all(are_equal(p, d, 1 + i, 10 + i) for i in range(3))
    server.close()
    writer.abandon()
    store.close()


@pytest.mark.parametrize(
    ("listen", "index", "address"),
    [
        ("tcp://10.0.0.1:99", 0, "tcp://10.0.0.1:99"),
        ("tcp://10.0.0.1:99", 2, "tcp://10.0.0.1:101"),
        ("tcp://[::1]:0", 2, "tcp://[::1]:0"),
        ("ipc:///run/p", 1, "ipc:///run/p.1"),
    ],
)
def test_engines_of_one_server_listen_apart(listen: str, index: int, address: str) -> None:
    assert address_of(listen, index) == address
