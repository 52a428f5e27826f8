"""Loads of blocks from their order to their end, which may come long after nothing waits for them any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.engine.kv_cache.block import KVCacheBlocks
from quire.engine.kv_cache.connector import ExternalMatch, KVConnectorScheduler
from quire.engine.kv_cache.hashing import block_extra_keys, stored_extra_keys, stored_hashes
from quire.engine.kv_cache.held import add_count
from quire.engine.kv_cache.load_cost import NEVER, QUARANTINE_S, LoadCost
from quire.engine.kv_cache.manager import KVCacheManager, LoadingBlocks
from quire.engine.request import Request
from quire.wire.kv_transfer import BlockKey, LoadOrder, LoadResult

CANCEL_S = 0.05
"""Seconds that a cancelled load may take to end, before its request is computed without it."""
QUICK_S, JOINT_S = 0.15, 1.0
"""Predicted seconds of one load, and of all that are left, up to which a request that has loaded waits for those of
others: less than the steps that they save."""


@dataclass(eq=False)
class Load:
    """One load. Its request waits for it in the first three stages; it was given up in the last two."""

    request: Request
    order: LoadOrder
    blocks: LoadingBlocks
    fence: int
    """Number of steps whose results must be in before it is sent: they may still write its blocks."""
    began: float
    stage: Literal["ordered", "sent", "cancelled", "ended", "zombie", "quarantined"] = "ordered"
    deadline: float = NEVER
    """Time at which it is cancelled; of a cancelled one, given up; of a zombie, quarantined."""
    progress_at: float = NEVER
    """Time of its last progress; never: it was not sent, or it has stalled."""
    num_verified: int = 0
    """Blocks, by its last report."""
    is_overdue: bool = False
    """True if it has not answered a cancel in time."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens to be loaded."""
        return sum(len(key.token_ids) for key in self.order.keys)


class BlockLoader:
    """Owns the loads of one engine, and the holds on their blocks. Knows nothing of queues."""

    def __init__(self, connector: KVConnectorScheduler, manager: KVCacheManager, cost: LoadCost) -> None:
        self._connector, self._manager, self.cost = connector, manager, cost
        self.active: dict[Request, Load] = {}
        """Loads that their request waits for."""
        self.sent: dict[int, Load] = {}
        """Loads that the worker has, by id; zombies among them."""
        self.cancels: list[int] = []
        """Ids to be sent."""
        self._by_digest: dict[bytes, Load] = {}
        """The active load of each block."""
        self.next_deadline = NEVER
        """Time at which `check_deadlines` has something to do."""
        self.starts = JointStart(self)

    # -- the beginning -----------------------------------------------------------------------------------------

    def find(self, request: Request, index: int) -> Load | None:
        """Returns the active load of a request's block."""
        return self._by_digest.get(stored_hashes(request, self._manager.block_size)[index])

    def choose(
        self, request: Request, start: int, matches: Sequence[ExternalMatch], now: float
    ) -> ExternalMatch | None:
        """Returns the match whose request can begin first, of those that may be loaded; None: computing is better.
        `start`: tokens before what was matched."""
        overdue = {load.order.source for load in self.sent.values() if load.is_overdue}
        rated: list[tuple[float, int, ExternalMatch]] = []
        for match in matches:
            source, num_tokens = match.source, match.num_tokens
            num_queued = sum(load.num_tokens for load in self.active.values() if load.order.source == source)
            if source not in overdue and self.cost.should_load(source, start, num_tokens, num_queued, now):
                seconds = self.cost.predict_total(source, start, num_tokens, num_queued, request.num_tokens)
                rated.append((seconds, -num_tokens, match))
        return min(rated, key=lambda one: one[:2])[2] if rated else None

    def begin(
        self,
        request: Request,
        hits: KVCacheBlocks,
        match: ExternalMatch,
        *,
        fence: int,
        reserved_blocks: int,
        now: float,
    ) -> Load | None:
        """Orders a load. Returns None if there is no room for its request beside `reserved_blocks` and the requests of
        other loads."""
        size, first = self._manager.block_size, len(hits.blocks[0])
        num_blocks = match.num_tokens // size
        hashes, adapter = stored_hashes(request, size), request.report.adapter_digest
        keys = [
            BlockKey(
                hashes[index],
                hashes[index - 1] if index else None,
                tuple(request.all_token_ids[index * size : (index + 1) * size]),
                stored_extra_keys(block_extra_keys(request, index, size), adapter),
            )
            for index in range(first, first + num_blocks)
        ]
        order = LoadOrder(0, match.source, first, keys, [], match.params)
        reserved_blocks += sum(load.blocks.num_to_come for load in self.active.values())
        blocks = self._manager.allocate_loading(id(order), request, hits, num_blocks, reserved_blocks)
        if blocks is None:
            return None
        order.block_ids = [[block.block_id for block in table] for table in blocks.tables]
        load = self.active[request] = Load(request, order, blocks, fence, now)
        self._by_digest.update((key.digest, load) for key in keys)
        whole = tuple([hit + table for hit, table in zip(hits.blocks, blocks.tables, strict=True)])
        self._connector.update_state_after_alloc(request, order, whole)
        return load

    def can_send(self, num_received: int) -> bool:
        """Returns whether `send` would return anything."""
        return any(load.stage == "ordered" and load.fence <= num_received for load in self.active.values())

    def send(self, ids: Iterable[int], num_received: int, now: float) -> list[LoadOrder]:
        """Returns the orders to send, with ids from `ids`: the results of `num_received` steps are in."""
        ready = [load for load in self.active.values() if load.stage == "ordered" and load.fence <= num_received]
        num_queued: dict[str, int] = {}
        for earlier in self.active.values():
            if earlier.stage == "sent":
                num_queued[earlier.order.source] = num_queued.get(earlier.order.source, 0) + earlier.num_tokens
        for load, load_id in zip(ready, ids, strict=False):
            source = load.order.source
            load.order.load_id, load.stage, load.progress_at = load_id, "sent", now
            load.deadline = now + self.cost.latest_end(source, load.num_tokens, num_queued.get(source, 0))
            num_queued[source] = num_queued.get(source, 0) + load.num_tokens
            self.sent[load_id] = load
        if ready:
            self.set_alarm()
        return [load.order for load in ready]

    # -- the end -----------------------------------------------------------------------------------------------

    def note_progress(self, load_id: int, num_verified: int, now: float) -> None:
        """Notes that a load goes on."""
        load = self.sent.get(load_id)
        if load is not None and num_verified > load.num_verified:
            load.num_verified = num_verified
            self._note_life(load.order.source, now)

    def _note_life(self, source: str, now: float) -> None:
        """Notes that a source makes progress, with whichever load."""
        for load in self.sent.values():
            if load.order.source == source and load.progress_at != NEVER:
                load.progress_at = now
        self.set_alarm()

    def end(self, result: LoadResult, now: float) -> tuple[Load, int] | None:
        """Takes in the end of a load. Returns it, and the number of its blocks that can be hit now; None: nothing has
        waited for it, or it has ended before."""
        load = self.sent.pop(result.load_id, None)
        if load is None:
            return None
        source = load.order.source
        self.cost.note_load(source, result.num_bytes, result.seconds, now)
        if result.outcome == "ok":
            # it may have begun before the last stall, so a rest that has begun goes on
            self.cost.rests.note_good(source, ends_rest=False)
        self._count_records(result)
        self._connector.on_load_finished(load.order, result)
        self._note_life(source, now)
        if load.stage not in ("sent", "cancelled"):
            self._manager.held.release(id(load.order))
            return None
        self._deactivate(load)
        load.stage = "ended"
        num_accepted = self._count_acceptable(load, result.num_verified)
        self._manager.accept_loaded(id(load.order), load.request, load.blocks, num_accepted)
        if not num_accepted:
            self.release(load)
        return load, num_accepted

    def _count_records(self, result: LoadResult) -> None:
        """Counts the records that a load has read: each was accepted or rejected."""
        stats = self._manager.held.stats
        stats.num_read_records += result.num_records
        stats.num_accepted_records += result.num_accepted
        for reason, number in result.num_rejected.items():
            add_count(stats.num_rejected_records, reason, number)

    def _count_acceptable(self, load: Load, num_verified: int) -> int:
        """Returns how many of the verified blocks are still the request's: its adapter may have changed meanwhile."""
        order, hashes = load.order, stored_hashes(load.request, self._manager.block_size)
        num_same = 0
        for key, digest in zip(order.keys[:num_verified], hashes[order.start :], strict=False):
            if key.digest != digest:
                break
            num_same += 1
        return num_same

    def release(self, load: Load) -> bool:
        """Frees the blocks that a load has brought; they can be hit as long as they are not given to others. Returns
        whether it held any. Those of a load that was given up are not free before it ends."""
        return load.stage == "ended" and self._manager.held.release(id(load.order))

    def _deactivate(self, load: Load) -> None:
        del self.active[load.request]
        for key in load.order.keys:
            if self._by_digest.get(key.digest) is load:
                del self._by_digest[key.digest]

    def abandon(self, load: Load, now: float) -> None:
        """Gives an active load up: its request waits for it no longer."""
        self._deactivate(load)
        if load.stage == "ordered":
            self._manager.held.release(id(load.order))
            self._connector.on_load_finished(load.order, LoadResult(0, 0, "cancelled"))
            return
        if load.stage == "sent":
            self.cancels.append(load.order.load_id)
        load.stage, load.deadline = "zombie", now + QUARANTINE_S
        self._manager.held.change(id(load.order), "zombie")
        self.set_alarm()

    # -- time --------------------------------------------------------------------------------------------------

    def predict_rest(self, loads: Iterable[Load]) -> float | None:
        """Returns the seconds until `loads` have ended; None: one is not a quick one."""
        rest: dict[str, float] = {}
        for load in loads:
            source, num_left = load.order.source, load.num_tokens - load.num_verified * self._manager.block_size
            seconds = self.cost.predict_load(source, num_left)
            if seconds is None or seconds > QUICK_S:
                return None
            rest[source] = rest.get(source, 0.0) + seconds
        return max(rest.values(), default=0.0)

    def check_deadlines(self, now: float) -> list[Load]:
        """Cancels loads that are late or have stalled, and gives up those that do not end then. Returns the latter.
        Lets requests start that have waited long enough for the loads of others."""
        given_up: list[Load] = []
        if now >= self.starts.deadline:
            self.starts.release()
        for load in list(self.sent.values()):
            has_stalled = now >= load.progress_at + self.cost.stall_s
            if has_stalled:
                self.cost.rests.note_fault(load.order.source, now)  # several that stall together are one stall
                load.progress_at = NEVER
            if load.stage == "sent" and (has_stalled or now >= load.deadline):
                self.cancels.append(load.order.load_id)
                load.stage, load.deadline = "cancelled", now + CANCEL_S
            elif now >= load.deadline:
                if load.stage == "cancelled":
                    load.is_overdue = True
                    self.abandon(load, now)
                    given_up.append(load)
                elif load.stage == "zombie":
                    self.quarantine(load)
        self.set_alarm()
        return given_up

    def quarantine(self, load: Load) -> None:
        """Waits no longer for the blocks of a zombie."""
        load.stage, load.deadline = "quarantined", NEVER
        self._manager.held.change(id(load.order), "quarantined")

    @property
    def num_expected(self) -> int:
        """Number of loads whose blocks will come back: all but quarantined ones."""
        num_unsent = sum(load.stage == "ordered" for load in self.active.values())
        return num_unsent + sum(load.stage != "quarantined" for load in self.sent.values())

    def set_alarm(self) -> None:
        """Sets `next_deadline` anew: a deadline has changed."""
        times = [min(load.deadline, load.progress_at + self.cost.stall_s) for load in self.sent.values()]
        self.next_deadline = min([self.starts.deadline, *times])


class JointStart:
    """Lets requests whose loads follow one another start in one step, where nothing runs.

    A step takes the processors that the next loads need, and requests whose loads end meanwhile wait for its end. So a
    request that has loaded waits for the loads that were under way when the first of them ended: until they have, until
    another request starts, or for as long as was predicted for the others when the last of them ended, JOINT_S in all.
    Loads that begin later are not waited for.
    """

    def __init__(self, loader: BlockLoader) -> None:
        self._loader = loader
        self._running: set[Request] = set()
        self._held: set[Request] = set()
        self._awaited: set[Load] = set()
        """Loads that those which are held wait for."""
        self.deadline = NEVER
        """Time at which they wait no longer."""
        self._latest = NEVER
        """Latest time that it may be set to."""

    def is_held(self, request: Request) -> bool:
        """Returns whether a request is to wait for loads of others."""
        return request in self._held

    def note_end(self, load: Load, now: float, *, may_hold: bool) -> None:
        """Notes the end of a load. Its request waits for those of others if `may_hold`, and if that pays."""
        self._awaited.discard(load)
        if may_hold and not self._running and (self._held or self._begin(now)):
            self._held.add(load.request)
        if not self._awaited:
            self.release()
        elif (rest := self._loader.predict_rest(self._awaited)) is not None:
            self._set_deadline(min(self._latest, now + rest))

    def _begin(self, now: float) -> bool:
        """Decides for the first request of several."""
        active = self._loader.active.values()
        rest = self._loader.predict_rest(active)
        if not active or rest is None or rest > JOINT_S:
            return False
        self._awaited, self._latest = set(active), now + JOINT_S
        return True

    def release(self) -> None:
        """Lets all start that are held."""
        self._held.clear()
        self._awaited.clear()
        self._set_deadline(NEVER)

    def _set_deadline(self, deadline: float) -> None:
        if deadline != self.deadline:
            self.deadline = deadline
            self._loader.set_alarm()

    def note_started(self, request: Request) -> None:
        """Notes that a request runs: from now on there are steps beside loads."""
        self._running.add(request)
        self.release()

    def note_left(self, request: Request) -> None:
        """Notes that a request was preempted or has ended."""
        self._running.discard(request)
        self._held.discard(request)
