"""The store outside the engine. It outlives engines, loses and mixes up what it holds, and its transfers end at any
time."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from quire.engine.request import RequestStatus
from quire.engine.sched.exchange import KVExchange
from quire.testing.fake_tier import FakeTier, FakeTierWorker, Manner
from quire.wire.engine_core import EngineCoreOutput
from quire.wire.kv_transfer import KVConnectorOutput
from quire.wire.stats import KVTransferStats, PrefillStats

if TYPE_CHECKING:
    from tests.simulation.harness import Simulation

MANNERS: tuple[tuple[Manner, ...], ...] = (
    ("good",),
    ("good",),
    ("good", "twice", "away"),
    (*["good"] * 9, "hung"),
    (*["good"] * 9, "twice", "hung", "wedged"),
    ("wedged", "good"),
)


class TierClock:
    """Seconds of the exchange."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Tier:
    """The store of a simulation, and the transfers of its present engine. Without one all methods do nothing."""

    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation
        self.is_used = simulation.world.has_tier
        self.store = FakeTier("simulation")
        self.store.lease_interval = (simulation.world.tier_seed or 0) % 3
        self.store.most_at_once = (1 << 30, 3, 1)[(simulation.world.tier_seed or 0) // 6 % 3]
        self.store.has_peer = (simulation.world.tier_seed or 0) % 2 == 1
        self.clock = TierClock()
        self._rng = random.Random(simulation.world.tier_seed)
        self._speed = self._rng.choice((1, 4, 20))
        self._manners = self._rng.choice(MANNERS)
        self._all_manners = set(self._manners)
        self._totals = Counter[str]()
        self._verified: dict[str, int] = {}
        """Most tokens that loads have brought for a request, by its id."""

    def begin_engine(self) -> None:
        """A new engine uses the store."""
        if not self.is_used:
            return
        exchange = self.sim.core.scheduler.exchange
        exchange = getattr(exchange, "watched", exchange)  # that of a recorded engine
        assert isinstance(exchange, KVExchange)
        self.exchange = exchange
        exchange.clock = self.clock
        exchange.link.wait = self._wait  # type: ignore[method-assign]
        exchange.link.set_alarm = lambda seconds: None  # type: ignore[method-assign]
        worker = self.sim.executor.transfers
        assert isinstance(worker, FakeTierWorker)
        self.worker = worker
        worker.rng, worker.manners, worker.num_at_once = self._rng, list(self._manners), self._speed
        worker.report = self._report
        self._verified.clear()
        self._totals.clear()

    def _report(self, report: KVConnectorOutput) -> None:
        for result in report.loads:
            load = self.exchange.loader.sent.get(result.load_id)
            if load is not None:
                request_id, num_tokens = (
                    load.request.request_id,
                    result.num_verified * self.exchange.connector.block_size,
                )
                before = self._verified.get(request_id, 0)
                self._verified[request_id] = before + num_tokens if self.store.has_peer else max(num_tokens, before)
        self.exchange.link.put(report)

    def _wait(self, seconds: float) -> None:
        """The engine waits for reports: time passes."""
        self.clock.now += min(seconds, 0.01 + 0.2 * self._rng.random())
        self._advance(self._rng.randint(0, 4 * self._speed))

    def _advance(self, num_moves: int) -> None:
        for _ in range(num_moves):
            if not self.worker.advance():
                return

    @property
    def num_under_way(self) -> int:
        """Transfers that have not ended."""
        return len(self.worker.active) if self.is_used else 0

    def pass_time(self) -> None:
        """A moment passes."""
        if self.is_used:
            self.clock.now += self._rng.choice((0.001, 0.001, 0.01, 0.1))
            self._advance(self._rng.randint(0, self._speed))

    # -- operations --------------------------------------------------------------------------------------------

    def complete(self, number: int) -> None:
        """Transfers end, as far as they do, or more time passes."""
        self._advance(1000 if number % 3 else 3)
        if number % 5 == 0 and not self.exchange.has_news:  # what is asked to end in time can do so
            self._advance(1000)
            self.clock.now += random.Random(number).choice((0.1, 1.0, 3.0, 10.0))
        if number % 7 == 0:
            self.worker.free()

    def fault(self, number: int) -> None:
        """Something happens to the store."""
        rng = random.Random(number)
        match number % 5:
            case 0 if number % 2:
                self.store.takes_saves = not self.store.takes_saves
            case 0:
                self.store.asks_again = not self.store.asks_again
            case 1:
                self._manners = rng.choice(MANNERS)
                self.worker.manners = list(self._manners)
                self._all_manners.update(self._manners)
            case _:
                for _ in range(rng.choice((1, 1, 5, 20))):
                    self.sim.seen[f"tier: {self.store.do_harm(rng)}"] += 1

    def kill(self) -> None:
        """The engine dies without a word."""
        if self.is_used:
            self.worker.kill()

    def settle(self) -> None:
        """The end of all transfers."""
        if not self.is_used:
            return
        self.store.asks_again, self.store.takes_saves, self.store.most_at_once = False, True, 1 << 30
        self.worker.manners = ["good"]
        self.worker.free()
        self.exchange.link.put(KVConnectorOutput())  # as when the store becomes able to take blocks
        saver = self.exchange.saver
        for _ in range(10_000):  # saves of the last step are ordered with the next, postponed ones as others end
            self._advance(10_000)
            if not self.sim.core.has_work():
                break
            self.sim._step(0)
        waiting = saver.count_waiting()
        assert not any(waiting.values()), f"nothing runs, and {waiting} blocks are to be saved"
        held = self.exchange._manager.held.count()
        assert not held, f"nothing runs, and {held} blocks are held"
        assert not self.worker.active

    def takes_failure(self, output: EngineCoreOutput) -> bool:
        """Returns whether a request may have failed because a transfer does not give its blocks back."""
        has_failed = self.is_used and "do not fit" in (output.error_message or "")
        if has_failed:
            assert "wedged" in self._all_manners, "all blocks of transfers come back, and a request has not waited"
            self.sim.seen["failed for blocks in quarantine"] += 1
        return has_failed

    # -- checks ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that what waits for loads is what is being loaded."""
        if not self.is_used:
            return
        scheduler, loader = self.sim.core.scheduler, self.exchange.loader
        loading = {r for r in scheduler.requests.values() if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS}
        assert loading == set(loader.active), f"{loading} wait for loads, {set(loader.active)} are being loaded"
        known = set(scheduler.requests.values())
        for name, requests in (("_waits", self.exchange._waits), ("_loaded", self.exchange._loaded)):
            assert set(requests) <= known, f"{name} has requests that have ended"
        starts = loader.starts
        assert starts._held <= known, "requests that have ended wait for others' loads"
        assert starts._running == set(scheduler.running), f"{starts._running} are said to run"
        assert starts._awaited <= set(loader.active.values()), "loads that have ended are waited for"
        if starts._held:
            self.sim.seen["waited for others' loads"] += 1
            assert starts._awaited, "nothing is waited for"
            assert not scheduler.running, "requests wait for others' loads beside steps"
        held = {block.block_id for block in self.exchange._manager.held.references()}
        for transfer in self.worker.active.values():
            if transfer.memory is self.worker._memory:
                assert set(transfer.block_ids) <= held, f"transfer {transfer.id} has blocks that are not held"
        for request in loading:
            assert not request.skip_reading_prefix_cache, f"{request} is to compute all its tokens"
            assert request in scheduler.waiting.ready or request in scheduler.waiting.blocked, f"{request} is nowhere"

    def heard_prefill(self, request_id: str, stats: PrefillStats) -> None:
        """Checks that a request has no more external tokens than were loaded for it."""
        if self.is_used:
            num_verified = self._verified.get(request_id, 0)
            assert 0 <= stats.num_external_cached_tokens <= num_verified, f"{stats}, and {num_verified} were loaded"
            assert min(stats.num_local_cached_tokens, stats.num_computed_tokens) >= 0, f"{stats}"

    def heard(self, stats: KVTransferStats | None) -> None:
        """Checks that loads add up."""
        if stats is None:
            return
        total, seen = self._totals, self.sim.seen
        total["begun"] += stats.num_loads_begun
        total["ended"] += sum(stats.num_loads.values())
        for outcome, number in stats.num_loads.items():
            seen[f"loads: {outcome}"] += number
        seen["external tokens"] += stats.prefix_cache_stats.hits
        seen["saved blocks"] += stats.num_saved_blocks
        for state, number in stats.num_held_blocks.items():
            seen[f"held: {state}"] += bool(number)
        prefix = stats.prefix_cache_stats
        assert prefix.hits <= prefix.queries, f"{prefix}"
        assert total["begun"] == total["ended"] + stats.num_loads_in_flight, f"{total}, {stats}"
        num_rejected = sum(stats.num_rejected_records.values())
        assert stats.num_read_records == stats.num_accepted_records + num_rejected, f"{stats}"
        seen["records accepted"] += stats.num_accepted_records
        seen["records rejected"] += num_rejected
        total["to be saved"] += stats.num_saves_begun - stats.num_saved_blocks - sum(stats.num_dropped_blocks.values())
        assert total["to be saved"] == sum(stats.num_waiting_saves.values()), f"{total}, {stats}"
        for name, number in [*stats.num_waiting_saves.items(), *stats.num_dropped_blocks.items()]:
            seen[f"saves: {name}"] += number
