"""The worker half of a store and peers in one engine: each order goes to one of them, and ids are the engine's."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.wire.kv_transfer import (
    KVConnectorMetadata,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)
from quire.worker.kv_transfer.store_and_peers import StoreAndPeersWorker
from tests.checkpoints import MakeCheckpoint

from .test_store_worker import FULL, make_keys, make_memory

KEYS = make_keys(3)


class Engine:
    """Stands for the engine: gives orders, and waits for reports."""

    def __init__(self, directory: Path) -> None:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        transfer["kv_connector_extra_config"] = {"path": str(directory / "peers")}
        args = EngineArgs("demo", kv_store=str(directory / "store"), kv_store_size=1 << 30, kv_transfer_config=transfer)
        self.worker = StoreAndPeersWorker(args.create_engine_config())
        self.reports: queue.Queue[KVConnectorOutput] = queue.Queue()
        self.worker.report = self.reports.put
        self.worker.register_kv_caches(make_memory([FULL]))
        infos = [self.wait().info or {} for _ in range(2)]
        self.info = {info["part"]: info["info"] for info in infos}

    def wait(self) -> KVConnectorOutput:
        return self.reports.get(timeout=120)

    def order(self, **orders: Any) -> KVConnectorOutput:
        self.worker.start(KVConnectorMetadata(**orders))
        return self.wait()

    @staticmethod
    def blocks(first: int) -> SavedBlocks:
        return SavedBlocks.of(SavedBlock(0, first + i, key) for i, key in enumerate(KEYS))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.worker.close()


def test_each_part_gets_its_orders(engine: Engine) -> None:
    assert set(engine.info) == {"store", "peers"}
    (saved,) = engine.order(saves=[SaveOrder(3, engine.blocks(1))]).saves
    assert (saved.save_id, saved.num_saved, saved.outcome) == (3, 3, "ok")
    engine.worker.start(KVConnectorMetadata(saves=[SaveOrder(4, engine.blocks(1), "lease")]))
    peer = {"peers": [(engine.info["peers"]["listen"], "")], "lease": "lease", "part": "peers"}
    (load,) = engine.order(loads=[LoadOrder(7, "p2p", 0, KEYS, [[10, 11, 12]], peer)]).loads
    assert (load.load_id, load.num_verified, load.num_accepted) == (7, 3, 3)
    missing = {"parts": [{"extents": [], "places": [[-1, -1, -1]]}], "part": "store"}
    (load,) = engine.order(loads=[LoadOrder(8, "disk", 0, KEYS, [[13, 14, 15]], missing)]).loads
    assert (load.load_id, load.outcome, load.reason) == (8, "failed", "gone")
    (lease,) = engine.order(cancels=[4]).saves
    assert lease == SaveResult(4, 0, "cancelled", reason="broken")
    assert not any(part.transfers for part in engine.worker._parts.values()), "all have ended"


def test_cancels_of_what_was_lost_and_of_what_has_ended(engine: Engine) -> None:
    engine.order(saves=[SaveOrder(3, engine.blocks(1))])
    report = engine.order(cancels=[2])
    assert (report.loads, report.saves) == ([LoadResult(2, 0, "unknown")], [SaveResult(2, 0, "unknown")])
    engine.worker.start(KVConnectorMetadata(cancels=[3]))
    (later,) = engine.order(cancels=[5]).loads
    assert later.load_id == 5, "a cancel of what has ended is not answered"


def test_an_update_that_is_taken_back_leaves_both_namespaces(engine: Engine, tiny_checkpoint: MakeCheckpoint) -> None:
    engine.worker.set_weights(str(tiny_checkpoint("llama")))
    updates = [engine.wait().info or {} for _ in range(2)]
    assert all(info["info"]["fingerprint"] != engine.info[info["part"]]["fingerprint"] for info in updates)
    engine.worker.undo_weights()
    assert {info["part"]: info["info"] for info in (engine.wait().info or {} for _ in range(2))} == engine.info
