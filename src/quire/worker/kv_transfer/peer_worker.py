"""The worker half of peers: takes blocks from other engines and block servers, and serves those that are promised.

A promise (lease) arrives as a save, and ends as one: when the other engine has released it, its time is over, or it is
cancelled because the blocks are needed. Between, the server's thread copies a block when it is asked for. Saves without
a lease are put to the first block server.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from quire.config.engine import EngineConfig
from quire.kv_store.codec import prove_payload
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.peer.client import PeerClient, PeerError
from quire.kv_store.peer.server import BlockServer, BlockSource, Record
from quire.kv_store.record import InvalidRecordError, RecordMac
from quire.kv_store.rests import Rests
from quire.logger import init_logger
from quire.wire.kv_peers import RecordName, Release, Renew
from quire.wire.kv_transfer import (
    BlockKey,
    KVConnectorMetadata,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SaveOrder,
    SaveResult,
)
from quire.worker.kv_transfer.audit import RemoteAudit
from quire.worker.kv_transfer.record_worker import RecordWorker
from quire.worker.kv_transfer.remote_saves import RemoteSave, RemoteSaver
from quire.worker.kv_transfer.tiers import Answers, ServerWatcher, TierAsker
from quire.worker.kv_transfer.transfers import PROGRESS_S, Namespace
from quire.worker.kv_transfer.worker import Report, outcome_of

logger = init_logger(__name__)

RENEW_S, RENEWED_S = 5.0, 20.0
"""Time between renewals of a lease, and what one adds."""
END_S = 1.0
MAX_ENDED = 1024
"""Number of ended leases that are remembered."""


class _Lease:
    """Blocks of an ended request, held for another engine."""

    def __init__(self, order: SaveOrder, namespace: Namespace, expires: float, owner: LeasedBlocks) -> None:
        self.order, self.namespace, self.expires, self._owner = order, namespace, expires, owner
        self.blocks: dict[RecordName, tuple[int, BlockKey]] = {
            (block.group_id, block.key.digest): (block.block_id, block.key) for block in order.blocks
        }

    def cancel(self) -> None:
        """Breaks the lease."""
        self._owner.end([self.order.lease], "broken")


class LeasedBlocks(BlockSource):
    """The blocks under leases. Leases begin and are broken on any thread; the rest is the server's."""

    def __init__(self, key: bytes, duration_s: float, identify: Callable[[], bytes | None], report: Report) -> None:
        """`identify` returns the fingerprint of the engine's blocks; `report` takes the end of each lease."""
        self._mac = RecordMac(key)
        self._duration_s, self._identify, self._report = duration_s, identify, report
        self._leases: dict[str, _Lease] = {}
        self._ended: dict[str, None] = {}
        """Names of the last leases that ended."""
        self._lock = threading.Lock()
        self._next_end = float("inf")

    def make_lease(self, order: SaveOrder, namespace: Namespace, now: float) -> _Lease:
        """Returns a lease that begins with `begin`."""
        return _Lease(order, namespace, now + self._duration_s, self)

    def begin(self, lease: _Lease) -> None:
        """Begins a lease, which may end at once."""
        with self._lock:
            self._leases[lease.order.lease] = lease
            self._next_end = min(self._next_end, lease.expires)

    # -- of the server -----------------------------------------------------------------------------------------

    def accepts(self, fingerprint: bytes) -> bool:
        return fingerprint == self._identify()

    def has(self, fingerprint: bytes, keys: Sequence[RecordName]) -> list[bool]:
        return [False] * len(keys)

    def read(self, fingerprint: bytes, lease: str, key: RecordName) -> Record | None:
        with self._lock:  # the lease cannot end while its block is copied
            held = self._leases.get(lease)
            found = None if held is None else held.blocks.get(key)
            if held is None or found is None or held.namespace.fingerprint != fingerprint:
                return None
            payload = held.namespace.blocks.copy_out(key[0], found[0])
        head = held.namespace.header_of(key[0], found[1]).encode()
        return head + self._mac.tag(head, [payload]), payload

    def is_expected(self, lease: str) -> bool:
        with self._lock:
            return bool(lease) and lease not in self._leases and lease not in self._ended

    def renew(self, leases: Sequence[str], now: float) -> None:
        with self._lock:
            for name in leases:
                if name in self._leases:
                    self._leases[name].expires = max(self._leases[name].expires, now + RENEWED_S)

    def release(self, leases: Sequence[str]) -> None:
        self.end(leases, "released")

    def end_expired(self, now: float) -> float:
        with self._lock:
            if now < self._next_end:
                return self._next_end
            expired = [name for name, lease in self._leases.items() if lease.expires <= now]
            rest = [lease.expires for lease in self._leases.values() if lease.expires > now]
            self._next_end = min(rest, default=float("inf"))
        self.end(expired, "expired")
        return self._next_end

    def end(self, leases: Iterable[str], reason: str) -> None:
        """Ends leases, and reports it. Callable from any thread."""
        ended = []
        with self._lock:
            for name in leases:
                lease = self._leases.pop(name, None)
                self._ended[name] = None
                if lease is not None:
                    ended.append(lease.order)
            while len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        for order in ended:
            result = SaveResult(order.save_id, 0, "cancelled" if reason == "broken" else "ok", reason=reason)
            self._report(KVConnectorOutput(saves=[result]))


class PeerLoad:
    """A load of blocks from one peer, by one thread, in order."""

    def __init__(
        self,
        order: LoadOrder,
        rank: int,
        namespace: Namespace | None,
        client: PeerClient,
        mac: RecordMac,
        report: Report,
    ) -> None:
        """`rank`: the worker, whose part of each block is taken."""
        self.order, self._rank = order, rank
        self._namespace, self._client, self._mac, self._report = namespace, client, mac, report
        self._is_cancelled = threading.Event()
        self._num_verified = self._num_bytes = 0
        self._num_records = self._num_accepted = 0
        self._num_rejected: dict[str, int] = {}

    def cancel(self) -> None:
        """Ends the load after the block that is being read."""
        self._is_cancelled.set()

    def run(self) -> None:
        """Reads the blocks and reports the end."""
        start_ts, reason = time.monotonic(), ""
        try:
            if not self._is_cancelled.is_set():
                self._fetch(start_ts)
        except (PeerError, InvalidRecordError) as e:
            logger.debug("load %d: %s", self.order.load_id, e)
            reason = "" if e.reason == "cancelled" else e.reason
            if isinstance(e, InvalidRecordError) and self._num_records:
                self._num_rejected = {reason: 1}
        except Exception:
            logger.exception("load %d failed", self.order.load_id)
            reason = "io"
        outcome = outcome_of(self._num_verified, len(self.order.keys), reason)
        seconds = time.monotonic() - start_ts
        result = LoadResult(self.order.load_id, self._num_verified, outcome, self._num_bytes, seconds, reason)
        result.num_records, result.num_accepted = self._num_records, self._num_accepted
        result.num_rejected = self._num_rejected
        self._report(KVConnectorOutput(loads=[result]))

    def _fetch(self, progress_ts: float) -> None:
        """Raises PeerError and InvalidRecordError."""
        namespace, params, keys = self._namespace, self.order.params or {}, self.order.keys
        if namespace is None:
            raise InvalidRecordError("key", "the namespace is not known")
        wanted = [
            (position, group, block_ids[position])
            for position in range(len(keys))
            for group, block_ids in enumerate(self.order.block_ids)
            if block_ids[position]
        ]
        names = [(group, keys[position].digest) for position, group, _ in wanted]
        address, incarnation = params["peers"][self._rank]
        with self._client.connect(address, namespace.fingerprint, incarnation, self._is_cancelled.is_set) as peer:
            records = peer.fetch(params.get("lease", ""), names)
            places = zip(wanted, [position for position, *_ in wanted[1:]] + [len(keys)], strict=True)
            for ((position, group, block_id), following), (head, stored) in zip(places, records, strict=True):
                self._num_records += 1
                header = namespace.header_of(group, keys[position])
                payload = prove_payload(self._mac, header, head, stored)
                self._num_accepted += 1
                namespace.blocks.copy_in(group, block_id, payload)
                self._num_bytes += len(head) + len(payload)
                if following > position:  # its last block: all up to the next position are verified
                    self._num_verified = following
                if (now := time.monotonic()) - progress_ts >= PROGRESS_S:
                    progress_ts = now
                    self._report(KVConnectorOutput(progress={self.order.load_id: self._num_verified}))
        if not wanted:
            self._num_verified = len(keys)


class _Tasks:
    """Threads that do what they are given, in order; one of them does something else each RENEW_S, too."""

    def __init__(self, name: str, num_threads: int = 1, every: Callable[[], None] | None = None) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._every = every
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Adds a task."""
        self._tasks.put(task)

    def stop(self, deadline: float) -> bool:
        """Ends the threads. Returns False if one hangs."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        every, next_ts = self._every, time.monotonic() + RENEW_S
        while True:
            try:
                task = self._tasks.get(timeout=None if every is None else max(0.0, next_ts - time.monotonic()))
            except queue.Empty:
                task, next_ts = every, time.monotonic() + RENEW_S
            if task is None:
                return
            try:
                task()
            except Exception:
                logger.exception("a task of peers failed")
            del task  # it holds the memory of the KV cache, which may be released now


def address_of(listen: str, index: int) -> str:
    """Returns the address that one of several workers of all engines listens at: their ports or paths follow one
    another."""
    head, _, port = listen.rpartition(":")
    if not index or listen.endswith(":0"):
        return listen
    is_port = listen.startswith("tcp://") and port.isdecimal()
    return f"{head}:{int(port) + index}" if is_port else f"{listen}.{index}"


class PeerWorker(RecordWorker):
    """Takes blocks from peers, and serves leased ones."""

    what = "the key directory of peers"

    def __init__(self, config: EngineConfig, rank: int = 0, copied: StoreDirectory | None = None) -> None:
        """`copied`: directory of the records that are put to the block server, too; None: saves are."""
        extra = config.kv_transfer_config.kv_connector_extra_config
        super().__init__(config, rank, StoreDirectory.open_for_key(extra["path"]))
        self._mac = RecordMac(self.directory.key)
        self._client = PeerClient(self.directory.key, extra["engine_id"])
        self._leases = LeasedBlocks(self.directory.key, extra["kv_lease_duration"], self._identify_self, self.end)
        self._server = None
        if config.kv_transfer_config.kv_role != "kv_consumer":
            parallel = config.parallel_config
            address = address_of(extra["listen"], parallel.engine_index * parallel.world_size + rank)
            self._server = BlockServer(self._leases, self.directory.key, address, extra["engine_id"])
        self._rests = Rests()
        """Addresses that are sent no renewals. Owned by the keeper's thread, as the next."""
        self._kept: dict[str, tuple[str, str]] = {}
        """Leases of waiting requests: lease to address and incarnation."""
        self._loads = _Tasks("kv-peer-load", extra["io_threads"])
        self._tiers = TierAsker(self._client, extra["tiers"])
        self.saver: RemoteSaver | None = None
        """None: no block server is given records."""
        if extra["tiers"] and extra["saves"]:
            report_state, report_counts = (partial(self._send_info, name) for name in ("store_state", "puts"))
            self.saver = RemoteSaver(self._client, extra["tiers"][0], copied, report_state, report_counts)
        self._keeper = _Tasks("kv-peer-keep", every=self._renew)

    def start(self, orders: KVConnectorMetadata) -> None:
        namespace = self.namespace
        for transfer_id in orders.cancels:
            self.cancel(transfer_id)
        for load in orders.loads:
            task = PeerLoad(load, self.rank, namespace, self._client, self._mac, self.end)
            self.begin(load.load_id, task)
            self._loads.put(task.run)
        for save in orders.saves:
            self._begin_save(save, namespace)
        params = orders.params or {}
        for request_id, keys in params.get("ask", {}).items():
            fingerprint = None if namespace is None else namespace.fingerprint
            self._tiers.ask(keys, fingerprint, partial(self._report_tiers, request_id))
        if "drop" in params:
            self._drop_records(params["drop"])
        for lease, sites in params.get("keep", ()):
            self._keeper.put(partial(self._kept.__setitem__, lease, tuple(sites[self.rank])))
        for lease in params.get("release", ()):
            self._keeper.put(partial(self._release, lease))

    def _identify_self(self) -> bytes | None:
        namespace = self.namespace
        return None if namespace is None else namespace.fingerprint

    def _begin_save(self, order: SaveOrder, namespace: Namespace | None) -> None:
        if order.audit is not None:
            audit = RemoteAudit(order, self.rank, namespace, self._client, self._mac, self.end)
            self.begin(order.save_id, audit)
            self._loads.put(audit.run)
        elif namespace is not None and order.lease:
            lease = self._leases.make_lease(order, namespace, time.monotonic())
            self.begin(order.save_id, lease)
            self._leases.begin(lease)
            if self._server is not None:
                self._server.wake()
        elif namespace is not None and self.saver is not None:
            save = RemoteSave(order, namespace, self._mac, self.end)
            self.begin(order.save_id, save)
            self.saver.put(save)
        else:
            self.arrivals.add(order.save_id)
            self._report(KVConnectorOutput(saves=[SaveResult(order.save_id, 0, "failed", reason="error")]))

    def _send_info(self, name: str, value: Any) -> None:
        self._report(KVConnectorOutput(info={name: value}))

    def watch(self, fingerprint: bytes, generation: int) -> None:
        if self.saver is not None:
            self.saver.begin(fingerprint)
        super().watch(fingerprint, generation)

    def make_watcher(self, fingerprint: bytes, report: Callable[..., None]) -> ServerWatcher:
        tiers = self.config.kv_transfer_config.kv_connector_extra_config["tiers"]
        return ServerWatcher(self._client, tiers[0], fingerprint, report)

    def describe(self) -> dict[str, Any]:
        if self._server is None:
            return {}
        return {"listen": self._server.address, "incarnation": self._server.incarnation}

    def end_all(self) -> None:
        for task in list(self.transfers.values()):
            task.cancel()

    def stop_threads(self) -> bool:
        deadline = time.monotonic() + END_S
        num_hung = sum(not threads.stop(deadline) for threads in (self._loads, self._tiers, self._keeper))
        if self.saver is not None:
            num_hung += not self.saver.stop(deadline)
        if self._server is not None:
            self._server.close()
        self._client.close()
        return not num_hung

    # -- what servers have, and leases elsewhere ---------------------------------------------------------------

    def _report_tiers(self, request_id: str, answers: Answers) -> None:
        self._send_info("have", {request_id: answers})

    def _drop_records(self, number: int) -> None:
        """Orders the block servers to drop the records of this namespace, and reports the outcomes."""
        namespace = self.namespace
        prepare = (lambda deadline: None) if self.saver is None else self.saver.forget_copies
        self._tiers.drop(
            None if namespace is None else namespace.fingerprint,
            prepare,
            lambda outcomes: self._send_info("dropped", [number, outcomes]),
        )

    def _release(self, lease: str) -> None:
        place = self._kept.pop(lease, None)
        if place is not None:
            self._send(place, Release([lease]))

    def _renew(self) -> None:
        for lease, place in list(self._kept.items()):
            self._send(place, Renew([lease]))

    def _send(self, place: tuple[str, str], message: Renew | Release) -> None:
        """Sends a peer what needs no answer. One that cannot be reached ends its leases itself."""
        namespace = self.namespace
        if namespace is None or self._rests.is_resting(place[0], time.monotonic()):
            return
        try:
            with self._client.connect(place[0], namespace.fingerprint, place[1]) as peer:
                peer.send(message)
        except PeerError as e:
            if e.reason != "stale":
                self._rests.note_fault(place[0], time.monotonic())
        else:
            self._rests.note_good(place[0])
