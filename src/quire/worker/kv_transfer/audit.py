"""Audits: computed blocks are compared with what a directory, or a block server, holds of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from quire.kv_store.access import RecordBuffer, RecordReader
from quire.kv_store.codec import prove_payload
from quire.kv_store.peer.client import PeerClient, PeerError
from quire.kv_store.record import InvalidRecordError, RecordHeader, RecordMac
from quire.logger import init_logger
from quire.wire.kv_transfer import KVConnectorOutput, SaveOrder, SaveResult, TransferOutcome
from quire.worker.kv_transfer.transfers import NO_PLACE, Namespace
from quire.worker.kv_transfer.worker import Report

logger = init_logger(__name__)


class BlockAudit(ABC):
    """A comparison of the blocks of an order."""

    def __init__(self, order: SaveOrder, namespace: Namespace | None, report: Report) -> None:
        self.order, self.namespace, self._report = order, namespace, report
        self.is_cancelled = False

    def cancel(self) -> None:
        """Ends the audit after the block that is being compared."""
        self.is_cancelled = True

    @abstractmethod
    def read(self, index: int, header: RecordHeader) -> memoryview:
        """Returns the payload of the record that is stored of a block. Raises InvalidRecordError."""

    @abstractmethod
    def end_source(self, index: int) -> str:
        """Notes that another block is stored than was computed: which of the two is right is not known. Returns what
        becomes of the source, for the log."""

    def close(self) -> None:  # noqa: B027  connections are given back after each block
        """Ends reading."""

    def run(self) -> None:
        """Compares the blocks and reports the end."""
        start_ts = time.monotonic()
        num_same, differing = 0, list[int]()
        for index in range(len(self.order.blocks)):
            if self.is_cancelled:
                break
            try:
                is_same = self._compare(index)
            except (InvalidRecordError, PeerError) as e:
                logger.debug("a block is not audited: %s", e)
                continue
            except Exception:
                logger.exception("audit %d failed", self.order.save_id)
                continue
            if is_same:
                num_same += 1
            else:
                differing.append(index)
        self.close()
        outcome: TransferOutcome = "cancelled" if self.is_cancelled else "ok"
        seconds = time.monotonic() - start_ts
        self._report(
            KVConnectorOutput(
                saves=[SaveResult(self.order.save_id, num_same, outcome, seconds=seconds, differing=differing)]
            )
        )

    def _compare(self, index: int) -> bool:
        """Returns whether a block is the stored one. Raises InvalidRecordError and PeerError if that cannot be read."""
        block, namespace = self.order.blocks[index], self.namespace
        if namespace is None:
            raise InvalidRecordError("key", "the namespace is not known")
        header = namespace.header_of(block.group_id, block.key)
        stored = np.frombuffer(self.read(index, header), np.uint8)
        computed = np.frombuffer(namespace.blocks.copy_out(block.group_id, block.block_id), np.uint8)
        if np.array_equal(stored, computed):
            return True
        logger.error(
            "other bytes are stored than were computed for block %s of group %d (%d of %d differ): %s",
            *(block.key.digest.hex()[:16], block.group_id, int((stored != computed).sum()), len(computed)),
            self.end_source(index),
        )
        return False


class Audit(BlockAudit):
    """A comparison with the records of a directory. An extent with another block is deleted, for every engine."""

    def __init__(
        self,
        order: SaveOrder,
        rank: int,
        namespace: Namespace | None,
        reader: RecordReader,
        remove: Callable[[str], None],
        report: Report,
    ) -> None:
        """`rank`: the worker; `remove` deletes an extent."""
        super().__init__(order, namespace, report)
        self._reader, self._remove, self._buffer = reader, remove, RecordBuffer()
        parts = (order.audit or {}).get("parts")
        self._extents: list[str] = parts[rank]["extents"] if parts else []
        self._places: list[int] = parts[rank]["places"][0] if parts else [NO_PLACE] * len(order.blocks)

    def read(self, index: int, header: RecordHeader) -> memoryview:
        place = self._places[index]
        if place == NO_PLACE:
            raise InvalidRecordError("key", "the record is not in the index any more")
        start = self._reader.read(self._extents[place >> 32], place & 0xFFFFFFFF, header, self._buffer)
        return self._buffer.take(start + header.payload_bytes)[start:]

    def end_source(self, index: int) -> str:
        extent = self._extents[self._places[index] >> 32]
        self._remove(extent)
        return f"{extent} is deleted"

    def close(self) -> None:
        self._reader.close()
        self._buffer.close()


class RemoteAudit(BlockAudit):
    """A comparison with the records of a block server, one by one. After a fault of it the others are not compared."""

    def __init__(
        self,
        order: SaveOrder,
        rank: int,
        namespace: Namespace | None,
        client: PeerClient,
        mac: RecordMac,
        report: Report,
    ) -> None:
        """`rank`: the worker."""
        super().__init__(order, namespace, report)
        self._client, self._mac = client, mac
        self._address: str = (order.audit or {})["peers"][rank][0]
        self._fault: PeerError | None = None

    def read(self, index: int, header: RecordHeader) -> memoryview:
        if self._fault is not None:
            raise self._fault
        name = header.group, header.digest
        try:
            with self._client.connect(
                self._address, header.fingerprint, is_cancelled=lambda: self.is_cancelled
            ) as peer:
                if not peer.have([name])[0]:
                    raise InvalidRecordError("key", f"{self._address} does not have it any more")
                ((head, stored),) = peer.fetch("", [name])
        except PeerError as e:
            self._fault = e
            raise
        return prove_payload(self._mac, header, head, stored)

    def end_source(self, index: int) -> str:
        return f"nothing is taken from {self._address} for a while"
