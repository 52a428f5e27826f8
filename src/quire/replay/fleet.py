"""A recorded load on several engines, on a virtual clock: real schedulers and KV caches, and the policy that routes.

Each engine is as the recorded one and has a machine of its own: its steps take what a fitted `StepTimes` predicts. A
placement sees of an engine what a server would see: outputs when their step has ended. With one engine and the recorded
load this is the prediction of `what_if`.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from quire.engine.recording.format import Header, Pause, Reset
from quire.engine.request import RequestStatus
from quire.engine.sched.interface import PauseState
from quire.engine.structured_output.request import GrammarVerdict
from quire.errors import ConfigError, QuireError
from quire.replay.figures import Figures, make_figures
from quire.replay.replay import (
    STOP_TOKEN,
    ReplayedGrammar,
    ReplayedGrammars,
    ReplayedRequest,
    make_request,
    make_scheduler,
)
from quire.replay.step_times import Pace, StepTimes, StepWork
from quire.replay.study import RecordedRequest, Study
from quire.wire.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
)
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.stats import SchedulerStats

_QUANTUM_S = 1e-3
"""Seconds that pass when a step computes nothing and nothing is due."""
_MAX_IDLE_STEPS = 10_000


class Placement(Protocol):
    """Chooses the engine of each request: a `Router` of the frontend."""

    def open_engine(self, engine: int, ready: EngineCoreReadyResponse) -> None:
        """Records that an engine is ready, with an empty cache."""

    def close_engine(self, engine: int) -> None:
        """Records that an engine has died."""

    def place(self, request: EngineCoreRequest, engines: Sequence[int], num_outputs: int = 0) -> int:
        """Returns one of `engines`."""

    def note_token(self, request_id: str) -> None:
        """Records the first token of a request."""

    def note_step(self, outputs: EngineCoreOutputs) -> None:
        """Learns from the statistics of a step."""

    def remove(self, request_id: str) -> None:
        """Records that a request has ended, or leaves its engine."""


class Outage(NamedTuple):
    """Death of an engine: its requests go on at others."""

    engine: int
    at_s: float
    """Seconds after the first arrival."""
    duration_s: float
    """Seconds until it is ready again."""


class _Served:
    """A request in the simulation: its recorded output, and the simulated one."""

    def __init__(self, number: int, recorded: RecordedRequest, arrival_s: float) -> None:
        self.request_id = str(number)
        self.recorded = recorded
        self.result = RecordedRequest(recorded.add, arrival_s, recorded.reached_s)
        self.engine: _Engine | None = None
        """The engine it is at."""
        self.longest_gap_s = 0.0


class _End(NamedTuple):
    """The end of a step."""

    engine: _Engine
    incarnation: int
    outputs: list[EngineCoreOutput]
    stats: SchedulerStats


class _Recovery(NamedTuple):
    """An engine that is ready again."""

    engine: _Engine


class _Abort(NamedTuple):
    """Abort of a request that has had no token."""

    served: _Served


class _Engine:
    """One engine: its scheduler, and the time at which it is free."""

    def __init__(self, index: int, header: Header, times: StepTimes, pace: Pace, gap_s: float) -> None:
        self.index = index
        self.now = 0.0
        self.num_steps = self.num_preemptions = 0
        self.incarnation = 0
        self.is_up = True
        self.num_idle = 0
        """Steps that have computed nothing, in a row."""
        self._header, self._times, self._pace, self._gap_s = header, times, pace, gap_s
        self.start()

    def start(self) -> None:
        """Begins with an empty cache."""
        self._grammars = ReplayedGrammars()
        self.scheduler = make_scheduler(self._header, self._grammars)
        self.served: dict[str, tuple[_Served, ReplayedRequest]] = {}

    @property
    def ready_response(self) -> EngineCoreReadyResponse:
        """Its start-up, as far as a placement wants to know."""
        kv_cache = self._header.kv_cache
        size = min(kv_cache.block_sizes)
        num_blocks, max_len = kv_cache.num_blocks, self._header.max_model_len
        return EngineCoreReadyResponse(
            max_model_len=max_len,
            num_gpu_blocks=num_blocks,
            block_size=size,
            kv_cache_size_tokens=(num_blocks - 1) * size,
            kv_cache_max_concurrency=(num_blocks - 1) * size / max_len,
            supported_tasks=(),
            engine_index=self.index,
        )

    def add(self, served: _Served, request: ReplayedRequest, now: float) -> bool:
        """Takes in a request. Returns False if the scheduler refuses it."""
        if not self.scheduler.has_requests():
            self.now = max(self.now, now)
        self._set_grammar(request, served.recorded)
        try:
            self.scheduler.add_request(request)
        except QuireError:
            return False
        self.served[served.request_id] = served, request
        return True

    def _set_grammar(self, request: ReplayedRequest, recorded: RecordedRequest) -> None:
        if isinstance(request.structured_output, ReplayedGrammar):
            self._grammars.ready.add(request.request_id)
            if recorded.failed is not None:
                is_complete = recorded.failed is RequestStatus.FINISHED_STOPPED
                request.structured_output.start = GrammarVerdict.COMPLETE if is_complete else GrammarVerdict.BROKEN

    def step(self) -> _End | None:
        """Runs one step, and is free at its end. Returns that end; None if it computed nothing."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids)
        if not output.total_num_scheduled_tokens:
            scheduler.update_from_output(output, ModelRunnerOutput())
            self.now += _QUANTUM_S
            self.num_idle += 1
            return None
        self.num_idle = 0
        pace = self._pace.of(self.num_steps, self.now)
        self.num_steps += 1
        for new in output.scheduled_new_reqs:
            result = self.served[new.req_id][0].result
            if result.num_cached_tokens is None:
                result.num_cached_tokens = new.num_computed_tokens
        self.now += self._times.predict(StepWork.of(output)) * pace
        outputs = scheduler.update_from_output(output, self._compute(output))
        ends = [one for batch in outputs.values() for one in batch.outputs]
        stats = SchedulerStats(
            num_running_reqs=len(scheduler.running),
            num_waiting_reqs=len(scheduler.requests) - len(scheduler.running),
            kv_cache_usage=scheduler.kv_cache_manager.usage,
            num_scheduled_tokens=output.total_num_scheduled_tokens,
            num_decoded_reqs=sum(1 for one in ends if self.served[one.request_id][0].result.num_outputs),
        )
        return _End(self, self.incarnation, ends, stats)

    def rest(self) -> None:
        """Passes the time between two steps."""
        self.now += self._gap_s

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Returns a token for each request whose tokens are all computed; STOP_TOKEN for its last one."""
        tokens: list[list[int]] = []
        pooled: dict[str, Any] = {}
        for request_id in output.num_scheduled_tokens:
            served, request = self.served[request_id]
            if request.num_computed_tokens < request.num_tokens:
                tokens.append([])
                continue
            if request.sampling_params is None:
                pooled[request_id] = np.zeros(1)
            is_last = served.result.num_outputs + 1 >= max(1, served.recorded.num_outputs)
            tokens.append([STOP_TOKEN if is_last else 0])
        return ModelRunnerOutput(list(output.num_scheduled_tokens), tokens, pooler_output=pooled)


def check_predictable(study: Study) -> None:
    """Raises ConfigError if the recorded load cannot be served on a virtual clock."""
    connector = study.header.connector
    if connector:
        raise ConfigError(
            f"the recording is of an engine with kv_connector {connector!r}: a prediction does not know what its "
            "stores would have, nor how long loads would take then; record an engine without one, or use "
            "quire replay --check"
        )


class Fleet:
    """One simulation of a load. `rate` times the recorded arrivals per second come."""

    def __init__(
        self,
        study: Study,
        header: Header,
        times: StepTimes,
        *,
        num_engines: int = 1,
        placement: Placement | None = None,
        rate: float = 1.0,
        outages: Sequence[Outage] = (),
    ) -> None:
        """Raises ConfigError for a recording or settings that make no simulation. `placement` is needed for several
        engines."""
        if study.has_drafts:
            raise ConfigError("what-if does not know speculative decoding: recorded drafts were made of tokens")
        check_predictable(study)
        assert placement is not None or num_engines == 1
        pace = Pace(times, study.steps, study.step_ends_s)
        gap_s = statistics.median(study.gaps_s) if study.gaps_s else 0.0
        self.engines = [_Engine(index, header, times, pace, gap_s) for index in range(num_engines)]
        self.num_placed = [0] * num_engines
        """Requests that were placed at each engine."""
        self.num_moved = 0
        self._block_size = min(header.kv_cache.block_sizes)
        self._placement = placement
        self._all: list[_Served] = []
        self._homeless: list[_Served] = []
        """Requests that wait for any engine to be up."""
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Any]] = []
        """Arrivals, aborts, outages and controls, by time."""
        self._ends: list[tuple[float, int, _End]] = []
        for number, recorded in enumerate(study.requests):
            arrival_s = recorded.arrival_s / rate
            served = _Served(number, recorded, arrival_s)
            self._all.append(served)
            self._plan(arrival_s + (recorded.reached_s - recorded.arrival_s), served)
            if recorded.aborted_s is not None and not recorded.num_outputs:
                self._plan(arrival_s + (recorded.aborted_s - recorded.arrival_s), _Abort(served))
        for at, control in study.controls:
            self._plan(at / rate, control)
        first_s = min((served.result.arrival_s for served in self._all), default=0.0)
        for outage in outages:
            self._plan(first_s + outage.at_s, outage)
        if placement is not None:
            for engine in self.engines:
                placement.open_engine(engine.index, engine.ready_response)

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests, as they were served."""
        return [served.result for served in self._all]

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two tokens of a request."""
        return max((served.longest_gap_s for served in self._all), default=0.0)

    def _plan(self, at: float, what: Any) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), what))

    def run(self) -> Figures:
        """Runs the simulation, from the first arrival to the last token."""
        while True:
            engine = min(filter(self._can_step, self.engines), key=lambda engine: engine.now, default=None)
            queue = min(filter(None, (self._due, self._ends)), key=lambda queue: queue[0], default=None)
            if queue and (engine is None or queue[0][0] <= engine.now):
                at, _, what = heapq.heappop(queue)
                self._happen(at, what)
            elif engine is not None:
                end = engine.step()
                if end is not None:
                    heapq.heappush(self._ends, (engine.now, next(self._numbers), end))
                    engine.rest()
            else:
                break
        num_steps = sum(engine.num_steps for engine in self.engines)
        return make_figures(self.requests, num_steps, sum(engine.num_preemptions for engine in self.engines))

    def _can_step(self, engine: _Engine) -> bool:
        """Returns whether an engine has work. One that is paused for ever has none."""
        if not engine.is_up or not engine.scheduler.has_requests():
            return False
        return engine.num_idle <= (_MAX_IDLE_STEPS if self._due else 1)

    def _happen(self, at: float, what: Any) -> None:
        match what:
            case _End():
                self._deliver(at, what)
            case _Served():
                self._place(what, at)
            case _Abort(served):
                self._abort(served)
            case Outage():
                self._end_engine(self.engines[what.engine], at, what.duration_s)
            case _Recovery(engine):
                self._recover(engine, at)
            case Pause():
                for engine in self.engines:
                    engine.scheduler.set_pause_state(PauseState(what.state))
                    engine.num_idle = 0
            case Reset():
                for engine in self.engines:
                    engine.scheduler.reset_prefix_cache(what.reset_running_requests)

    def _place(self, served: _Served, at: float) -> None:
        """Sends a request to an engine, with the tokens that it has."""
        up = [engine.index for engine in self.engines if engine.is_up]
        if not up:
            self._homeless.append(served)
            return
        recorded, num_outputs = served.recorded, served.result.num_outputs
        add = msgspec.structs.replace(
            recorded.add, request_id=served.request_id, num_output_tokens=recorded.add.num_output_tokens + num_outputs
        )
        request = make_request(add, self._block_size)
        request.set_blocks(0, recorded.blocks)
        request.block_hashes += request.hash_blocks()
        index = up[0]
        if self._placement is not None:
            prompt = list(request.all_token_ids[: recorded.add.num_prompt_tokens])
            asked = EngineCoreRequest(served.request_id, prompt, request.sampling_params, None, at)
            index = self._placement.place(asked, up, num_outputs)
        engine = self.engines[index]
        if engine.add(served, request, at):
            self.num_placed[index] += 1
            served.engine = engine
        else:
            self._forget(served)

    def _abort(self, served: _Served) -> None:
        if served in self._homeless:
            self._homeless.remove(served)
        elif served.engine is not None and not served.result.num_outputs:
            served.engine.scheduler.finish_requests(served.request_id, RequestStatus.FINISHED_ABORTED)
            self._forget(served)

    def _forget(self, served: _Served) -> None:
        if self._placement is not None:
            self._placement.remove(served.request_id)

    def _deliver(self, at: float, end: _End) -> None:
        """Takes in the outputs of a step. Those of an engine that has died meanwhile are lost."""
        engine, placement = end.engine, self._placement
        if engine.incarnation != end.incarnation:
            return
        for one in end.outputs:
            served, _ = engine.served[one.request_id]
            result = served.result
            if one.new_token_ids:
                if result.first_token_s is None:
                    if placement is not None:
                        placement.note_token(one.request_id)
                else:
                    served.longest_gap_s = max(served.longest_gap_s, at - result.last_token_s)
                result.note_tokens(len(one.new_token_ids), at)
            if one.finish_reason is not None:
                result.reason = one.finish_reason
                self._forget(served)
        if placement is not None:
            placement.note_step(EngineCoreOutputs(engine_index=engine.index, timestamp=at, scheduler_stats=end.stats))

    def _end_engine(self, engine: _Engine, at: float, duration_s: float) -> None:
        if not engine.is_up:
            return
        engine.is_up = False
        engine.incarnation += 1
        if self._placement is not None:
            self._placement.close_engine(engine.index)
        moved = [served for served, _ in engine.served.values() if served.result.reason is None]
        engine.start()
        self._plan(at + duration_s, _Recovery(engine))
        for served in moved:
            self._forget(served)
            served.engine = None
            self.num_moved += 1
            self._place(served, at)

    def _recover(self, engine: _Engine, at: float) -> None:
        engine.is_up, engine.now = True, at
        if self._placement is not None:
            self._placement.open_engine(engine.index, engine.ready_response)
        waiting, self._homeless = self._homeless, []
        for served in waiting:
            self._place(served, at)
