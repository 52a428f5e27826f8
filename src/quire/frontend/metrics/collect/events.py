"""What happens to requests as plain numbers: outputs, finished requests, control operations, HTTP exchanges.

No exporter is known here. Two clocks are used and never mixed: `arrival_time` and `iteration_timestamp` are this
process's wall clock; the `*_ts` fields and the engine's `timestamp` are the core's monotonic clock. An interval is the
difference of two stamps of one clock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from quire.outputs import RequestStateStats
from quire.wire.engine_core import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from quire.wire.stats import PrefillStats

_QUEUED, _SCHEDULED, _PREEMPTED = (
    EngineCoreEventType.QUEUED,
    EngineCoreEventType.SCHEDULED,
    EngineCoreEventType.PREEMPTED,
)


class RequestOwner(msgspec.Struct, frozen=True, gc=False):
    """Whose an observation is: what leads from a slow bucket to its request."""

    request_id: str
    """The user's."""
    trace_headers: Mapping[str, str] | None = None
    """Of the W3C trace context, if the request came with one."""

    @property
    def trace_id(self) -> str | None:
        """If the headers name one."""
        parts = (self.trace_headers or {}).get("traceparent", "").split("-")
        return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None

    @property
    def labels(self) -> dict[str, str]:
        """Of an exemplar: the trace first, which is never cut."""
        trace = {} if self.trace_id is None else {"trace_id": self.trace_id}
        return {**trace, "request_id": self.request_id}


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """A request's first token came `latency` seconds after the request."""

    latency: float
    owner: RequestOwner | None = None


class FinishedRequestStats(msgspec.Struct, kw_only=True, gc=False):
    """One finished request (checklist S0-ST-010); seconds. A stage it never reached has no duration: None."""

    request_id: str
    finish_reason: FinishReason
    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens_param: int | None
    queued_time: float | None
    prefill_time: float | None
    decode_time: float | None
    inference_time: float | None
    mean_time_per_output_token: float
    num_cached_tokens: int
    num_preemptions: int
    is_corrupted: bool
    owner: RequestOwner | None = None


class IterationStats(msgspec.Struct, gc=False):
    """What a batch of outputs of one engine step delivered, mostly all of them (checklist S0-ST-002)."""

    iteration_timestamp: float = msgspec.field(default_factory=time.time)
    """Wall clock, one for the whole iteration (checklist S0-ST-017)."""
    num_generation_tokens: int = 0
    prompt_tokens: PrefillStats = msgspec.field(default_factory=PrefillStats)
    """Of the prefills completed in this iteration, by source."""
    num_preempted_reqs: int = 0
    num_corrupted_reqs: int = 0
    first_tokens: list[FirstToken] = []
    inter_token_latencies: dict[float, int] = {}
    """From one output of a request to its next, and how many had it: requests of the same steps wait as long."""
    finished_requests: list[FinishedRequestStats] = []
    max_num_generation_tokens: list[int] = []
    """Per finished user request: its longest output."""
    n_params: list[int] = []
    """Per finished user request: the `n` it asked for."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the prefills completed in this iteration, cached ones among them."""
        return self.prompt_tokens.num_prompt_tokens

    @property
    def time_to_first_tokens(self) -> list[float]:
        """Of the requests whose first token came in this iteration."""
        return [first.latency for first in self.first_tokens]

    def _time_since(self, start: float) -> float:
        """Wall seconds from `start` to this iteration; 0 should the wall clock have been set back."""
        return max(0.0, self.iteration_timestamp - start)

    def update_from_events(self, events: list[EngineCoreEvent], stats: RequestStateStats) -> None:
        """Turns in the life of a request; a preemption keeps the first `scheduled_ts` (checklist S0-ST-003/004)."""
        for event in events:
            if event.type is _QUEUED:
                stats.queued_ts = event.timestamp
            elif event.type is _SCHEDULED:
                stats.scheduled_ts = stats.scheduled_ts or event.timestamp
            elif event.type is _PREEMPTED:
                self.num_preempted_reqs += 1
                stats.num_preemptions += 1

    def update_from_output(
        self,
        output: EngineCoreOutput,
        engine_timestamp: float,
        is_prefilling: bool,
        stats: RequestStateStats,
        num_context_tokens: int = 0,
        owner: RequestOwner | None = None,
    ) -> None:
        """One output of one request, `is_prefilling` if it is the first with tokens (checklist S0-ST-005…008).

        `num_context_tokens` of its prompt have been counted already, with earlier segments of its session. `owner` is
        only of use with the first tokens.
        """
        if output.events:
            self.update_from_events(output.events, stats)
        if output.num_nans_in_logits and not stats.is_corrupted:
            stats.is_corrupted = True
            self.num_corrupted_reqs += 1
        if output.pooling_output is not None:  # its text is computed, and there is no token to wait for
            self._add_prompt_tokens(output.prefill_stats, num_context_tokens)
            stats.first_token_ts = stats.last_token_ts = engine_timestamp
        num_tokens = len(output.new_token_ids)
        if not num_tokens:
            return
        self.num_generation_tokens += num_tokens
        stats.num_generation_tokens += num_tokens
        if not is_prefilling:
            self.add_waits(engine_timestamp - stats.last_token_ts, 1)
        else:
            self._add_prompt_tokens(output.prefill_stats, num_context_tokens)
            stats.first_token_latency = self._time_since(stats.arrival_time)
            self.first_tokens.append(FirstToken(stats.first_token_latency, owner))
            stats.first_token_ts = engine_timestamp
        stats.last_token_ts = engine_timestamp

    def add_waits(self, wait: float, number: int) -> None:
        """`number` outputs came `wait` seconds after those of their requests before."""
        self.inter_token_latencies[wait] = self.inter_token_latencies.get(wait, 0) + number

    def _add_prompt_tokens(self, new: PrefillStats | None, num_context_tokens: int) -> None:
        if new is not None:
            new = new.after(num_context_tokens) if num_context_tokens else new
            self.prompt_tokens.num_prompt_tokens += new.num_prompt_tokens
            self.prompt_tokens.num_computed_tokens += new.num_computed_tokens
            self.prompt_tokens.num_local_cached_tokens += new.num_local_cached_tokens
            self.prompt_tokens.num_external_cached_tokens += new.num_external_cached_tokens

    def update_from_finished_request(
        self,
        request_id: str,
        finish_reason: FinishReason,
        stats: RequestStateStats,
        *,
        num_prompt_tokens: int,
        max_tokens_param: int | None,
        num_cached_tokens: int,
        owner: RequestOwner | None = None,
    ) -> None:
        """Close the books of a request; its formulas are checklist S0-ST-009."""
        decode_time = _interval(stats.first_token_ts, stats.last_token_ts)
        num_tokens = stats.num_generation_tokens
        self.finished_requests.append(
            FinishedRequestStats(
                request_id=request_id,
                finish_reason=finish_reason,
                e2e_latency=self._time_since(stats.arrival_time),
                num_prompt_tokens=num_prompt_tokens,
                num_generation_tokens=num_tokens,
                max_tokens_param=max_tokens_param,
                queued_time=_interval(stats.queued_ts, stats.scheduled_ts),
                prefill_time=_interval(stats.scheduled_ts, stats.first_token_ts),
                decode_time=decode_time,
                inference_time=_interval(stats.scheduled_ts, stats.last_token_ts),
                mean_time_per_output_token=decode_time / (num_tokens - 1) if decode_time and num_tokens > 1 else 0.0,
                num_cached_tokens=num_cached_tokens,
                num_preemptions=stats.num_preemptions,
                is_corrupted=stats.is_corrupted,
                owner=owner,
            )
        )

    def take_segment(self, session: SessionStats) -> None:
        """What was closed last was a segment of a session: it goes into the books of that."""
        session.add(self.finished_requests.pop())

    def update_from_finished_session(self, session: SessionStats, finish_reason: FinishReason) -> None:
        """Close the books of a session whose last segment has been added: one request, however many segments."""
        if session.total is not None:
            session.total.e2e_latency = self._time_since(session.arrival_time)
            session.total.finish_reason = finish_reason
            self.finished_requests.append(session.total)


class SessionStats:
    """The books of one session: those of its segments added up. Time between segments is its user's, not ours.

    `arrival_time` is that of its first input, by the wall clock.
    """

    __slots__ = ("_num_intervals", "arrival_time", "total")

    def __init__(self, arrival_time: float) -> None:
        self.arrival_time = arrival_time
        self.total: FinishedRequestStats | None = None
        self._num_intervals = 0
        """From one token to the next, within segments."""

    @property
    def num_generation_tokens(self) -> int:
        """Of all segments."""
        return 0 if self.total is None else self.total.num_generation_tokens

    def add(self, segment: FinishedRequestStats) -> None:
        """One more segment has ended."""
        self._num_intervals += max(0, segment.num_generation_tokens - 1)
        before, self.total = self.total, segment
        if before is not None:
            for name in ("num_prompt_tokens", "num_generation_tokens", "num_cached_tokens", "num_preemptions"):
                setattr(segment, name, getattr(before, name) + getattr(segment, name))
            for name in ("queued_time", "prefill_time", "decode_time", "inference_time"):
                setattr(segment, name, _add(getattr(before, name), getattr(segment, name)))
            segment.is_corrupted |= before.is_corrupted
            if segment.decode_time is not None and self._num_intervals:
                segment.mean_time_per_output_token = segment.decode_time / self._num_intervals


def _add(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else a + b


def _interval(start: float, end: float) -> float | None:
    """Seconds between two engine stamps; None if one of them was never made."""
    return end - start if start and end else None


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """`handler` is the route's path, never the client's words: those have no bound."""

    method: str
    handler: str
    status: int
    duration_s: float
    request_bytes: int
    response_bytes: int


SLEEP_OPERATIONS = ("sleep", "release_kv_cache_memory", "wake")
WEIGHT_OPERATIONS = ("init", "shutdown", "start", "start_draft", "update", "finish")
"""vLLM's; of these Quire has `update`."""


@dataclass(frozen=True, slots=True)
class ControlOperation:
    """One that has ended, well or not."""

    operation: str
    """One of SLEEP_OPERATIONS or WEIGHT_OPERATIONS."""
    duration_s: float


class ControlOperations:
    """Times what is done inside `timed`, and tells `on_end`."""

    def __init__(self, on_end: Callable[[ControlOperation], None]) -> None:
        self._on_end = on_end
        self.in_flight: Counter[str] = Counter()
        self.sleep_level = 0
        """0: awake."""
        self.sleep_time = 0.0
        """Wall clock of when that was last set; 0 for never."""

    def set_sleep_level(self, level: int) -> None:
        """The engine sleeps that deep from now on."""
        self.sleep_level, self.sleep_time = level, time.time()

    @contextmanager
    def timed(self, operation: str) -> Iterator[ControlOperations]:
        """Around the operation."""
        start = time.monotonic()
        self.in_flight[operation] += 1
        try:
            yield self
        finally:
            self.in_flight[operation] -= 1
            self._on_end(ControlOperation(operation, time.monotonic() - start))
