"""The conditions that hold after every operation, whatever happened before.

Read it as the list of Quire's promises inside one engine: nothing lost, budgets kept, blocks conserved, order kept,
numbers that add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import TYPE_CHECKING

from quire.engine.kv_cache.changes import BlockChanges, describe_cached_blocks
from quire.engine.kv_events import EventEncoder
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.interface import PauseState
from quire.wire.engine_core import EngineCoreOutput
from quire.wire.execution import SchedulerOutput
from quire.wire.kv_cache import SlidingWindowSpec
from quire.wire.stats import SchedulerStats, SpecDecodingStats
from tests.simulation.cache_model import (
    CacheModel,
    check_order_of_freed_blocks,
    check_order_of_new_blocks,
    free_queue,
)
from tests.simulation.subscriber import Subscriber

if TYPE_CHECKING:
    from tests.simulation.harness import Client, Simulation


ADMISSION_ORDERS: dict[str, Callable[[Request], tuple[float, ...]]] = {
    "fcfs": lambda request: (),
    "priority": lambda request: (request.priority, request.arrival_time),
}
"""Order of admission by policy, before the order of arrival."""


def merge(seen: list[SpecDecodingStats]) -> SpecDecodingStats:
    """Their sum."""
    total = SpecDecodingStats(seen[0].num_spec_tokens)
    positions = zip(*(stats.num_accepted_tokens_per_pos for stats in seen), strict=True)
    total.num_accepted_tokens_per_pos = [sum(counts) for counts in positions]
    for name in (
        *("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_rejected_tokens", "num_cut_tokens"),
        "num_proposed_tokens",
    ):
        setattr(total, name, sum(getattr(stats, name) for stats in seen))
    total.num_unused_tokens = dict(sum((Counter(stats.num_unused_tokens) for stats in seen), Counter()))
    return total


def describe(step: SchedulerOutput) -> str:
    """A step on one line: computed+scheduled tokens and new blocks of each request."""
    cached = step.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    parts = [f"{i}: {computed}+{step.num_scheduled_tokens[i]} {blocks or ''}" for i, computed, blocks in rows]
    parts += [
        f"new {data.req_id}: {data.num_computed_tokens}+{step.num_scheduled_tokens[data.req_id]} {data.block_ids}"
        for data in step.scheduled_new_reqs
    ]
    gone = f" finished {sorted(step.finished_req_ids)} preempted {sorted(step.preempted_req_ids)}"
    return f"step [{', '.join(parts)}]{gone}"


class Invariants:
    """Checks one engine from its start to its end."""

    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation
        self.scheduler = simulation.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.num_blocks = self.pool.num_gpu_blocks - 1
        self.limits = simulation.world.config.scheduler_config
        specs = simulation.executor.get_kv_cache_specs()[0].values()
        self.has_windows = any(isinstance(spec, SlidingWindowSpec) for spec in specs)
        self.cache_model: CacheModel | None = None
        if self.manager.enable_caching and not self.has_windows and not simulation.world.has_tier:
            self.cache_model = CacheModel(self.manager.block_size)
        self._arrivals: dict[str, int] = {}
        self._num_admissions = 0
        self._num_queries = 0
        self._free_before: list[int] = []
        self._now = 0
        self._waiting_before: set[str] = set()
        """Requests that had not run when the step began."""
        self._num_scheduled_tokens = 0
        self._drafts_seen: list[SpecDecodingStats] = []
        self.pool.changes = BlockChanges()
        self._events = EventEncoder([group.spec for group in self.manager.groups], uses_short_hashes=False)
        self._subscriber = Subscriber()

    # -- after every operation ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that every request is in one place and has the tokens its client has received, and that every block is
        accounted for."""
        self.manager.check_integrity()
        self._check_events()
        self._check_drafts()
        self.sim.adapters.check()
        self.sim.tier.check()
        scheduler, live = self.scheduler, self.sim.live
        running, waiting = scheduler.running, list(scheduler.waiting)
        ending = {one.request_id for batch in scheduler._outputs._outputs.values() for one in batch if one.error_type}
        for batches, _ in self.sim.core._undelivered:
            ending |= {one.request_id for batch in (batches or {}).values() for one in batch.outputs if one.error_type}
        num_live = sum(not client.is_over and i not in ending for i, client in live.items())
        assert len(running) + len(waiting) == len(scheduler.requests) == num_live, (
            f"{num_live} requests are live; {len(running)} are running, {len(waiting)} waiting, "
            f"{len(scheduler.requests)} known"
        )
        assert len(running) <= (self.limits.max_num_seqs or 0)
        for request in scheduler.requests.values():
            self._check_tokens(request, live[request.request_id])
        held: set[int] = {0}
        for request in running:
            assert request.status is RequestStatus.RUNNING, f"{request} is in the running list"
            assert request.num_computed_tokens > 0, f"{request}"
            self._check_blocks(request, held)
        for request in waiting:
            assert request.status <= RequestStatus.PREEMPTED, f"{request} is in a waiting queue"
            assert request.status is not RequestStatus.RUNNING, f"{request} is in a waiting queue"
            assert request.num_computed_tokens == 0, f"{request} waits with computed tokens"
            self._check_blocks(request, held)
        held.update(block.block_id for block in self.manager.held.references())
        num_free = self.pool.get_num_free_blocks()
        assert num_free == self.pool.num_gpu_blocks - len(held), (
            f"{num_free} of {self.num_blocks} blocks are free, requests hold {len(held) - 1}"
        )

    def _check_events(self) -> None:
        """Checks that a subscriber of KV cache events knows exactly what can be found; so does one that comes later."""
        assert self.pool.changes is not None
        changes = self.pool.changes.take()
        if not changes:
            return
        self._subscriber.apply(self._events.encode(0.0, changes))
        found = {(key[:-4], int.from_bytes(key[-4:], "little")) for key in self.pool.cached_blocks._blocks}
        assert self._subscriber.hashes() == found, "the events do not add up to what is cached"
        late = Subscriber()
        everything = describe_cached_blocks(self.pool.blocks, len(self.manager.groups))
        late.apply(self._events.encode(0.0, everything))
        assert late.hashes() == found, "a description of what is cached is incomplete"

    def _check_drafts(self) -> None:
        """Checks the laws L1 to L3 of speculation."""
        scheduler, fitter = self.scheduler, self.scheduler.drafts
        if fitter is None:
            return
        seen = [*self._drafts_seen, fitter._stats]
        total = Counter[str]()
        for stats in seen:
            per_position = stats.num_accepted_tokens_per_pos
            assert stats.num_drafts <= stats.num_draft_tokens <= fitter.num_spec_tokens * stats.num_drafts, f"{stats}"
            assert sum(per_position) == stats.num_accepted_tokens, f"{stats}"
            assert per_position == sorted(per_position, reverse=True), f"{stats}"
            assert per_position[0] <= stats.num_drafts, f"{stats}"
            total["proposed"] += stats.num_proposed_tokens
            total["verified"] += stats.num_draft_tokens
            total["verified, by result"] += stats.num_accepted_tokens + stats.num_rejected_tokens + stats.num_cut_tokens
            total["unused"] += sum(stats.num_unused_tokens.values())
            for reason, count in stats.num_unused_tokens.items():
                total[reason] += count
        in_flight = sum(len(request.spec_token_ids) for request in scheduler.requests.values())
        for output, _ in scheduler._steps._steps:
            in_flight += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        assert total["verified"] == total["verified, by result"], f"{total}"
        assert total["proposed"] == total["verified"] + total["unused"] + in_flight, f"{total}, in flight {in_flight}"
        self._drafts_seen = [merge(seen[:-1])] if len(seen) > 20 else self._drafts_seen

    def _check_blocks(self, request: Request, held: set[int]) -> None:
        """Checks that it has the blocks its tokens need; adds them to `held`."""
        num_computed, num_drafts = request.num_computed_tokens, self.sim.world.num_drafts
        assert num_computed <= request.num_tokens + num_drafts, f"{request}"
        most = num_computed and num_computed + 2 * num_drafts  # drafts that were rejected, and blocks ahead
        for table in self.manager.get_tables(request.request_id):
            size = self.manager.block_size
            assert ceil(num_computed / size) <= len(table) <= ceil(most / size), f"{request} holds {table}"
            held.update([block.block_id for block in table])

    def _check_tokens(self, request: Request, client: Client) -> None:
        prompt = client.request.prompt_token_ids or []
        assert list(request.all_token_ids) == prompt + client.received, f"{request} has other tokens than its client"

    def check_idle(self) -> None:
        """All clients are served: nothing may be left anywhere."""
        assert self.manager.usage == 0
        assert self.sim.executor.num_live_requests == 0, "the worker was not told of every finished request"
        assert self._num_scheduled_tokens == self.sim.executor.num_computed_tokens
        assert self._num_queries == self._num_admissions, (
            f"{self._num_queries} prefix queries were counted for {self._num_admissions} admissions"
        )

    # -- a step, right after it was scheduled --------------------------------------------------------------------

    def scheduling(self) -> None:
        """Before a step."""
        self._now += 1
        self._waiting_before = {r.request_id for r in self.scheduler.waiting if not r.num_preemptions}
        if self.cache_model is not None:
            self._free_before = free_queue(self.manager)

    def scheduled(self, step: SchedulerOutput) -> None:
        """Checks that budgets are kept, no request is overtaken, and every prefix that was in the cache was found."""
        if self.sim.log is not None:
            self.sim.log(f"    {describe(step)}")
        self._num_scheduled_tokens += step.total_num_scheduled_tokens
        self._count_situations(step)
        self._check_pause(step)
        self._check_chunks(step)
        self._check_admissions(step)
        if self.cache_model is not None:
            self.cache_model.check_step(step, self.scheduler.requests)
            if not step.preempted_req_ids and not self.sim.world.num_drafts:  # blocks ahead are taken last
                check_order_of_new_blocks(self._free_before, free_queue(self.manager), step, self.manager.block_size)

    def _count_situations(self, step: SchedulerOutput) -> None:
        seen = self.sim.seen
        seen["preemptions"] += len(step.preempted_req_ids)
        seen["preempted in flight"] += any(r.num_preemptions for r in self.scheduler.waiting.blocked)
        seen["tokens"] += step.total_num_scheduled_tokens
        assert not (step.preempted_req_ids and step.scheduled_spec_decode_tokens), "a step that preempts has drafts"
        seen["drafts"] += len(step.scheduled_spec_decode_tokens)
        for data in step.scheduled_new_reqs:
            seen["admissions"] += 1
            seen["admissions with cached tokens"] += data.num_computed_tokens > 0
            seen["ids used again at once"] += data.req_id in step.finished_req_ids
            seen["admissions with outputs"] += bool(data.output_token_ids)
            missing = len(data.prompt_token_ids) + len(data.output_token_ids) - data.num_computed_tokens
            seen["admissions in chunks"] += step.num_scheduled_tokens[data.req_id] < missing
            seen["window hits"] += any(0 in ids for ids in data.block_ids)

    def _check_pause(self, step: SchedulerOutput) -> None:
        state = self.scheduler.pause_state
        if state is PauseState.PAUSED_ALL:
            assert not step.num_scheduled_tokens, f"tokens are scheduled during a pause: {step}"
        elif state is PauseState.PAUSED_NEW:
            new = [data.req_id for data in step.scheduled_new_reqs if data.req_id in self._waiting_before]
            assert not new, f"{new} were admitted during a pause"

    def _check_chunks(self, step: SchedulerOutput) -> None:
        threshold = self.limits.long_prefill_token_threshold
        if threshold:
            drafts = step.scheduled_spec_decode_tokens
            chunks = [count - len(drafts.get(i, ())) for i, count in step.num_scheduled_tokens.items()]
            assert max(chunks, default=0) <= threshold, f"{step.num_scheduled_tokens}"
        if not self.limits.enable_chunked_prefill:
            for data in step.scheduled_new_reqs:
                num_missing = len(data.prompt_token_ids) + len(data.output_token_ids) - data.num_computed_tokens
                assert step.num_scheduled_tokens[data.req_id] == num_missing, f"the prompt of {data.req_id} was split"

    def _check_admissions(self, step: SchedulerOutput) -> None:
        """Checks that admitted requests go before all that are left waiting for capacity, and that the watermark stays
        free."""
        new = step.scheduled_new_reqs
        if not new:
            return
        admitted = [data.req_id for data in new]
        left = [r.request_id for r in self.scheduler.waiting.ready if r.request_id not in step.preempted_req_ids]
        order = ADMISSION_ORDERS.get(self.limits.scheduling_policy)
        if left and order is not None:
            ranks = {i: (*order(self.scheduler.requests[i]), self._arrivals[i]) for i in admitted + left}
            overtaken = [i for i in left if ranks[i] < max(ranks[j] for j in admitted)]
            assert not overtaken, f"{admitted} were admitted before {overtaken}"
        in_company = new if len(self.scheduler.running) > len(new) else new[1:]
        if in_company:
            watermark = int(self.limits.watermark * self.pool.num_gpu_blocks)
            assert self.pool.get_num_free_blocks() >= watermark, f"{admitted} were admitted below the watermark"
        if self.limits.scheduler_reserve_full_isl and not self.has_windows:
            last = self.scheduler.requests[admitted[-1]]
            missing = ceil(last.num_tokens / self.manager.block_size) - len(new[-1].block_ids[0])
            assert self.pool.get_num_free_blocks() >= missing, f"{last} was admitted, its prompt does not fit"
        for data in new:
            client = self.sim.live.get(data.req_id)
            if not self.scheduler.requests[data.req_id].num_preemptions:
                skips = not self.manager.enable_caching or data.sampling_params.skip_reading_prefix_cache
                self._num_admissions += not skips
                assert not (skips and data.num_computed_tokens), f"{data.req_id} was not to read the prefix cache"
            if client is not None and client.admitted_with is None:
                client.admitted_with = data.num_computed_tokens

    # -- outputs to clients ------------------------------------------------------------------------------------

    def added(self, request_id: str, in_step: bool = False) -> None:
        """Notes that a request joins the queue, or the next one of a session: within one step they have no order."""
        self._now += not in_step
        self._arrivals[request_id] = self._now

    def heard(self, client: Client, output: EngineCoreOutput) -> None:
        """One output, before the client takes it in: tokens, and where the prompt's tokens came from, once."""
        if self.cache_model is not None and output.new_token_ids:
            self.cache_model.accepted(output.request_id)
        if client.is_over:
            assert output.finished
            assert not output.new_token_ids, f"tokens after the end: {output}"
            return
        assert output.new_token_ids, f"an output without tokens: {output}"
        metrics = output.spec_decode_metrics
        num_accepted = 0 if metrics is None else metrics.num_accepted_tokens
        assert len(output.new_token_ids) - num_accepted in ((0, 1) if output.finished else (1,)), f"law L4: {output}"
        self.sim.seen["accepted tokens"] += num_accepted
        self.sim.seen["runs cut by a stop"] += num_accepted == len(output.new_token_ids)
        wants_logprobs = client.request.sampling_params.logprobs is not None
        assert (output.new_logprobs is not None) == wants_logprobs
        stats = output.prefill_stats
        assert (stats is None) == bool(client.received), f"prefill stats come with the first token: {output}"
        if stats is not None:
            num_prompt = len(client.request.prompt_token_ids or ())
            assert stats.num_prompt_tokens == num_prompt
            assert stats.num_computed_tokens + stats.num_cached_tokens == num_prompt, f"{stats}"
            assert client.admitted_with is not None
            assert stats.num_cached_tokens == min(client.admitted_with, num_prompt), f"{stats}"
            self.sim.tier.heard_prefill(output.request_id, stats)
            assert self.sim.world.has_tier or not stats.num_external_cached_tokens, f"{stats}"

    def heard_stats(self, stats: SchedulerStats | None, *, is_fresh: bool = True) -> None:
        """A snapshot of the scheduler adds up and, when fresh, equals what can be counted from outside."""
        if stats is None:
            return
        if stats.spec_decoding_stats is not None:
            self._drafts_seen.append(stats.spec_decoding_stats)
        if is_fresh:
            waiting = self.scheduler.waiting
            assert stats.num_running_reqs == len(self.scheduler.running)
            assert stats.num_waiting_reqs == len(waiting.ready)
            assert stats.num_skipped_waiting_reqs == len(waiting.blocked)
            num_taken = self.num_blocks - self.pool.get_num_free_blocks()
            assert abs(stats.kv_cache_usage - num_taken / self.num_blocks) < 1e-9
            ids = {
                i for request_id in self.scheduler.requests for t in self.manager.get_block_ids(request_id) for i in t
            }
            used, held = ids - {0}, {block.block_id for block in self.manager.held.references()}
            assert stats.num_used_blocks == len(used), f"{stats.num_used_blocks} blocks are said to be in {len(used)}"
            assert stats.num_held_blocks == len(held - used), f"{stats.num_held_blocks} blocks are held, not {held}"
        assert stats.num_blocks == self.num_blocks, f"{stats.num_blocks} blocks are counted, of {self.num_blocks}"
        assert min(stats.num_cached_blocks, stats.num_free_blocks, stats.num_recomputed_tokens) >= 0
        prefix = stats.prefix_cache_stats
        assert prefix.hits <= prefix.queries
        self._num_queries += prefix.requests
        self.sim.tier.heard(stats.kv_transfer)
        for event in stats.kv_cache_eviction_events:
            assert 0 <= event.idle_s <= event.lifetime_s, f"{event}"

    # -- other operations ---------------------------------------------------------------------------------------

    @contextmanager
    def free_order(self, aborted: list[str]) -> Iterator[None]:
        """Around an abort: the blocks go back in the order in which they should be evicted."""
        if len(aborted) != 1 or not any(self.manager.get_block_ids(aborted[0])):
            yield
        else:
            with check_order_of_freed_blocks(self.manager, aborted[0]):
                yield

    def reset_prefix_cache(self, done: bool, with_running: bool) -> None:
        """After `reset_prefix_cache`: it did what it says."""
        in_use = bool(self.scheduler.running)
        if self.sim.tier.is_used and not with_running:
            in_use = in_use or bool(self.sim.tier.exchange.loader.active)
        assert done == (not in_use), f"the prefix cache {'was' if done else 'was not'} reset"
        assert not (with_running and in_use)
        if done:
            assert not self.pool.cached_blocks.num_blocks, "blocks can be hit after a reset"
            self.forget_cache()

    def forget_cache(self) -> None:
        """Nothing is cached any more."""
        if self.cache_model is not None:
            self.cache_model.clear()

    def lost_steps(self) -> None:
        """Steps in flight were given up."""
        self._num_scheduled_tokens = self.sim.executor.num_computed_tokens
        self.forget_cache()

    def max_steps_to_finish(self) -> int:
        """In how many steps all live requests must finish when no others come: as if one ran after the other."""
        budget = self.limits.max_num_scheduled_tokens or self.limits.max_num_batched_tokens or 1
        chunk = min(budget, self.limits.long_prefill_token_threshold or budget)
        total = 0
        for client in self.sim.live.values():
            num_prompt, num_outputs = len(client.request.prompt_token_ids or ()), len(client.expected.token_ids)
            total += ceil((num_prompt + num_outputs) / chunk) + num_outputs + 1
            most = self.manager.max_model_len
            total += sum(ceil(most / chunk) + most for _ in client.inputs)
        if self.sim.world.adapter_share:  # each may wait for a load, a place and memory, one after the other
            total += 100 * (len(self.sim.live) + len(self.sim.resting))
        if self.sim.world.has_tier:  # each may wait for a load that hangs, one after the other
            total += 1000 * (len(self.sim.live) + len(self.sim.resting))
        return (total + 2) * (self.sim.executor.max_concurrent_batches + 1)
