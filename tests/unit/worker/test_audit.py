"""Audits of the store: what is the same, what differs, and what cannot be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kv_store.access import RecordReader
from quire.kv_store.peer import client
from quire.kv_store.peer.client import PeerError
from quire.kv_store.record import RecordMac
from quire.wire.kv_transfer import (
    KVConnectorMetadata,
    KVConnectorOutput,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
    TransferAggregator,
)
from quire.worker.kv_transfer.audit import Audit, RemoteAudit
from quire.worker.kv_transfer.peer_worker import PeerWorker
from quire.worker.kv_transfer.transfers import NO_PLACE

from ..kv_store.stores import header_of, payload_of
from .test_remote_saves import Engine as RemoteEngine
from .test_remote_saves import serving
from .test_store_worker import FULL, Engine, make_keys, make_memory


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "store", make_memory([FULL]))
    yield engine
    engine.worker.close()


def order_audit(engine: Engine, num: int = 3) -> Any:
    """Returns the audit of blocks 1, 2, …, of which each has a record, if it was saved."""
    keys = make_keys(num)
    order = engine.save_order(keys, [1 + i for i in range(num)])
    order.audit = engine.load_order(keys, [[1 + i for i in range(num)]]).params
    return order


def audit(engine: Engine, order: Any) -> SaveResult:
    engine.worker.start(KVConnectorMetadata(saves=[order]))
    (result,) = engine.wait().saves
    return result


def extents(engine: Engine) -> list[str]:
    return [extent.name for extent in engine.worker.directory.list_extents()]


def test_blocks_are_compared_bit_by_bit(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.save(make_keys(3), [1, 2, 3]).num_saved == 3
    order = order_audit(engine, 4)
    order.audit["parts"][0]["extents"].append("0000000000000000-1-1.kvx")
    order.audit["parts"][0]["places"][0][3] = 1 << 32
    result = audit(engine, order)
    assert (result.num_saved, result.differing, result.outcome) == (3, [], "ok"), "the fourth's extent is gone"
    assert len(extents(engine)) == 1
    cache = next(iter(engine.memory.caches.values()))
    cache.value[2].view(torch.uint8).reshape(-1)[5] ^= 1
    result = audit(engine, order_audit(engine))
    assert (result.num_saved, result.differing) == (2, [1])
    assert "1 of 512 differ" in caplog.text
    assert extents(engine) == [], "no engine is to read it"


def test_what_cannot_be_compared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_audit(engine)
    assert order.audit["parts"][0]["places"] == [[NO_PLACE] * 3], "nothing is stored"
    assert audit(engine, order).num_saved == 0
    order.audit = {}
    assert audit(engine, order).num_saved == 0
    engine.save(make_keys(3), [1, 2, 3])
    order = order_audit(engine)

    def fail(*args: Any) -> int:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(RecordReader, "read", fail)
        assert (audit(engine, order).num_saved, audit(engine, order).differing) == (0, [])
    assert audit(engine, order).num_saved == 3


def test_a_cancel_ends_an_audit_and_a_namespace_may_be_unknown(engine: Engine) -> None:
    engine.save(make_keys(3), [1, 2, 3])
    reports: list[KVConnectorOutput] = []
    for namespace, is_cancelled in ((engine.worker.namespace, True), (None, False)):
        reader = RecordReader(engine.worker.directory, engine.worker._mac)
        task = Audit(order_audit(engine), 0, namespace, reader, lambda name: None, reports.append)
        if is_cancelled:
            task.cancel()
        task.run()
    assert [(report.saves[0].outcome, report.saves[0].num_saved) for report in reports] == [("cancelled", 0), ("ok", 0)]


def test_a_block_differs_if_it_does_for_any_worker() -> None:
    aggregator = TransferAggregator(2)
    assert not aggregator.add(0, KVConnectorOutput(saves=[SaveResult(1, 2, differing=[0])])).saves
    (joined,) = aggregator.add(1, KVConnectorOutput(saves=[SaveResult(1, 1, differing=[0, 2])])).saves
    assert (joined.num_saved, joined.differing) == (1, [0, 2])


# -- blocks of a server --------------------------------------------------------------------------------------------


def test_blocks_of_a_server_are_compared_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "SILENCE_S", 60.0)
    monkeypatch.setattr(client, "CONNECT_S", 60.0)
    keys = make_keys(3)
    with serving(tmp_path / "served") as (_, server):
        monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "served" / "key"))
        engine = RemoteEngine(PeerWorker, kv_store_remote=server.address)
        engine.wait("store_state")
        assert engine.save(keys, [1, 2, 3]).num_saved == 3

        def compare(save_id: int, num: int = 3, namespace: Any = engine.worker.namespace) -> SaveResult:  # type: ignore[attr-defined]
            blocks = SavedBlocks.of(SavedBlock(0, 1 + i, key) for i, key in enumerate(make_keys(num)))
            order = SaveOrder(save_id, blocks, audit={"peers": [(server.address, "")]})
            monkeypatch.setattr(engine.worker, "namespace", namespace)
            engine.worker.start(KVConnectorMetadata(saves=[order]))
            result = engine.wait("save")
            assert isinstance(result, SaveResult)
            return result

        save_id = 2
        while compare(save_id).num_saved < 3:  # the server finds them within a second
            save_id += 1
        result = compare(save_id + 1, 4)
        assert (result.num_saved, result.differing) == (3, []), "it does not have the fourth"
        cache = next(iter(engine.memory.caches.values()))
        cache.value[2].view(torch.uint8).reshape(-1)[5] ^= 1
        result = compare(save_id + 2)
        assert (result.num_saved, result.differing, result.outcome) == (2, [1], "ok")
        assert f"1 of 512 differ): nothing is taken from {server.address} for a while" in caplog.text
        assert compare(save_id + 3, namespace=None).num_saved == 0
        other = engine.worker.namespace
        engine.worker.close()
    assert other is None


def test_a_server_that_lies_or_fails_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    header, mac, records = header_of(1), RecordMac(bytes(32)), list[Any]()
    head, payload = header.encode(), memoryview(b"".join(payload_of(1)))
    tagged, num_asked = head + mac.tag(head, [payload]), [0]

    class Peer:
        def have(self, keys: Any) -> list[bool]:
            num_asked[0] += 1
            return [True]

        def fetch(self, lease: str, keys: Any) -> Any:
            return iter([records[-1]]) if records else iter(self.fail, None)

        def fail(self) -> None:
            raise PeerError("silent", "it hangs")

    @contextlib.contextmanager
    def connect(address: str, fingerprint: bytes, **options: Any) -> Iterator[Peer]:
        assert not options["is_cancelled"]()
        yield Peer()

    peers: Any = type("Client", (), {"connect": staticmethod(connect)})
    blocks: Any = type("Blocks", (), {"copy_out": staticmethod(lambda group, block_id: payload)})
    namespace: Any = type("Namespace", (), {"header_of": staticmethod(lambda group, key: header), "blocks": blocks})
    blocks_saved = SavedBlocks.of(SavedBlock(0, i, key) for i, key in enumerate(make_keys(2)))
    order = SaveOrder(1, blocks_saved, audit={"peers": [("a", "")]})
    results: list[SaveResult] = []

    def compare() -> int:
        RemoteAudit(order, 0, namespace, peers, mac, lambda output: results.extend(output.saves)).run()
        assert not results[-1].differing
        return results[-1].num_saved

    damaged = bytes(payload[:-1]) + bytes([payload[-1] ^ 1])
    for record in ((tagged, payload[1:]), (tagged[1:], payload), (tagged, memoryview(damaged))):
        records.append(record)
        assert compare() == 0, "a record that would not be used is no difference"
    records.append((tagged, payload))
    assert compare() == 2
    records.clear()
    num_asked[0] = 0
    assert (compare(), num_asked[0]) == (0, 1), "it is not asked for the second"
