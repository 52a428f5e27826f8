"""Transfers of KV blocks between a worker's cache and a store outside the engine.

Orders go to the workers with a step (`SchedulerOutput.kv_connector_metadata`), or directly where no step may come
(`Executor.send_transfers`). Results come back between steps, by the callback that the executor was given
(`Executor.register_transfer_callback`), on any thread.

The protocol, which a worker half must keep:

* Ids of loads and saves are of one sequence, and arrive in its order: those that are passed over were lost with a step
  that failed, and will not come. Each order that arrives is answered once, by its result.
* A cancel asks to end early: the order's result comes as soon as the worker half no longer touches its blocks. A cancel
  of an id that has not arrived is answered with outcome "unknown". A cancel of an answered order has no effect.
* A load writes its blocks in order of position. `num_verified` counts the leading positions of which every block that
  is to be loaded was read, authenticated and compared with its key.
* Blocks of a load belong to the worker half until its result; blocks of a save may be read until its result, and their
  content does not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

REJECTIONS = ("mac", "truncated", "key", "tokens", "format", "io")
"""Reasons for which a record is not used. key: it is another block's, or of another namespace."""
AWAY = "away"
"""Reason of a save, and outcome of a record: the server has failed before it answered. It may be stored later."""
REMOTE_SAVE_OUTCOMES = ("stored", "present", "full", "rate", "error", "gone", "refused", "pins", AWAY)
"""Outcomes of a record that is put to a block server. The first two: it is there. full, rate, error: the server has not
written it. gone: it was deleted here before. refused: the server takes none. pins: its block was needed here."""
TransferOutcome = Literal["ok", "partial", "failed", "cancelled", "unknown"]
"""ok: all blocks. partial, failed: some or none, because of an error. cancelled: some or none, because of a cancel.
unknown: the worker has never had the order."""


class BlockKey(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """The identity of a full block, whichever group stores it: what its keys and values follow from."""

    digest: bytes
    """`wire/block_hash.py: hash_block` of the other three."""
    parent: bytes | None
    """Digest of the block before it; None: it is the first."""
    token_ids: tuple[int, ...]
    extra_keys: tuple[tuple[Any, ...], ...] | None = None
    """`wire/block_hash.py: ExtraKeys`. Its items are str, int or bytes."""


class LoadOrder(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Blocks to be read from a store, for one request."""

    load_id: int
    source: str
    """Source that the scheduler half named: a label of metrics, e.g. "disk"."""
    start: int
    """Index of the first block in the request."""
    keys: list[BlockKey]
    """The blocks from `start` on, in order of position. The identity of every one is to be compared."""
    block_ids: list[list[int]]
    """Destinations per group, parallel to `keys`; 0: this group does not need the block (a window has passed it)."""
    params: dict[str, Any] | None = None
    """Message of the scheduler half to the worker half, about this load."""


class SavedBlock(NamedTuple):
    """A computed block of one group, to be written to a store. Messages have `SavedBlocks`."""

    group_id: int
    block_id: int
    key: BlockKey


class SavedBlocks(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Computed blocks, in order: a list per field of `SavedBlock`, all of one length. The core's loop makes these by
    slices; a `SavedBlock` is made where one is used."""

    group_ids: list[int] = []
    block_ids: list[int] = []
    digests: list[bytes] = []
    parents: list[bytes | None] = []
    token_ids: list[tuple[int, ...]] = []
    extra_keys: list[tuple[tuple[Any, ...], ...] | None] | None = None
    """None: no block has any."""

    @staticmethod
    def of(blocks: Iterable[SavedBlock]) -> SavedBlocks:
        """Returns the columns of `blocks`."""
        made = SavedBlocks(extra_keys=[])
        for block in blocks:
            made.add(block.group_id, block.block_id, block.key)
        return made

    def add(self, group_id: int, block_id: int, key: BlockKey) -> None:
        """Adds a block. `extra_keys` is a list."""
        self.group_ids.append(group_id)
        self.block_ids.append(block_id)
        self.digests.append(key.digest)
        self.parents.append(key.parent)
        self.token_ids.append(key.token_ids)
        assert self.extra_keys is not None
        self.extra_keys.append(key.extra_keys)

    def __len__(self) -> int:
        return len(self.block_ids)

    def __getitem__(self, index: int) -> SavedBlock:
        keys = None if self.extra_keys is None else self.extra_keys[index]
        key = BlockKey(self.digests[index], self.parents[index], self.token_ids[index], keys)
        return SavedBlock(self.group_ids[index], self.block_ids[index], key)

    def __iter__(self) -> Iterator[SavedBlock]:
        return (self[index] for index in range(len(self)))


class SaveOrder(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Blocks to be written to a store. They are computed, and pinned until the result."""

    save_id: int
    blocks: SavedBlocks
    lease: str = ""
    """Name under which another engine may read the blocks; the save ends when it has, with reason released, expired or
    broken. Empty: they are written to a store."""
    audit: dict[str, Any] | None = None
    """Not None: they are not written but compared with what is stored; where that is."""


class KVConnectorMetadata(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Orders for the workers. All workers get the same; each transfers its own part of a block."""

    loads: list[LoadOrder] = []
    saves: list[SaveOrder] = []
    cancels: list[int] = []
    """Ids of loads and saves. None of them is among those of the same message."""
    params: dict[str, Any] | None = None
    """Another message of the scheduler half to the worker half."""

    def __bool__(self) -> bool:
        """Returns whether there is anything to send."""
        return bool(self.loads or self.saves or self.cancels or self.params)


class LoadResult(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The end of a load: the worker half no longer touches its blocks."""

    load_id: int
    num_verified: int
    """Leading positions of the order that may be used."""
    outcome: TransferOutcome = "ok"
    num_bytes: int = 0
    """Bytes read."""
    seconds: float = 0.0
    """Time from its first read to its end."""
    reason: str = ""
    """Reason of "partial" and "failed": mac, truncated, key, tokens, format, io, or "connector"."""
    num_records: int = 0
    """Records that were read, of which each was accepted or rejected; a load that ends early may have read some that
    are not used."""
    num_accepted: int = 0
    """Records that are what they should be."""
    num_rejected: dict[str, int] = {}
    """Records that are not, by reason (`REJECTIONS`)."""


class SaveResult(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The end of a save: the worker half no longer touches its blocks."""

    save_id: int
    num_saved: int
    """Leading blocks of the order that can be found from now on."""
    outcome: TransferOutcome = "ok"
    num_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    """Reason of "partial" and "failed": full, rate, error, or AWAY, after which the rest is ordered again. Of a lease:
    how it has ended."""
    differing: list[int] = []
    """Blocks of an audit that are not what is stored, by index in the order; `num_saved` are the same."""
    num_present: int = 0
    """Saved blocks that were there before, and were not written again."""


def cut_load(order: LoadOrder, invalid: Set[int], *, has_failed: bool = False) -> LoadResult:
    """Returns the end of a connector's load: what is before its first invalid block may be used."""
    bad = [index for ids in order.block_ids for index, block_id in enumerate(ids) if block_id in invalid]
    num_good = 0 if has_failed else min(bad, default=len(order.keys))
    if num_good == len(order.keys):
        return LoadResult(order.load_id, num_good)
    return LoadResult(order.load_id, num_good, "partial" if num_good else "failed", reason="connector")


Result = TypeVar("Result", LoadResult, SaveResult)


class KVConnectorOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Report of a worker half."""

    loads: list[LoadResult] = []
    saves: list[SaveResult] = []
    progress: dict[int, int] = {}
    """Blocks verified so far, of loads that go on. One that goes on for longer is reported at least every second."""
    info: dict[str, Any] | None = None
    """Another message of the worker half to the scheduler half: an identity, counters."""
    rank: int = 0
    """The worker that `info` is of. The rest is what all workers have done."""
    step: int = 0
    """Number of the step that this is the report of: each worker makes one, and they are taken in together, in order of
    their steps. 0: it is taken in as it comes."""
    infos: list[tuple[int, dict[str, Any]]] = []
    """The `info` of several workers' reports of a step, with their ranks."""

    def __bool__(self) -> bool:
        """Returns whether there is anything to report."""
        return bool(self.loads or self.saves or self.progress or self.info or self.infos)


class TransferAggregator:
    """Joins the reports of several workers: a transfer has ended when all of them have reported it.

    Of a load counts what every worker has verified, of a save what every worker has saved. Not thread-safe.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._loads = _Parts[LoadResult]("num_verified", num_workers)
        self._saves = _Parts[SaveResult]("num_saved", num_workers)
        self._progress: dict[int, dict[int, int]] = {}
        """Blocks that each worker has verified of a load that goes on: load and rank to their number."""
        self._steps: dict[int, dict[int, KVConnectorOutput]] = {}
        """Reports of steps, by step and rank, until all workers have made theirs."""

    def add(self, rank: int, report: KVConnectorOutput) -> KVConnectorOutput:
        """Returns what has ended, or gone on, with this report of one worker. A worker's message is passed on."""
        if report.step:
            return self._add_step(rank, report)
        joined = KVConnectorOutput(info=report.info, rank=rank)
        self._join(joined, rank, report)
        return joined

    def _add_step(self, rank: int, report: KVConnectorOutput) -> KVConnectorOutput:
        """Returns what the workers report of a step once the last of them has, and of steps before it that some worker
        has lost."""
        joined = KVConnectorOutput(step=report.step)
        self._steps.setdefault(report.step, {})[rank] = report
        if len(self._steps[report.step]) == self._num_workers:
            for step in sorted(step for step in self._steps if step <= report.step):
                for other, part in sorted(self._steps.pop(step).items()):
                    if part.info is not None:
                        joined.infos.append((other, part.info))
                    self._join(joined, other, part)
        return joined

    def _join(self, joined: KVConnectorOutput, rank: int, report: KVConnectorOutput) -> None:
        """Adds to `joined` what has ended, or gone on, with the report of one worker."""
        verified = {**report.progress, **{one.load_id: one.num_verified for one in report.loads}}
        for load_id, number in verified.items():
            by_rank = self._progress.setdefault(load_id, {})
            by_rank[rank] = max(number, by_rank.get(rank, 0))
        joined.loads += [done for one in report.loads if (done := self._loads.add(one.load_id, rank, one))]
        joined.saves += [more for one in report.saves if (more := self._saves.add(one.save_id, rank, one))]
        for load_id in verified:
            if self._loads.has_ended(load_id):
                self._progress.pop(load_id, None)
            elif len(self._progress[load_id]) == self._num_workers:
                joined.progress[load_id] = min(self._progress[load_id].values())


class _Parts(Generic[Result]):
    """Results of transfers of one kind, by rank, until all workers have reported them."""

    def __init__(self, counted: str, num_workers: int) -> None:
        """`counted`: the field with what a worker has done."""
        self._counted, self._num_workers = counted, num_workers
        self._pending: dict[int, dict[int, Result]] = {}
        self._ended: dict[int, None] = {}
        """The last transfers that have ended: what is reported of them again is not the beginning of another."""

    def has_ended(self, transfer_id: int) -> bool:
        """Returns whether all workers have reported the end of a transfer, lately."""
        return transfer_id in self._ended

    def add(self, transfer_id: int, rank: int, part: Result) -> Result | None:
        """Adds the result of a worker. Returns that of all workers once the last of them is there.

        The worker that has done least decides: its reason is that of the first block which cannot be used.
        """
        if transfer_id in self._ended:
            return None
        parts = self._pending.setdefault(transfer_id, {})
        parts.setdefault(rank, part)
        if len(parts) < self._num_workers:
            return None
        del self._pending[transfer_id]
        self._ended[transfer_id] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        least = min(parts.values(), key=lambda one: (getattr(one, self._counted), -_SEVERITY[one.outcome]))
        num_bytes, seconds = sum(one.num_bytes for one in parts.values()), max(one.seconds for one in parts.values())
        counts: dict[str, Any] = {}
        if loads := [one for one in parts.values() if isinstance(one, LoadResult)]:
            counts["num_records"] = sum(load.num_records for load in loads)
            counts["num_accepted"] = sum(load.num_accepted for load in loads)
            counts["num_rejected"] = dict(sum((Counter(load.num_rejected) for load in loads), Counter[str]()))
        else:
            counts["differing"] = sorted({i for one in parts.values() for i in getattr(one, "differing", ())})
        return msgspec.structs.replace(least, num_bytes=num_bytes, seconds=seconds, **counts)


MAX_ENDED = 4096
"""Number of ended transfers that are remembered, of loads and of saves."""
_SEVERITY: dict[TransferOutcome, int] = {"ok": 0, "cancelled": 1, "unknown": 2, "partial": 3, "failed": 4}
