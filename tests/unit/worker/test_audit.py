"""Audits of the store: what is the same, what differs, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kv_store.access import RecordReader
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput, SaveResult, TransferAggregator
from quire.worker.kv_transfer.audit import Audit
from quire.worker.kv_transfer.transfers import NO_PLACE

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
