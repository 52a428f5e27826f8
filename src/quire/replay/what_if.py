"""Predicts a recorded load under other settings: the real scheduler and KV cache on a virtual clock.

Requests reach the core at their recorded times, whatever happens to those before them, and get as many tokens as they
got; the time between a request's arrival at the frontend and its arrival at the core stays as it was. Steps take what a
fitted `StepTimes` predicts. A request that was aborted after some tokens ends after as many, like one whose client
found a stop string; one that was aborted before its first is aborted at the same time.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from quire.config.engine import SchedulerConfig
from quire.engine.recording.format import Header, Pause, Reset
from quire.engine.request import RequestStatus
from quire.engine.sched.interface import PauseState
from quire.engine.structured_output.request import GrammarVerdict
from quire.errors import ConfigError, QuireError
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
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput

PERCENTILES = (50, 90, 99)
_QUANTUM_S = 1e-3
"""Seconds that pass when a step computes nothing and nothing is due."""
_MAX_IDLE_STEPS = 10_000


@dataclass(frozen=True)
class Changes:
    """Settings that differ from the recorded ones; None leaves one as it was."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    num_gpu_blocks: int | None = None
    scheduling_policy: str | None = None
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    watermark: float | None = None

    def apply(self, header: Header) -> Header:
        """Returns the changed engine. Raises ConfigError for a question that a recording cannot answer."""
        names = ("max_num_batched_tokens", "max_num_seqs", "scheduling_policy", "long_prefill_token_threshold",
                 "enable_chunked_prefill", "watermark")  # fmt: skip
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.max_num_batched_tokens is not None:
            given["max_num_scheduled_tokens"] = self.max_num_batched_tokens
        scheduler: SchedulerConfig = replace(header.scheduler, **given)
        kv_cache, caching = header.kv_cache, header.enable_caching
        if self.num_gpu_blocks is not None:
            kv_cache = msgspec.structs.replace(kv_cache, num_blocks=self.num_gpu_blocks)
        if self.enable_prefix_caching is not None:
            if self.enable_prefix_caching and not caching:
                raise ConfigError(
                    "--enable-prefix-caching: the recording was made without, and so knows no prefixes; record once "
                    "with prefix caching"
                )
            caching = self.enable_prefix_caching
        return msgspec.structs.replace(header, scheduler=scheduler, kv_cache=kv_cache, enable_caching=caching)

    @property
    def any(self) -> bool:
        """True if there is any change."""
        return self != Changes()


class Figures(msgspec.Struct):
    """Figures of a served load. Times to a first token are from a request's arrival; per output token, after the
    first."""

    num_requests: int
    num_finished: int
    output_tokens: int
    duration_s: float
    """From the first arrival to the last token."""
    output_tokens_per_s: float
    num_steps: int
    num_preemptions: int
    cached_tokens: int
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]


def measure(study: Study) -> Figures:
    """Returns the figures of the recording."""
    return make_figures(study.requests, study.num_steps, study.num_preemptions)


def make_figures(requests: Iterable[RecordedRequest], num_steps: int, num_preemptions: int) -> Figures:
    """Returns the figures of requests that have been served."""
    requests = list(requests)
    begun = [request for request in requests if request.first_token_s is not None]
    start = min((request.arrival_s for request in requests), default=0.0)
    duration = max((request.last_token_s for request in begun), default=start) - start
    tokens = sum(request.num_outputs for request in requests)
    return Figures(
        num_requests=len(requests),
        num_finished=sum(request.reason is not None for request in requests),
        output_tokens=tokens,
        duration_s=duration,
        output_tokens_per_s=tokens / duration if duration else 0.0,
        num_steps=num_steps,
        num_preemptions=num_preemptions,
        cached_tokens=sum(request.num_cached_tokens or 0 for request in requests),
        ttft_ms=_percentiles_ms([r.first_token_s - r.arrival_s for r in begun if r.first_token_s is not None]),
        tpot_ms=_percentiles_ms(
            [
                (r.last_token_s - r.first_token_s) / (r.num_outputs - 1)
                for r in begun
                if r.first_token_s is not None and r.num_outputs > 1
            ]
        ),
    )


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    places = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in PERCENTILES}
    return {name: value * 1e3 for name, value in {"mean": statistics.fmean(ordered), **places}.items()}


class _Served:
    """A request in the simulation: its recorded output, and the simulated one."""

    def __init__(self, number: int, recorded: RecordedRequest) -> None:
        self.request_id = str(number)
        self.recorded = recorded
        self.result = RecordedRequest(recorded.add, recorded.arrival_s, recorded.reached_s)
        self.request: ReplayedRequest | None = None


class WhatIf:
    """One simulation."""

    def __init__(self, study: Study, header: Header, times: StepTimes) -> None:
        if study.has_drafts:
            raise ConfigError("what-if does not know speculative decoding: recorded drafts were made of tokens")
        self._times = times
        self._pace = Pace(times, study.steps, study.step_ends_s)
        self._header = header
        self._block_size = min(header.kv_cache.block_sizes)
        self._grammars = ReplayedGrammars()
        self._scheduler = make_scheduler(header, self._grammars)
        self._gap_s = statistics.median(study.gaps_s) if study.gaps_s else 0.0
        self._now = 0.0
        self._num_steps = self._num_preemptions = 0
        self._served: dict[str, _Served] = {}
        self._all: list[_Served] = []
        self._due: list[tuple[float, int, Any]] = []
        for number, recorded in enumerate(study.requests):
            served = _Served(number, recorded)
            self._all.append(served)
            self._plan(recorded.reached_s, served)
            if recorded.aborted_s is not None and not recorded.num_outputs:
                self._plan(recorded.aborted_s, served)
        for at, control in study.controls:
            self._plan(at, control)

    def _plan(self, at: float, what: Any) -> None:
        heapq.heappush(self._due, (at, len(self._due), what))

    def run(self) -> Figures:
        """Runs the simulation, from the first arrival to the last token."""
        idle = 0
        while self._due or self._scheduler.has_requests():
            self._happen()
            if not self._scheduler.has_requests():
                if self._due:
                    self._now = max(self._now, self._due[0][0])
                continue
            idle = 0 if self._step() else idle + 1
            if idle > _MAX_IDLE_STEPS or (idle > 1 and not self._due):
                break  # paused for ever
        return make_figures((served.result for served in self._all), self._num_steps, self._num_preemptions)

    def _happen(self) -> None:
        """Applies everything that is due by now."""
        while self._due and self._due[0][0] <= self._now:
            _, _, what = heapq.heappop(self._due)
            match what:
                case _Served(request=None) as served:
                    self._add(served)
                case _Served() as served:
                    if not served.result.num_outputs:
                        self._scheduler.finish_requests(served.request_id, RequestStatus.FINISHED_ABORTED)
                case Pause() as pause:
                    self._scheduler.set_pause_state(PauseState(pause.state))
                case Reset() as reset:
                    self._scheduler.reset_prefix_cache(reset.reset_running_requests)

    def _add(self, served: _Served) -> None:
        recorded = served.recorded
        request = make_request(msgspec.structs.replace(recorded.add, request_id=served.request_id), self._block_size)
        served.request = request
        self._served[served.request_id] = served
        request.set_blocks(0, recorded.blocks)
        request.block_hashes += request.hash_blocks()
        self._set_grammar(request, recorded)
        try:
            self._scheduler.add_request(request)
        except QuireError:
            del self._served[served.request_id]

    def _set_grammar(self, request: ReplayedRequest, recorded: RecordedRequest) -> None:
        if isinstance(request.structured_output, ReplayedGrammar):
            self._grammars.ready.add(request.request_id)
            if recorded.failed is not None:
                is_complete = recorded.failed is RequestStatus.FINISHED_STOPPED
                request.structured_output.start = GrammarVerdict.COMPLETE if is_complete else GrammarVerdict.BROKEN

    def _step(self) -> bool:
        """Runs one step. Returns whether it computed anything."""
        output = self._scheduler.schedule()
        self._num_preemptions += len(output.preempted_req_ids)
        if not output.total_num_scheduled_tokens:
            self._scheduler.update_from_output(output, ModelRunnerOutput())
            self._now += _QUANTUM_S
            return False
        pace = self._pace.of(self._num_steps, self._now)
        self._num_steps += 1
        for new in output.scheduled_new_reqs:
            result = self._served[new.req_id].result
            if result.num_cached_tokens is None:
                result.num_cached_tokens = new.num_computed_tokens
        self._now += self._times.predict(StepWork.of(output)) * pace
        outputs = self._scheduler.update_from_output(output, self._compute(output))
        for batch in outputs.values():
            for one in batch.outputs:
                result = self._served[one.request_id].result
                if one.new_token_ids:
                    result.note_tokens(len(one.new_token_ids), self._now)
                if one.finish_reason is not None:
                    result.reason = one.finish_reason
        self._now += self._gap_s
        return True

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Returns a token for each request whose tokens are all computed; STOP_TOKEN for its last one."""
        tokens: list[list[int]] = []
        pooled: dict[str, Any] = {}
        for request_id in output.num_scheduled_tokens:
            served = self._served[request_id]
            request = served.request
            if request is None or request.num_computed_tokens < request.num_tokens:
                tokens.append([])
                continue
            if request.sampling_params is None:
                pooled[request_id] = np.zeros(1)
            is_last = served.result.num_outputs + 1 >= max(1, served.recorded.num_outputs)
            tokens.append([STOP_TOKEN if is_last else 0])
        return ModelRunnerOutput(list(output.num_scheduled_tokens), tokens, pooler_output=pooled)


def predict(study: Study, times: StepTimes, changes: Changes | None = None) -> Figures:
    """Returns how the recorded load would be served. Raises ConfigError for changes that make no engine."""
    header = study.header if changes is None else changes.apply(study.header)
    return WhatIf(study, header, times).run()
