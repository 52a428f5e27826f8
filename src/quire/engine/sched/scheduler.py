"""The scheduler decides which request computes how many tokens in the next step.

One rule covers chunked prefill, prefix caching, decoding, speculation and resumption: every request has
`num_computed_tokens` and wants to reach `num_tokens` (plus its drafts). Each step spends one token budget on that,
running requests first, then waiting ones. When a running request gets no KV blocks, the policy's victims are preempted
until it does: they give up their blocks and wait at the head of the queue to be computed again.

Steps may overlap. `num_computed_tokens` counts a step's tokens as soon as it is scheduled, so a request that waits for
the token of a step in flight has nothing left to compute and is skipped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from quire.config.engine import SchedulerConfig
from quire.engine.kv_cache.block import KVCacheBlocks, KVCacheMetricsCollector
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.drafts import DraftFitter
from quire.engine.sched.interface import (
    AdmissionGate,
    MakeExchange,
    NoExchange,
    PauseState,
    SchedulerInterface,
    StructuredOutputManager,
)
from quire.engine.sched.outputs import OutputCollector
from quire.engine.sched.policy import POLICIES, WaitingRequests
from quire.engine.sched.step import Admission, SchedulerLimits, StepBuilder, StepsInFlight
from quire.engine.sched.stop import check_stop
from quire.engine.snapshot import MAX_REQUESTS, make_block_map, make_request_snapshots
from quire.engine.structured_output.request import GrammarVerdict, StructuredOutputRequest
from quire.errors import ClientError, GenerationError, QuireError, ServerError, ValidationError
from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreEventType, EngineCoreOutputs
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.stats import EngineSnapshot, SchedulerStats

logger = init_logger(__name__)


class Scheduler(SchedulerInterface):
    """Owns every unfinished request and, through the KVCacheManager, every block; knows nothing of tensors.

    A request is either in `running`, in the order of admission, or in `waiting`.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        scheduler_config: SchedulerConfig,
        *,
        max_model_len: int,
        enable_caching: bool,
        log_stats: bool,
        include_finished_set: bool = False,
        kv_cache_metrics_sample: float | None = None,
        structured_output_manager: StructuredOutputManager | None = None,
        gates: Sequence[AdmissionGate] = (),
        drafts: DraftFitter | None = None,
        max_concurrent_steps: int = 1,
        sends_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_concurrent_steps`: most steps in flight. `sends_tokens`: to workers that do not sample."""
        metrics = None if kv_cache_metrics_sample is None else KVCacheMetricsCollector(kv_cache_metrics_sample)
        self.limits = SchedulerLimits.from_config(scheduler_config, max_model_len, kv_cache_config.num_blocks)
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            max_model_len,
            enable_caching=enable_caching,
            log_stats=log_stats,
            metrics=metrics,
            max_step_tokens=self.limits.max_num_scheduled_tokens,
        )
        self.policy = POLICIES[scheduler_config.scheduling_policy]
        self.structured_output_manager = structured_output_manager
        self.log_stats = log_stats
        self.drafts = drafts
        """None: no speculation."""
        self.clock = clock

        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        grammars = () if structured_output_manager is None else (structured_output_manager,)
        self.waiting = WaitingRequests(self.policy, (*grammars, *gates))
        self.exchange = NoExchange()
        """Stores outside the engine. `connect` sets another."""
        self._steps = StepsInFlight(max_concurrent_steps, sends_tokens=sends_tokens)
        self._outputs = OutputCollector(max_model_len, include_finished_set, drafts)
        self._num_recomputed_tokens = 0
        """Tokens computed again after preemptions, since the last statistics."""

    def connect(self, make_exchange: MakeExchange) -> NoExchange:
        self.exchange = exchange = make_exchange(self.kv_cache_manager)
        self.waiting.gates = (*self.waiting.gates, *exchange.gates)
        return exchange

    # -- coming ------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValidationError(
                f"request id {request.request_id!r} is in use by an unfinished request; ids must be unique",
                param="request_id",
                value=request.request_id,
            )
        stop = check_stop(request, self.limits.max_model_len) if request.num_output_tokens else None
        if stop is None:
            self.limits.validate_length(request)
        self.requests[request.request_id] = request
        if stop is not None:  # resumed after a restart with its last token: its client lacks the end only
            request.report.stop_reason = stop.reason
            self.finish_requests(request.request_id, stop.status, report=True)
            return
        self._record(request, EngineCoreEventType.QUEUED, self.clock())
        self.exchange.on_new_request(request)
        self.waiting.add(request)

    # -- the step ----------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        self.exchange.begin_round()
        limits = self.limits
        num_reqs = min(limits.max_num_seqs, len(self.running) + len(self.waiting.ready))
        step = self._steps.begin(limits.max_num_scheduled_tokens, self.clock(), num_reqs)
        if self.pause_state is not PauseState.PAUSED_ALL and self._schedule_running(step):
            self._schedule_waiting(step)
        if self.drafts is not None:
            self._schedule_drafts(step, self.drafts)
        output = self._steps.send(step)
        self.exchange.on_sent(output)
        return output

    def _schedule_running(self, step: StepBuilder) -> bool:
        """Schedules running requests. Returns False if any was preempted: no other request may take its blocks then."""
        running = self.running
        cap_chunk, allocate_slots = self.limits.cap_chunk, self.kv_cache_manager.allocate_slots
        no_blocks = self.kv_cache_manager.empty_kv_cache_blocks
        any_preempted = False
        index = 0
        while index < len(running) and step.has_room:
            request = running[index]
            index += 1
            num_new = request.num_tokens - request.num_computed_tokens
            if num_new <= 0:
                continue  # all its tokens are in flight, perhaps with drafts
            num_new = cap_chunk(num_new, step.token_budget)
            new_blocks = allocate_slots(request, num_new)
            while new_blocks is None and self.exchange.make_room(request):
                new_blocks = allocate_slots(request, num_new)
            while new_blocks is None:
                any_preempted = True
                victim_index = self.policy.choose_victim(running)
                victim = running.pop(victim_index)
                index -= victim_index < index
                step.take_back(victim)
                self._preempt(victim, step.timestamp)
                if victim is request:
                    break
                new_blocks = allocate_slots(request, num_new)
            else:
                step.add_running(request, num_new, None if new_blocks is no_blocks else new_blocks.get_block_ids())
        return not any_preempted

    def _schedule_waiting(self, step: StepBuilder) -> None:
        """Admits requests from the head of the queue, until one does not fit."""
        self.waiting.unblock(self._steps.get_preempted(), self.pause_state)
        while step.has_room and len(self.running) < self.limits.max_num_seqs:
            request = self._next_waiting()
            if request is None:
                break
            hits = self.kv_cache_manager.get_computed_blocks(request)
            if self.exchange.begins_load(request, *hits, self.running, self._reserve()):
                continue
            admission = self._plan_admission(request, *hits, step.token_budget)
            if admission is None or not self._start(request, admission, step):
                break

    def _reserve(self) -> int:
        """Returns the blocks that an admission must leave free."""
        return self.limits.watermark_blocks if self.running else 0

    def _plan_admission(
        self, request: Request, cached_blocks: KVCacheBlocks, num_hits: int, token_budget: int
    ) -> Admission | None:
        """Returns None if the request must wait for a step with a larger budget. Changes nothing."""
        num_cached = request.num_computed_tokens + num_hits
        num_missing = request.num_tokens - num_cached
        num_new = self.limits.cap_chunk(num_missing, token_budget)
        if num_new < num_missing and not self.limits.enable_chunked_prefill:
            return None
        return Admission(cached_blocks, num_hits, num_cached, num_new)

    def _start(self, request: Request, admission: Admission, step: StepBuilder) -> bool:
        """Runs the head of the queue as planned. Returns False if it must wait for blocks."""
        # Where none runs, a request must get all of its blocks, whatever the settings: one that can only start would
        # preempt itself for ever. All blocks are free then, but those of transfers.
        is_first, exchange = not self.running, self.exchange
        num_external = exchange.count_external(request, admission.num_hits)
        new_blocks = None
        while new_blocks is None:
            new_blocks = self.kv_cache_manager.allocate_slots(
                request,
                admission.num_new,
                admission.num_hits,
                admission.cached_blocks,
                full_sequence_must_fit=self.limits.reserve_full_isl or is_first,
                reserved_blocks=self._reserve(),
                num_external_tokens=num_external,
            )
            if new_blocks is None and not exchange.make_room(request):
                is_alone = is_first and not exchange.await_room(request)
                if is_alone:  # no block will come back
                    self._fail(
                        request, GenerationError(f"its {request.num_tokens} tokens do not fit into the KV cache")
                    )
                return is_alone
        self.waiting.pop()
        exchange.note_started(request, admission.num_hits, num_external)
        self._num_recomputed_tokens += request.start(admission.num_cached, num_external)
        self._record(request, EngineCoreEventType.SCHEDULED, step.timestamp)
        self.running.append(request)
        step.add_new(request, admission.num_new, self.kv_cache_manager.get_block_ids(request.request_id))
        if self.drafts is not None:
            self.drafts.introduce(step.new_reqs[-1], request)
        return True

    def _schedule_drafts(self, step: StepBuilder, drafts: DraftFitter) -> None:
        """Adds drafts, and blocks for the drafter, from what is left when all else is scheduled.

        So no prompt waits for them and no request is preempted: the watermark stays free, and as many blocks as the
        running requests may need for the rest of their prompts and for the next step.
        """
        manager = self.kv_cache_manager
        size = manager.block_size
        to_come = sum(1 + max(0, r.num_tokens - r.num_computed_tokens) // size for r in self.running)
        num_reserved = max(self.limits.watermark_blocks, to_come * len(manager.groups))
        for row, request in enumerate(step.requests):
            if request.num_computed_tokens < request.num_tokens or request.sampling_params is None:
                continue  # it samples nothing, and keeps its drafts
            num_held = len(request.spec_token_ids)
            if self._steps.preempted_req_ids:  # blocks are short
                drafts.take_back(request, "blocks")
                continue
            num_drafts = min(num_held, step.token_budget)
            drafts.drop(num_held - num_drafts, "budget")
            if not num_drafts and not drafts.num_lookahead_tokens:
                request.spec_token_ids = []
                continue
            num_certain = step.num_scheduled_tokens[request.request_id]
            request.num_computed_tokens -= num_certain  # windows keep what these tokens read
            new_blocks = manager.allocate_slots(
                request,
                num_certain + num_drafts,
                num_lookahead_tokens=drafts.num_lookahead_tokens,
                reserved_blocks=num_reserved,
            )
            request.num_computed_tokens += num_certain
            if new_blocks is None:  # its last block may have room for some
                num_fitting = min(num_drafts, manager.count_slots(request.request_id) - request.num_tokens)
                drafts.drop(num_drafts - num_fitting, "blocks")
                num_drafts = num_fitting
            has_new = new_blocks is not None and new_blocks is not manager.empty_kv_cache_blocks
            step.add_drafts(row, num_drafts, new_blocks.get_block_ids() if new_blocks and has_new else None)

    def _preempt(self, request: Request, timestamp: float) -> None:
        """Puts a request back into the queue, without blocks. The caller has taken it out of `running`."""
        self.kv_cache_manager.free(request)
        if request.spec_token_ids and self.drafts is not None:
            self.drafts.take_back(request, "preempted")
        request.preempt()
        self._record(request, EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.add_preempted(request)
        self._steps.preempted_req_ids.add(request.request_id)

    # -- gates and grammars ------------------------------------------------------------------------------------

    def _next_waiting(self) -> Request | None:
        """Returns the next request to admit. Ends those before it that a gate fails, or whose grammar needs no step."""
        while (request := self.waiting.peek()) is not None:
            error = self.waiting.get_error(request)
            if error is not None:
                self._fail(request, error)
            elif request.structured_output is None or not self._end_by_grammar(request, request.structured_output):
                break
        return request

    def _end_by_grammar(self, request: Request, structured: StructuredOutputRequest) -> bool:
        """Ends a request whose grammar cannot be compiled, or was complete before the core was restarted."""
        if self.structured_output_manager is None:
            self._fail(request, ServerError("this scheduler has no grammars"))
            return True
        verdict = structured.check_start()
        if verdict is GrammarVerdict.BROKEN:
            self._fail(request, structured.error or ServerError("its grammar cannot be compiled"))
        elif verdict is GrammarVerdict.COMPLETE:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_STOPPED, report=True)
        return verdict is not GrammarVerdict.GOES_ON

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if self.structured_output_manager is None or not scheduler_output.has_structured_output_requests:
            return None
        alive = [self.requests[i] for i in scheduler_output.num_scheduled_tokens if i in self.requests]
        return self.structured_output_manager.grammar_bitmask(alive, scheduler_output)

    # -- its result --------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        requests = self._steps.receive(scheduler_output)
        self.exchange.on_received(scheduler_output)
        ended = self._outputs.add_result(requests, scheduler_output, model_output)
        if ended:
            self._release(ended)
        stats = self.make_stats()
        if stats is not None:
            stats.num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        return self._outputs.take(self.clock(), stats)

    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        if self.drafts is not None:
            self.drafts.fit(drafts, self.requests, len(self.running))

    def abandon_steps(self) -> None:
        # Blocks are registered for reuse when they are scheduled, so the prefix cache may promise now what was never
        # computed: it is dropped, too.
        num_drafts = self._steps.abandon()
        self.exchange.on_abandoned()
        if self.drafts is not None:
            self.drafts.drop(num_drafts, "abandoned")
        self.reset_prefix_cache(reset_running_requests=True)

    # -- going -------------------------------------------------------------------------------------------------

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, status: RequestStatus, *, report: bool = False
    ) -> list[tuple[str, int]]:
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in ended:
            request.status = status
            if report:
                self._outputs.add_end(request)
        if ended:
            self._release(ended)
        return [(request.request_id, request.origin.client_index) for request in ended]

    def _release(self, ended: list[Request]) -> None:
        """Removes requests whose status is final, and frees what they hold."""
        num_running = len(self.running)
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        if num_running - len(self.running) < len(ended):  # some of them were waiting
            self.waiting.remove(ended)
        for request in ended:
            self._steps.finished_req_ids.add(request.request_id)
            self.kv_cache_manager.free(request)
            if request.spec_token_ids and self.drafts is not None:
                self.drafts.drop_of_ended(request, len(request.spec_token_ids))
            if request.structured_output is not None:
                request.structured_output.cancel()
            self.waiting.note_left(request)
            self._outputs.note_finished(request)
            del self.requests[request.request_id]

    def _fail(self, request: Request, error: QuireError) -> None:
        """Ends a request that can never run, so that it does not wait for ever."""
        level = logging.INFO if isinstance(error, ClientError) else logging.ERROR
        logger.log(level, "request %s ends with an error: %s", request.request_id, error)
        request.report.error = error
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR, report=True)

    # -- control and statistics --------------------------------------------------------------------------------

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def get_request_ids(self, client_index: int) -> list[str]:
        return [i for i, request in self.requests.items() if request.origin.client_index == client_index]

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def has_requests(self) -> bool:
        if self.pause_state is PauseState.UNPAUSED and self.requests:
            return True  # nearly always
        if self._steps.finished_req_ids or self.exchange.has_news:  # ids and orders to send, transfers to take in
            return True
        return self.pause_state is PauseState.PAUSED_NEW and (bool(self.running) or self.waiting.any_preempted())

    def is_blocked(self) -> bool:
        steps = self._steps
        if self.running or steps.finished_req_ids or steps.preempted_req_ids or self.exchange.has_news:
            return False
        if self.pause_state is not PauseState.UNPAUSED:
            return False
        return self.waiting.is_blocked()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if reset_running_requests:
            timestamp = self.clock()
            while self.running:
                self._preempt(self.running.pop(), timestamp)
        elif self.running:
            return self.kv_cache_manager.reset_prefix_cache()
        if not self.exchange.let_go(loads_too=reset_running_requests):
            return False
        return self.kv_cache_manager.reset_prefix_cache()

    def make_stats(self) -> SchedulerStats | None:
        if not self.log_stats:
            return None
        manager = self.kv_cache_manager
        num_used, num_cached, num_free, num_held = manager.count_blocks()
        stats = SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting.ready),
            num_skipped_waiting_reqs=len(self.waiting.blocked),
            kv_cache_usage=manager.usage,
            kv_cache_eviction_events=manager.take_events(),
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_used_blocks=num_used,
            num_cached_blocks=num_cached,
            num_free_blocks=num_free,
            num_held_blocks=num_held,
        )
        self._num_recomputed_tokens = 0
        changes = manager.block_pool.changes
        if changes is not None:
            stats.num_dropped_kv_events, changes.num_dropped = changes.num_dropped, 0
        prefix_cache_stats = manager.take_prefix_cache_stats()
        if prefix_cache_stats is not None:
            stats.prefix_cache_stats = prefix_cache_stats
        for gate in self.waiting.gates:
            gate.add_stats(stats)
        return stats

    def make_snapshot(self) -> EngineSnapshot:
        num_listed = min(len(self.requests), MAX_REQUESTS)
        requests = make_request_snapshots(
            (
                ("running", self.running),
                (None, self.waiting.ready.first(num_listed)),
                ("blocked", self.waiting.blocked.first(num_listed)),
            ),
            self.kv_cache_manager.get_tables,
            num_requests=num_listed,
            num_holding=len(self.running),
        )
        return EngineSnapshot(
            timestamp=time.monotonic(),
            time=time.time(),
            pause_state=int(self.pause_state),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            max_num_seqs=self.limits.max_num_seqs,
            max_num_scheduled_tokens=self.limits.max_num_scheduled_tokens,
            blocks=make_block_map(self.kv_cache_manager.block_pool),
            requests=requests,
            num_left_out=len(self.requests) - len(requests),
            held_blocks={str(state): number for state, number in self.kv_cache_manager.held.count().items()},
        )

    def _record(self, request: Request, event_type: EngineCoreEventType, timestamp: float) -> None:
        if self.log_stats:
            request.report.record_event(event_type, timestamp)

    def shutdown(self) -> None:
        self.exchange.shutdown()
