"""The worker half of a store and peers in one engine: orders go to the one that they belong to.

Each of the two has ids of its own, without gaps: what was lost with a step that failed never reaches them. What the
store has written is put to the block server of the other, if there is one that takes it.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.kv_transfer import PART, PARTS
from quire.wire.kv_transfer import KVConnectorMetadata, KVConnectorOutput, LoadResult, SaveResult, renumber
from quire.worker.kv_transfer.peer_worker import PeerWorker
from quire.worker.kv_transfer.store_worker import StoreWorker
from quire.worker.kv_transfer.worker import Arrivals, KVConnectorWorker, Report

STORE, PEERS = PARTS


class _Part:
    """One of the two, and the ids of its transfers that have not ended."""

    def __init__(self, worker: KVConnectorWorker) -> None:
        self.worker = worker
        self.orders = KVConnectorMetadata()
        """Orders of the message that is being divided."""
        self._ids = count(1)
        self._names: dict[int, int] = {}
        """The engine's ids by the part's."""

    def take_id(self, transfer_id: int) -> int:
        """Returns the part's id of a transfer that begins."""
        own = next(self._ids)
        self._names[own] = transfer_id
        return own

    def send(self) -> None:
        """Gives the orders to the worker."""
        orders, self.orders = self.orders, KVConnectorMetadata()
        if orders:
            self.worker.start(orders)

    def translate(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Returns a report with the engine's ids; what has ended before is left out."""
        names = self._names
        progress = {names[own]: number for own, number in output.progress.items() if own in names}
        loads = [renumber(load, names.pop(load.load_id)) for load in output.loads if load.load_id in names]
        saves = [renumber(save, names.pop(save.save_id)) for save in output.saves if save.save_id in names]
        return KVConnectorOutput(loads, saves, progress, output.info)


class StoreAndPeersWorker(KVConnectorWorker):
    """Divides orders, and joins reports."""

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        of_store, of_peers = config.transfer_parts.values()
        store = StoreWorker(of_store, rank)
        peers = PeerWorker(of_peers, rank, store.directory)
        if peers.saver is not None:
            store.on_written = peers.saver.copy
        self._parts = {STORE: _Part(store), PEERS: _Part(peers)}
        self._arrivals = Arrivals()
        self._places: dict[int, tuple[_Part, int]] = {}
        """Transfers that have not ended: the part, and its id."""
        super().__init__(config, rank)

    @property
    def report(self) -> Report:  # a property: the parts report what they know to a callback that is registered
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        self._report = report
        for name, part in self._parts.items():
            part.worker.report = partial(self._pass_on, name, part)

    def _pass_on(self, name: str, part: _Part, output: KVConnectorOutput) -> None:
        """Takes a report of a part, on any thread."""
        joined = part.translate(output)
        for transfer_id in [*(load.load_id for load in joined.loads), *(save.save_id for save in joined.saves)]:
            self._places.pop(transfer_id, None)
        if joined.info is not None:
            joined.info = {PART: name, "info": joined.info}
        self._report(joined)

    def register_kv_caches(self, memory: Any) -> None:
        for part in self._parts.values():
            part.worker.register_kv_caches(memory)

    def start(self, orders: KVConnectorMetadata) -> None:
        for transfer_id in orders.cancels:
            place = self._places.get(transfer_id)
            if place is not None:
                place[0].orders.cancels.append(place[1])
            elif not self._arrivals.has(transfer_id):
                load, save = LoadResult(transfer_id, 0, "unknown"), SaveResult(transfer_id, 0, "unknown")
                self._report(KVConnectorOutput(loads=[load], saves=[save]))
        for load_order in orders.loads:
            part = self._parts[(load_order.params or {})[PART]]
            own = self._begin(part, load_order.load_id)
            part.orders.loads.append(renumber(load_order, own))
        for save_order in orders.saves:
            part = self._parts[PEERS if save_order.lease else (save_order.audit or {}).get(PART, STORE)]
            own = self._begin(part, save_order.save_id)
            part.orders.saves.append(renumber(save_order, own))
        for name, message in (orders.params or {}).items():
            self._parts[name].orders.params = message
        for part in self._parts.values():
            part.send()

    def _begin(self, part: _Part, transfer_id: int) -> int:
        self._arrivals.add(transfer_id)
        own = part.take_id(transfer_id)
        self._places[transfer_id] = part, own
        return own

    def end_step(self) -> None:
        for part in self._parts.values():
            part.worker.end_step()

    def set_weights(self, path: str) -> None:
        for part in self._parts.values():
            part.worker.set_weights(path)

    def undo_weights(self) -> None:
        for part in self._parts.values():
            part.worker.undo_weights()

    def close(self) -> None:
        for part in reversed(self._parts.values()):  # peers read what the store has written
            part.worker.close()
