"""Audits of the store: computed blocks are compared with what it holds of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from quire.kv_store.access import RecordBuffer, RecordReader
from quire.kv_store.record import InvalidRecordError
from quire.logger import init_logger
from quire.wire.kv_transfer import KVConnectorOutput, SaveOrder, SaveResult, TransferOutcome
from quire.worker.kv_transfer.transfers import NO_PLACE, Namespace
from quire.worker.kv_transfer.worker import Report

logger = init_logger(__name__)


class Audit:
    """A comparison of the blocks of an order."""

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
        self.order = order
        self._namespace, self._reader = namespace, reader
        self._remove, self._report = remove, report
        self._is_cancelled = False
        parts = (order.audit or {}).get("parts")
        self._extents: list[str] = parts[rank]["extents"] if parts else []
        self._places: list[int] = parts[rank]["places"][0] if parts else [NO_PLACE] * len(order.blocks)

    def cancel(self) -> None:
        """Ends the audit after the block that is being compared."""
        self._is_cancelled = True

    def run(self) -> None:
        """Compares the blocks and reports the end. An extent with another block than the computed one is deleted:
        which of the two is right is not known, and no engine is to read it."""
        start_ts, buffer = time.monotonic(), RecordBuffer()
        num_same, differing = 0, list[int]()
        for index in range(len(self.order.blocks)):
            if self._is_cancelled:
                break
            try:
                is_same = self._compare(index, buffer)
            except InvalidRecordError as e:
                logger.debug("a block is not audited: %s", e)
                continue
            except Exception:
                logger.exception("audit %d failed", self.order.save_id)
                continue
            if is_same:
                num_same += 1
            else:
                differing.append(index)
        self._reader.close()
        buffer.close()
        outcome: TransferOutcome = "cancelled" if self._is_cancelled else "ok"
        seconds = time.monotonic() - start_ts
        self._report(
            KVConnectorOutput(
                saves=[SaveResult(self.order.save_id, num_same, outcome, seconds=seconds, differing=differing)]
            )
        )

    def _compare(self, index: int, buffer: RecordBuffer) -> bool:
        """Returns whether a block is the stored one. Raises InvalidRecordError if that cannot be read."""
        block, place, namespace = self.order.blocks[index], self._places[index], self._namespace
        if namespace is None or place == NO_PLACE:
            raise InvalidRecordError("key", "the record is not in the index any more")
        extent, header = self._extents[place >> 32], namespace.header_of(block.group_id, block.key)
        start = self._reader.read(extent, place & 0xFFFFFFFF, header, buffer)
        stored = np.frombuffer(buffer.take(header.record_bytes)[start:], np.uint8)
        computed = np.frombuffer(namespace.blocks.copy_out(block.group_id, block.block_id), np.uint8)
        if np.array_equal(stored, computed):
            return True
        logger.error(
            "the KV store has other bytes than were computed for block %s of group %d (%d of %d differ): %s is deleted",
            *(block.key.digest.hex()[:16], block.group_id, int((stored != computed).sum()), len(computed), extent),
        )
        self._remove(extent)
        return False
