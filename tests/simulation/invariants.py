"""What must hold after every operation, whatever happened before. Read it as the list of Quire's promises inside one
engine: nothing lost, budgets kept, blocks conserved, order kept, numbers that add up."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING

from quire.engine.request import Request, RequestStatus
from quire.wire.engine_core import EngineCoreOutput
from quire.wire.execution import SchedulerOutput
from quire.wire.stats import SchedulerStats

if TYPE_CHECKING:
    from tests.simulation.harness import Client, Simulation


class Invariants:
    """Checks one engine from its start to its end."""

    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation
        self.scheduler = simulation.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.limits = simulation.world.config.scheduler_config
        self.caching = simulation.world.config.cache_config.enable_prefix_caching
        self.block_sizes = [group.kv_cache_spec.block_size for group in self.manager.kv_cache_config.kv_cache_groups]
        self.arrivals: dict[str, int] = {}
        self.num_admissions = 0
        self.num_queries = 0
        self.num_scheduled_tokens = 0

    # -- after every operation ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that costs little."""
        self.manager.check_integrity()
        scheduler, live = self.scheduler, self.sim.live
        running, waiting = scheduler.running, [*scheduler.waiting, *scheduler.blocked]
        assert len(running) + len(waiting) == len(scheduler.requests) == len(live), (
            f"{len(live)} requests are live; {len(running)} are running, {len(waiting)} waiting, "
            f"{len(scheduler.requests)} known"
        )
        assert len(running) <= (self.limits.max_num_seqs or 0)
        for request in running:
            self._check_running(request, live[request.request_id])
        for request in waiting:
            self._check_waiting(request, live[request.request_id])

    def _check_running(self, request: Request, client: Client) -> None:
        assert request.status is RequestStatus.RUNNING, f"{request} is in the running list"
        assert 0 < request.num_computed_tokens <= request.num_tokens, f"{request}"
        self._check_tokens(request, client)
        block_ids = self.manager.get_block_ids(request.request_id)
        for block_size, ids in zip(self.block_sizes, block_ids, strict=True):
            assert len(ids) == ceil(request.num_computed_tokens / block_size), f"{request} holds blocks {block_ids}"

    def _check_waiting(self, request: Request, client: Client) -> None:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request} is in a waiting queue"
        assert request.num_computed_tokens == 0, f"{request} waits with computed tokens"
        assert not any(self.manager.get_block_ids(request.request_id)), f"{request} waits and holds blocks"
        self._check_tokens(request, client)

    def _check_tokens(self, request: Request, client: Client) -> None:
        prompt = client.request.prompt_token_ids
        assert list(request.all_token_ids) == prompt + client.received, f"{request} has other tokens than its client"

    def check_idle(self) -> None:
        """All clients are served: nothing may be left anywhere."""
        free = self.manager.block_pool.get_num_free_blocks()
        total = self.manager.kv_cache_config.num_blocks - 1
        assert free == total, f"{total - free} of {total} blocks are not free although no request is live"
        assert self.manager.usage == 0
        assert self.sim.executor.num_live_requests == 0, "the worker was not told of every finished request"
        assert self.num_scheduled_tokens == self.sim.executor.num_computed_tokens

    # -- a step -------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Look at the steps the executor was given since the last call."""
        for step in self.sim.executor.take_steps():
            if self.sim.log is not None:
                self.sim.log(f"    {step}")
            self._check_chunks(step)
            self._check_admissions(step)

    def _check_chunks(self, step: SchedulerOutput) -> None:
        self.num_scheduled_tokens += step.total_num_scheduled_tokens
        threshold = self.limits.long_prefill_token_threshold
        if threshold:
            assert max(step.num_scheduled_tokens.values(), default=0) <= threshold, f"{step.num_scheduled_tokens}"
        if not self.limits.enable_chunked_prefill:
            for data in step.scheduled_new_reqs:
                num_missing = len(data.prompt_token_ids) + len(data.output_token_ids) - data.num_computed_tokens
                assert step.num_scheduled_tokens[data.req_id] == num_missing, f"the prompt of {data.req_id} was split"

    def _check_admissions(self, step: SchedulerOutput) -> None:
        """Nobody is overtaken: a request that was admitted goes before all that were left waiting for capacity."""
        if not step.scheduled_new_reqs:
            return
        admitted = [data.req_id for data in step.scheduled_new_reqs]
        left = [r.request_id for r in self.scheduler.waiting if r.request_id not in step.preempted_req_ids]
        if left:
            last, first = max(map(self._rank, admitted)), min(map(self._rank, left))
            assert last < first, f"{admitted} were admitted before {left}"
        for data in step.scheduled_new_reqs:
            client = self.sim.live.get(data.req_id)
            if client is not None and client.admitted_with is None:
                client.admitted_with = data.num_computed_tokens
                self.num_admissions += self.caching and not client.skips_cache

    def _rank(self, request_id: str) -> tuple[float, ...]:
        """Smaller is served first."""
        arrival = self.arrivals[request_id]
        client = self.sim.live.get(request_id)
        if self.limits.scheduling_policy == "fcfs" or client is None:
            return (arrival,)
        return (client.request.priority, client.request.arrival_time, arrival)

    # -- what clients hear --------------------------------------------------------------------------------------

    def added(self, request_id: str) -> None:
        """A request joins the queue."""
        self.arrivals[request_id] = len(self.arrivals)

    def heard(self, client: Client, output: EngineCoreOutput) -> None:
        """One output: tokens in it, and where the prompt's tokens came from, once."""
        assert output.new_token_ids, f"an output without tokens: {output}"
        wants_logprobs = client.request.sampling_params.logprobs is not None  # type: ignore[union-attr]
        assert (output.new_logprobs is not None) == wants_logprobs
        stats = output.prefill_stats
        assert (stats is None) == client.heard, f"prefill stats come with the first output: {output}"
        if stats is None:
            return
        num_prompt = len(client.request.prompt_token_ids or ())
        assert stats.num_prompt_tokens == num_prompt
        assert stats.num_computed_tokens + stats.num_cached_tokens == num_prompt, f"{stats}"
        assert client.admitted_with is not None
        assert stats.num_local_cached_tokens == min(client.admitted_with, num_prompt), f"{stats}"

    def heard_stats(self, stats: SchedulerStats | None) -> None:
        """A snapshot of the scheduler equals what can be counted from outside."""
        if stats is None:
            return
        scheduler, pool = self.scheduler, self.manager.block_pool
        assert stats.num_running_reqs == len(scheduler.running)
        assert stats.num_waiting_reqs == len(scheduler.waiting)
        assert stats.num_skipped_waiting_reqs == len(scheduler.blocked)
        total = self.manager.kv_cache_config.num_blocks - 1
        assert abs(stats.kv_cache_usage - (1 - pool.get_num_free_blocks() / total)) < 1e-9
        prefix = stats.prefix_cache_stats
        assert prefix.hits <= prefix.queries
        self.num_queries += prefix.requests
        assert self.num_queries <= self.num_admissions, f"{self.num_queries} look-ups, {self.num_admissions} admissions"

    # -- other operations ---------------------------------------------------------------------------------------

    def aborting(self, request_ids: Iterable[str]) -> None:
        """Before an abort."""

    def reset(self, done: bool, with_running: bool) -> None:
        """After `reset_prefix_cache`."""
        if with_running:
            assert done, "the prefix cache was not reset although running requests were given up"
            assert not self.scheduler.running
        elif not self.scheduler.running:
            assert done, "the prefix cache was not reset although nothing was running"

    def max_steps_to_finish(self) -> int:
        """In how many steps all live requests must finish when no others come: as if one ran after the other."""
        budget = self.limits.max_num_scheduled_tokens or self.limits.max_num_batched_tokens or 1
        chunk = min(budget, self.limits.long_prefill_token_threshold or budget)
        total = 0
        for client in self.sim.live.values():
            num_prompt, num_outputs = len(client.request.prompt_token_ids or ()), len(client.expected.token_ids)
            total += ceil((num_prompt + num_outputs) / chunk) + num_outputs + 1
        return (total + 2) * (self.sim.executor.max_concurrent_batches + 1)
