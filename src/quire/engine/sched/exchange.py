"""The scheduler's one collaborator for stores outside the engine, and a null object where there is none.

A load is a wait at a gate. Its request is in `blocked` and holds no table; the blocks that are being written are held
outside of all tables. What was verified is registered as if it had been computed, and kept until the request is
admitted, whose ordinary look-up then finds it. So a load that fails, in any way, leaves an ordinary waiting request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count

from quire.config.engine import EngineConfig
from quire.engine.executor.abstract import Executor
from quire.engine.kv_cache.block import KVCacheBlocks
from quire.engine.kv_cache.connector import RESET_S, KVConnectorScheduler
from quire.engine.kv_cache.held import add_count
from quire.engine.kv_cache.leases import BlockLeases
from quire.engine.kv_cache.load_cost import NEVER, LoadCost, count_pairs
from quire.engine.kv_cache.loader import BlockLoader, Load
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.kv_cache.saver import BlockSaver
from quire.engine.kv_cache.sizing import KVCacheSizes
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.interface import AdmissionGate, MakeExchange, NoExchange, SchedulerInterface, SchedulerObserver
from quire.engine.transfers import TransferLink
from quire.errors import ConfigError, QuireError
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.execution import SchedulerOutput
from quire.wire.kv_transfer import KVConnectorMetadata
from quire.wire.stats import KVTransferStats, SchedulerStats

logger = init_logger(__name__)

LET_GO_S = 1.0
"""Seconds that a reset waits for transfers to end."""
_TIERS = {"p2p": "peer"}
"""Names of tiers in Quire's metric, of the sources that are called otherwise."""
_LABELS = {"remote": "p2p"}
"""Labels in vLLM's metric, of the sources that it has no label for."""
PREFILL_TOKENS = 32
"""Steps of so many tokens, and of so many per request, show what computing prompts costs."""


def check_connector(config: EngineConfig) -> None:
    """Raises ConfigError if a connector is configured that cannot work with the rest."""
    name, connector = config.kv_transfer_config.kv_connector, config.kv_transfer_config.connector
    if connector is None:
        return
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(f"kv_connector {name!r} needs the prefix cache; drop --no-enable-prefix-caching")
    resolve(connector.scheduler).check_config(config)


def connect_stores(
    scheduler: SchedulerInterface,
    config: EngineConfig,
    sizes: KVCacheSizes,
    executor: Executor,
    observers: Sequence[SchedulerObserver],
    wake: Callable[[], None],
) -> NoExchange:
    """Gives a scheduler the exchange of the configured connector, if there is one, and returns it. Raises
    ConfigError."""
    if config.kv_transfer_config.connector is None:
        return NoExchange()
    make_exchange: MakeExchange = partial(KVExchange.from_config, config, sizes, TransferLink(executor, wake))
    for observer in observers:
        make_exchange = observer.watch_exchange(make_exchange)
    return scheduler.connect(make_exchange)


class _Steps:
    """Counts steps, and measures those that mainly compute prompts. Nearly all others are idle."""

    def __init__(self) -> None:
        self.num_sent = self.num_received = 0
        self.is_idle = False
        """True: the last step has left nothing to be done with the next one, and nothing has happened since. A request
        that comes, asks, lacks room or leaves, a save and a control call set it to False; reports are seen by
        themselves."""
        self.measured: deque[tuple[int, float]] = deque()
        """Numbers of the steps in flight that mainly compute prompts, and when they were sent."""
        self._last_at = 0.0

    def note_received(self, output: SchedulerOutput, cost: LoadCost, now: float) -> None:
        """Notes the end of a step that is measured, or was in flight with one that is."""
        number, sent_at = self.measured[0]
        began, self._last_at = max(sent_at, self._last_at), now
        if number > self.num_received:
            return
        self.measured.popleft()
        cached, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update((data.req_id, data.num_computed_tokens) for data in output.scheduled_new_reqs)
        num_pairs = sum(count_pairs(starts[req_id], num_tokens) for req_id, num_tokens in counts.items())
        cost.compute.add(output.total_num_scheduled_tokens, num_pairs, now - began)

    @property
    def fence(self) -> int:
        """Returns how many results must be in before blocks may be written that are free now. Beside steps in flight,
        the one that is being scheduled counts, too: it ends requests in the worker, and may be lost with them."""
        return self.num_sent + (self.num_received < self.num_sent)

    def abandon(self) -> None:
        self.num_received = self.num_sent
        self.measured.clear()


class KVExchange(NoExchange, AdmissionGate):
    """Lets requests load what a connector has of them, and saves what they compute. Belongs to the core's loop."""

    def __init__(
        self,
        connector: KVConnectorScheduler,
        manager: KVCacheManager,
        link: TransferLink,
        *,
        cost: LoadCost,
        max_pinned_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gates = (self,)
        self.connector, self.link, self.clock = connector, link, clock
        link.clock = lambda: self.clock()
        self.loader = BlockLoader(connector, manager, cost)
        self.saver = BlockSaver(connector, manager, max_pinned_blocks)
        self.leases = BlockLeases(manager)
        self.loader.cancels = self.leases.cancels = self.saver.cancels  # one list for all
        connector.bind_kv_cache_manager(manager)
        self._manager, self._held = manager, manager.held
        self._loaded: dict[Request, list[tuple[Load, int]]] = {}
        """Loads that have ended, and how many tokens they have brought, of requests that were not admitted since. These
        do not load again, unless another source may have what the last one has not brought."""
        self._waits: dict[Request, Load | None] = {}
        """Requests that are blocked here, and the load that they wait for; None: for any transfer to end."""
        self._deferred: list[Request] = []
        """Requests that the connector is to be asked about again."""
        self._declined: tuple[Request, int] | None = None
        """The last request that does not load, and its hits."""
        self._steps = _Steps()
        self._ids = count(1)
        self._num_stored: tuple[int, int] | None = None
        """Numbers of what was stored at the last statistics."""

    @classmethod
    def from_config(
        cls, config: EngineConfig, sizes: KVCacheSizes, link: TransferLink, manager: KVCacheManager
    ) -> KVExchange:
        """Returns the exchange of the configured connector."""
        transfer = config.kv_transfer_config
        assert transfer.connector is not None
        connector: KVConnectorScheduler = resolve(transfer.connector.scheduler)(config, sizes.config)
        per_token = sizes.block_bytes / manager.block_size
        cost = LoadCost(per_token, transfer.min_load_tokens, transfer.load_bias, transfer.load_timeout_s)
        max_pinned = max(1, int(transfer.max_pinned_share * sizes.config.num_blocks))
        return cls(connector, manager, link, cost=cost, max_pinned_blocks=max_pinned)

    # -- the gate ----------------------------------------------------------------------------------------------

    def is_ready(self, request: Request) -> bool:
        return request not in self._waits and not self.loader.starts.is_held(request)

    def get_error(self, request: Request) -> QuireError | None:
        return self.connector.get_error(request)

    def note_left(self, request: Request) -> None:
        self._steps.is_idle = False
        self._waits.pop(request, None)
        self.loader.starts.note_left(request)
        self._release(request)
        load = self.loader.active.get(request)
        if load is not None:
            self._abandon(load, "cancelled")
        if request.is_finished:
            if self.connector.audits is not None:
                self.connector.audits.end(request)
            self._lease(request)
            self.connector.request_finished(request)

    def _lease(self, request: Request) -> None:
        """Holds the blocks of an ended request for another engine, if they are asked for. They are free, and none was
        given to others since."""
        lease = self.connector.name_lease(request) if request.lora_request is None else None
        if lease is not None:
            num_tokens = self.leases.grant(request, lease, self.saver.find_filled())
            request.report.transfer_params = self.connector.make_transfer_params(request, lease, num_tokens)

    def add_stats(self, stats: SchedulerStats) -> None:
        held, stored, remote_saves = self._held, self.connector.count_stored(), self.connector.remote_saves
        if (
            stored is self._num_stored
            and not held.has_changed
            and (remote_saves is None or not remote_saves.has_changed)
        ):
            return  # nearly all steps
        new, held.stats, held.has_changed = held.stats, KVTransferStats(), False
        self._num_stored = stored
        new.num_stored_blocks, new.num_stored_bytes = stored
        new.num_loads_in_flight = len(self.loader.active)
        new.num_waiting_saves = self.saver.count_waiting()
        new.num_held_blocks = {str(state): number for state, number in held.count().items()}
        if remote_saves is not None:
            remote_saves.move_to(new)
        stats.kv_transfer = new

    def on_new_request(self, request: Request) -> None:
        self._steps.is_idle = False
        self.connector.on_new_request(request)
        self._send_message()

    def _send_message(self) -> None:
        params = self.connector.take_message()
        if params:
            self.link.send(KVConnectorMetadata(params=params))

    # -- rounds of admissions ----------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        saver, leases = self.saver, self.leases
        return (
            self.link.has_reports
            or bool(saver.cancels or saver.unsent or leases.unsent or self._deferred)
            or self.loader.can_send(self._steps.num_received)
            or self.clock() >= self._next_deadline
        )

    @property
    def _next_deadline(self) -> float:
        return min(self.loader.next_deadline, self.saver.next_deadline, self.connector.next_step_at)

    def begin_round(self) -> None:
        if self._steps.is_idle and not self.link.reports:
            return  # nearly always
        self._steps.is_idle = False  # on_sent sets it again
        loader, saver = self.loader, self.saver
        is_room_awaited = bool(self._waits) and None in self._waits.values()
        self._take_reports()
        if self._deferred:
            for request in self._deferred:
                self._waits.pop(request, None)
            self._deferred.clear()
        now = self.clock()
        if now >= self._next_deadline:
            saver.give_up(now)
            for load in loader.check_deadlines(now):
                self._end(load, 0, "failed")
            self._unblock(None)  # blocks that will not come back are not to be waited for
        if saver.postponed and not is_room_awaited:  # a request that waits for it comes before blocks to be saved
            saver.offer_postponed(now)

    def _take_reports(self) -> None:
        for came_at, report in self.link.take():
            self.connector.update_connector_output(report)
            for load_id, num_verified in report.progress.items():
                self.loader.note_progress(load_id, num_verified, self.clock())
            for save in report.saves:
                self.saver.end(save, came_at)
                self.leases.end(save)
            for result in report.loads:
                ended = self.loader.end(result, self.clock())
                if ended is not None:
                    outcome = "ok" if ended[1] == len(ended[0].order.keys) else result.outcome
                    self._end(*ended, "failed" if outcome == "unknown" else outcome)
            self._unblock(None)

    def begins_load(
        self, request: Request, hits: KVCacheBlocks, num_hits: int, running: Sequence[Request], reserved_blocks: int
    ) -> bool:
        self._steps.is_idle = False
        if request.skip_reading_prefix_cache or not self.connector.may_transfer(request):
            return False
        if self._declined == (request, num_hits) or not self._may_load(request):
            return False
        size = self._manager.block_size
        first = num_hits // size
        if (first + 1) * size >= request.num_tokens:
            return False
        other = self.loader.find(request, first)
        if other is not None:
            self._waits[request] = other
            return True
        matches = self.connector.find_matches(request, num_hits)
        if matches is None:
            self._waits[request] = None
            self._send_message()
            if self.connector.asks_again:
                self._deferred.append(request)
            return True
        now, match = self.clock(), None
        if matches:
            used = {load.order.source for load, _ in self._loaded.get(request, ())}
            able = [found for found in matches if found.source not in used]
            match = self.loader.choose(request, num_hits, able, now)
        audits = self.connector.audits
        if match is None or (audits is not None and audits.begins(request, match, first, match.num_tokens // size)):
            self._declined = request, num_hits
            return False
        reserved_blocks += self._manager.count_blocks_to_come(running)
        fence = self._steps.fence
        load = self.loader.begin(request, hits, match, fence=fence, reserved_blocks=reserved_blocks, now=now)
        if load is None:
            return False
        self._waits[request] = load
        self._held.stats.num_loads_begun += 1
        self._held.observer.on_match(request, load.order.source, match.num_tokens)
        request.await_load()
        return True

    def _may_load(self, request: Request) -> bool:
        """Returns whether a request has not loaded yet, or may load what another source has, and is not audited."""
        if self.connector.audits is not None and self.connector.audits.find(request) is not None:
            return False
        loaded = self._loaded.get(request)
        if not loaded:
            return True
        last, num_tokens = loaded[-1]
        return self.connector.has_several_sources and num_tokens < last.num_tokens

    def _release(self, request: Request) -> None:
        """Gives back what the loads of a request have brought: it was admitted, or has left."""
        for load, _ in self._loaded.pop(request, ()):
            self.loader.release(load)

    def _abandon(self, load: Load, outcome: str) -> None:
        self.loader.abandon(load, self.clock())
        self._end(load, 0, outcome)

    def _end(self, load: Load, num_blocks: int, outcome: str) -> None:
        """Nothing waits for a load any more: it has ended, or was given up."""
        request = load.request
        source = load.order.source.partition(":")[0]
        tier = _TIERS.get(source, source)
        self._held.has_changed = True
        add_count(self._held.stats.num_loads, outcome)
        add_count(self._held.stats.num_tier_loads.setdefault(tier, {}), outcome)
        if not request.is_finished:
            num_tokens = num_blocks * self._manager.block_size
            self._loaded.setdefault(request, []).append((load, num_tokens))
            if num_blocks:
                add_count(request.report.external_by_source, _LABELS.get(source, source), num_tokens)
        self._held.observer.on_loaded(request, num_blocks * self._manager.block_size, outcome)
        if num_blocks:
            now = self.clock()
            self._held.stats.load_seconds.append(now - load.began)
            request.report.load_span = load.began, now
        request.end_load()
        self.loader.starts.note_end(load, self.clock(), may_hold=outcome == "ok" and not request.is_finished)
        self._unblock(load)

    def _unblock(self, load: Load | None) -> None:
        """Unblocks what waits for a load, or for any transfer."""
        if self._waits:
            self._waits = {request: other for request, other in self._waits.items() if other not in (load, None)}

    # -- room --------------------------------------------------------------------------------------------------

    def make_room(self, request: Request) -> bool:
        self._steps.is_idle = False
        if self.saver.drop_unsent():
            return True
        self.saver.cancel_sent(self.clock())
        if request.status is RequestStatus.RUNNING and self.leases.break_oldest():
            return True  # requests that wait can wait for leases to end
        newest_first = [other for other in reversed(self._loaded) if other is not request]
        loads = [load for other in [*newest_first, request] for load, _ in reversed(self._loaded.get(other, ()))]
        return any(self.loader.release(load) for load in loads)

    def await_room(self, request: Request) -> bool:
        loader, saver, leases = self.loader, self.saver, self.leases
        if leases.break_oldest():
            self._deferred.append(request)
        elif not (loader.num_expected or saver.num_expected or leases.num_expected or self.connector.holds_blocks):
            return False
        self._waits[request] = None
        return True

    # -- admissions --------------------------------------------------------------------------------------------

    def count_external(self, request: Request, num_hits: int) -> int:
        loaded = self._loaded.get(request)
        if loaded is None:
            return 0
        size, blocks = self._manager.block_size, set[int]()
        for load, num_tokens in loaded:  # a later one may bring again what was evicted since
            blocks.update(range(load.order.start, load.order.start + num_tokens // size))
        return size * sum(block < num_hits // size for block in blocks)

    def note_started(self, request: Request, num_hits: int, num_external: int) -> None:
        self._release(request)
        self.loader.starts.note_started(request)
        self.connector.request_started(request, self._manager.get_tables(request.request_id))
        if not request.skip_reading_prefix_cache and self.connector.may_transfer(request):
            num_queried = request.num_tokens - num_hits + num_external
            self._held.stats.prefix_cache_stats.record(num_queried, num_external, preempted=request.num_preemptions > 0)
            self._held.has_changed = True

    # -- steps -------------------------------------------------------------------------------------------------

    def on_sent(self, output: SchedulerOutput) -> None:
        steps = self._steps
        steps.num_sent += 1
        if output.total_num_scheduled_tokens >= PREFILL_TOKENS * len(output.num_scheduled_tokens) > 0:
            steps.measured.append((steps.num_sent, self.clock()))
        if self.saver.noted is not None:
            self.saver.note_scheduled(steps.num_sent)
        if not steps.is_idle:
            self._send(output)

    def _send(self, output: SchedulerOutput) -> None:
        now, loader, saver, leases = self.clock(), self.loader, self.saver, self.leases
        loads = loader.send(self._ids, self._steps.num_received, now) if loader.active else None
        params = self.connector.build_connector_meta(output)
        if loads or params or saver.unsent or leases.unsent or saver.cancels:
            saves = saver.send(self._ids) + leases.send(self._ids)
            output.kv_connector_metadata = KVConnectorMetadata(loads or [], saves, self._take_cancels(), params)
        deadline = loader.next_deadline
        if saver.next_deadline is not NEVER or self.connector.next_step_at is not NEVER:
            deadline = self._next_deadline
        if self.link.alarm_at != deadline:
            self.link.alarm_at = deadline
            self.link.set_alarm(deadline - now)
        may_rest = deadline == NEVER and not self.connector.sees_all_steps
        self._steps.is_idle = may_rest and not (loader.active or self._deferred or saver.postponed)

    def _take_cancels(self) -> list[int]:
        cancels = self.saver.cancels.copy()
        self.saver.cancels.clear()
        return cancels

    def on_received(self, output: SchedulerOutput) -> None:
        steps = self._steps
        steps.num_received += 1
        if steps.measured:
            steps.note_received(output, self.loader.cost, self.clock())
        if self.saver.steps:
            self.saver.note_computed(steps.num_received, self.clock())
            steps.is_idle = False

    def on_abandoned(self) -> None:
        self._steps.abandon()
        self.saver.forget_steps()

    # -- the rest ----------------------------------------------------------------------------------------------

    def let_go(self, *, loads_too: bool) -> bool:
        self._steps.is_idle = False
        loader, saver = self.loader, self.saver
        if loader.active and not loads_too:
            return False
        for load in list(loader.active.values()):
            self._abandon(load, "cancelled")
        for request in list(self._loaded):
            self._release(request)  # all of them may load once more
        saver.drop_unsent()
        saver.forget_postponed()
        self.leases.break_all()
        self._send_cancels()
        self._await(lambda: not saver.num_expected, LET_GO_S / 2)
        saver.cancel_sent(self.clock())
        self._send_cancels()
        self._await(lambda: not (loader.num_expected or saver.num_expected or self.leases.num_expected), LET_GO_S)
        self.leases.give_up()
        self._unblock(None)  # blocks that will not come back are not to be waited for
        self._declined = None
        return True

    def _send_cancels(self) -> None:
        """Sends cancels where no step may come."""
        cancels = self._take_cancels()
        if cancels:
            self.link.send(KVConnectorMetadata(cancels=cancels))

    def _await(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Takes reports in until `is_done`, at most for some time."""
        deadline = self.clock() + seconds
        self._take_reports()
        while not is_done() and (left := deadline - self.clock()) > 0:
            self.link.wait(left)
            self._take_reports()

    def set_weights(self, path: str) -> None:
        self._steps.is_idle = False
        self.connector.set_weights(path)

    def reset_store(self, *, can_wait: bool) -> bool | Future[bool]:
        self._steps.is_idle, self._declined = False, None
        end = self.connector.reset_cache()
        self._send_message()
        if can_wait or isinstance(end, bool):
            return end
        self._await(end.done, RESET_S)
        return end.done() and end.result()

    def shutdown(self) -> None:
        self.saver.drop_unsent()
        self._await(lambda: not self.saver.num_expected, LET_GO_S)
        self.connector.shutdown()
        self.link.close()
