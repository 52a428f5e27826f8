"""The worker half of a store and peers in one engine: orders go to the one that they belong to.

What the store has written is put to the block server of the other, if there is one that takes it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.kv_transfer import PART, PARTS
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput
from quire.worker.kv_transfer.peer_worker import PeerWorker
from quire.worker.kv_transfer.store_worker import StoreWorker
from quire.worker.kv_transfer.worker import KVConnectorWorker, Report

STORE, PEERS = PARTS


class StoreAndPeersWorker(KVConnectorWorker):
    """Divides orders, and names the part in messages to the scheduler half."""

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        of_store, of_peers = config.transfer_parts.values()
        store = StoreWorker(of_store, rank)
        peers = PeerWorker(of_peers, rank, store.directory)
        if peers.saver is not None:
            store.on_written = peers.saver.copy
        self._parts: dict[str, KVConnectorWorker] = {STORE: store, PEERS: peers}
        super().__init__(config, rank)
        store.arrivals = peers.arrivals = self.arrivals

    @property
    def report(self) -> Report:  # a property: the parts report what they know to a callback that is registered
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        self._report = report
        for name, part in self._parts.items():
            part.report = partial(self._pass_on, name)

    def _pass_on(self, name: str, output: KVConnectorOutput) -> None:
        """Takes a report of a part, on any thread."""
        if output.info is not None:
            output = KVConnectorOutput(output.loads, output.saves, output.progress, {PART: name, "info": output.info})
        self._report(output)

    def register_kv_caches(self, memory: Any) -> None:
        for part in self._parts.values():
            part.register_kv_caches(memory)

    def start(self, orders: KVConnectorMetadata) -> None:
        cancels = [transfer_id for transfer_id in orders.cancels if not self.answer_if_lost(transfer_id)]
        params = orders.params or {}
        # a part ignores cancels of transfers that are the other's
        by_part = {name: KVConnectorMetadata(cancels=cancels, params=params.get(name)) for name in PARTS}
        for load in orders.loads:
            self.arrivals.add(load.load_id)
            by_part[(load.params or {})[PART]].loads.append(load)
        for save in orders.saves:
            self.arrivals.add(save.save_id)
            by_part[PEERS if save.lease else (save.audit or {}).get(PART, STORE)].saves.append(save)
        for name, part in self._parts.items():
            if by_part[name]:
                part.start(by_part[name])

    def set_weights(self, path: str) -> None:
        for part in self._parts.values():
            part.set_weights(path)

    def undo_weights(self) -> None:
        for part in self._parts.values():
            part.undo_weights()

    def close(self) -> None:
        for part in reversed(self._parts.values()):  # peers read what the store has written
            part.close()
