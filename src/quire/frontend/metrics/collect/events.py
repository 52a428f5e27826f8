"""Numbers of what happens to requests: outputs, finished requests, control operations, HTTP exchanges.

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
from quire.wire.engine_core import EngineCoreEventType, EngineCoreOutput, FinishReason
from quire.wire.stats import PrefillStats

_QUEUED, _SCHEDULED, _PREEMPTED = (
    EngineCoreEventType.QUEUED,
    EngineCoreEventType.SCHEDULED,
    EngineCoreEventType.PREEMPTED,
)


class RequestOwner(msgspec.Struct, frozen=True, gc=False):
    """The request that an observation belongs to. An exemplar leads from a slow bucket to it."""

    request_id: str
    """The id that the user knows."""
    trace_headers: Mapping[str, str] | None = None
    """Headers of the W3C trace context, if the request came with one."""

    @property
    def trace_id(self) -> str | None:
        """Returns the trace id that the headers name; None without one."""
        parts = (self.trace_headers or {}).get("traceparent", "").split("-")
        return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None

    @property
    def labels(self) -> dict[str, str]:
        """Returns the labels of an exemplar. The trace comes first, because labels are cut from the end."""
        trace = {} if self.trace_id is None else {"trace_id": self.trace_id}
        return {**trace, "request_id": self.request_id}


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The first token of a request, `latency` seconds after the request arrived."""

    latency: float
    owner: RequestOwner | None = None


class FinishedRequestStats(msgspec.Struct, kw_only=True, gc=False):
    """Numbers of one finished request; durations in seconds. A stage that the request never reached is None."""

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
    num_draft_tokens: int | None = None
    """Verified draft tokens; None without speculation, like the next one."""
    num_accepted_draft_tokens: int | None = None


class IterationStats(msgspec.Struct, gc=False):
    """Numbers of a batch of outputs of one engine step; most steps are one batch."""

    iteration_timestamp: float = msgspec.field(default_factory=time.time)
    """Wall clock, the same for the whole iteration."""
    num_generation_tokens: int = 0
    prompt_tokens: PrefillStats = msgspec.field(default_factory=PrefillStats)
    """Prompt tokens of the prefills completed in this iteration, by source."""
    num_preempted_reqs: int = 0
    num_corrupted_reqs: int = 0
    first_tokens: list[FirstToken] = []
    inter_token_latencies: dict[float, int] = {}
    """Seconds from one output of a request to its next, with the number of requests. Requests of the same steps wait
    equally long."""
    finished_requests: list[FinishedRequestStats] = []
    max_num_generation_tokens: list[int] = []
    """Longest output of each finished user request."""
    n_params: list[int] = []
    """The `n` that each finished user request asked for."""
    tokens_of_adapters: dict[str, tuple[int, int]] = {}
    """The part of the (prompt, generated) tokens that belongs to requests with an adapter, by its name."""

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the prompt tokens of the prefills completed in this iteration, cached ones included."""
        return self.prompt_tokens.num_prompt_tokens

    @property
    def time_to_first_tokens(self) -> list[float]:
        """Returns the latencies of the requests whose first token came in this iteration."""
        return [first.latency for first in self.first_tokens]

    def _time_since(self, start: float) -> float:
        """Returns the wall seconds from `start` to this iteration; 0 if the wall clock was set back."""
        return max(0.0, self.iteration_timestamp - start)

    def update_from_output(
        self,
        output: EngineCoreOutput,
        engine_timestamp: float,
        is_prefilling: bool,
        stats: RequestStateStats,
        num_context_tokens: int = 0,
        owner: RequestOwner | None = None,
    ) -> None:
        """Records one output of one request; `is_prefilling` if it is the first with tokens.

        `num_context_tokens` of the prompt were counted with earlier segments of the session. `owner` is used with first
        tokens only.
        """
        for event in output.events or ():
            if event.type is _QUEUED:
                stats.queued_ts = event.timestamp
            elif event.type is _SCHEDULED:
                stats.scheduled_ts = stats.scheduled_ts or event.timestamp  # a preemption keeps the first
            elif event.type is _PREEMPTED:
                self.num_preempted_reqs += 1
                stats.num_preemptions += 1
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

    def add_adapter_tokens(self, adapter: str, num_prompt: int, num_generation: int) -> None:
        """Records that so many of the tokens belong to requests with an adapter."""
        prompt, generation = self.tokens_of_adapters.get(adapter, (0, 0))
        self.tokens_of_adapters[adapter] = prompt + num_prompt, generation + num_generation

    def add_waits(self, wait: float, number: int) -> None:
        """Records `number` outputs that came `wait` seconds after the previous outputs of their requests."""
        self.inter_token_latencies[wait] = self.inter_token_latencies.get(wait, 0) + number

    def _add_prompt_tokens(self, new: PrefillStats | None, num_context_tokens: int) -> None:
        if new is not None:
            new = new.after(num_context_tokens) if num_context_tokens else new
            self.prompt_tokens.num_prompt_tokens += new.num_prompt_tokens
            self.prompt_tokens.num_computed_tokens += new.num_computed_tokens
            self.prompt_tokens.num_local_cached_tokens += new.num_local_cached_tokens
            self.prompt_tokens.num_external_cached_tokens += new.num_external_cached_tokens
            by_source = self.prompt_tokens.external_by_source
            for source, num_tokens in new.external_by_source.items():
                by_source[source] = by_source.get(source, 0) + num_tokens

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
        drafts: tuple[int, int] | None = None,
    ) -> None:
        """Records a finished request and computes its durations. `drafts` are its verified and accepted draft tokens,
        None without speculation."""
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
                num_draft_tokens=None if drafts is None else drafts[0],
                num_accepted_draft_tokens=None if drafts is None else drafts[1],
            )
        )

    def take_segment(self, session: SessionStats) -> None:
        """Moves the last finished request, a segment of a session, into the numbers of the session."""
        session.add(self.finished_requests.pop())

    def update_from_finished_session(self, session: SessionStats, finish_reason: FinishReason) -> None:
        """Records a finished session as one request. Its last segment has been added."""
        if session.total is not None:
            session.total.e2e_latency = self._time_since(session.arrival_time)
            session.total.finish_reason = finish_reason
            self.finished_requests.append(session.total)


class SessionStats:
    """Numbers of one session: the sums over its segments. Time between segments belongs to the user and is left out.

    `arrival_time` is the wall-clock time of the first input.
    """

    __slots__ = ("_num_intervals", "arrival_time", "total")

    def __init__(self, arrival_time: float) -> None:
        self.arrival_time = arrival_time
        self.total: FinishedRequestStats | None = None
        self._num_intervals = 0
        """Number of intervals between two tokens of one segment."""

    @property
    def num_generation_tokens(self) -> int:
        """Returns the number of tokens generated by all segments."""
        return 0 if self.total is None else self.total.num_generation_tokens

    def add(self, segment: FinishedRequestStats) -> None:
        """Adds a finished segment."""
        self._num_intervals += max(0, segment.num_generation_tokens - 1)
        before, self.total = self.total, segment
        if before is not None:
            for name in ("num_prompt_tokens", "num_generation_tokens", "num_cached_tokens", "num_preemptions"):
                setattr(segment, name, getattr(before, name) + getattr(segment, name))
            for name in (*_DURATIONS, "num_draft_tokens", "num_accepted_draft_tokens"):
                setattr(segment, name, _add(getattr(before, name), getattr(segment, name)))
            segment.is_corrupted |= before.is_corrupted
            if segment.decode_time is not None and self._num_intervals:
                segment.mean_time_per_output_token = segment.decode_time / self._num_intervals


_DURATIONS = ("queued_time", "prefill_time", "decode_time", "inference_time")


def _add(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else a + b


def _interval(start: float, end: float) -> float | None:
    """Returns the seconds between two engine stamps; None if one of them is missing."""
    return end - start if start and end else None


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """An answered HTTP request. `handler` is the path of the route: paths sent by clients would make the labels
    unbounded."""

    method: str
    handler: str
    status: int
    duration_s: float
    request_bytes: int
    response_bytes: int


SLEEP_OPERATIONS = ("sleep", "release_kv_cache_memory", "wake")
WEIGHT_OPERATIONS = ("init", "shutdown", "start", "start_draft", "update", "finish")
"""vLLM's operations; Quire has `update`."""


@dataclass(frozen=True, slots=True)
class ControlOperation:
    """A control operation that has ended, successfully or not."""

    operation: str
    """One of SLEEP_OPERATIONS or WEIGHT_OPERATIONS."""
    duration_s: float


class ControlOperations:
    """Times the operations run inside `timed`, and reports each to `on_end`."""

    def __init__(self, on_end: Callable[[ControlOperation], None]) -> None:
        self._on_end = on_end
        self.in_flight: Counter[str] = Counter()
        self.sleep_level = 0
        """Current sleep level; 0: awake."""
        self.sleep_time = 0.0
        """Wall-clock time at which `sleep_level` was last set; 0 if it never was."""

    def set_sleep_level(self, level: int) -> None:
        """Sets the sleep level of the engine."""
        self.sleep_level, self.sleep_time = level, time.time()

    @contextmanager
    def timed(self, operation: str) -> Iterator[ControlOperations]:
        """Times the operation that runs in its context."""
        start = time.monotonic()
        self.in_flight[operation] += 1
        try:
            yield self
        finally:
            self.in_flight[operation] -= 1
            self._on_end(ControlOperation(operation, time.monotonic() - start))
