"""Observers of the scheduler: traces in memory (--trace-events) or in a file (--trace-file), and log lines of steps.

A trace has a few stamps per step, and an event when a request changes its phase. Decoding requests cost nothing per
step: their phase is one slice, made when it ends. Logs contain numbers and ids only, never prompts or outputs.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire import envs
from quire.config.engine import EngineConfig
from quire.engine.heartbeat import HeartbeatWriter
from quire.engine.kv_cache.sizing import KVCacheSizes
from quire.engine.kv_events import KVEventPublisher, KVEventsObserver, find_source
from quire.engine.recording.file import BackgroundFile, FileRecorder
from quire.engine.request import Request, RequestStatus
from quire.engine.sched.interface import SchedulerInterface, SchedulerObserver
from quire.wire.engine_core import EngineCoreOutputs
from quire.wire.execution import ModelRunnerOutput, SchedulerOutput
from quire.wire.trace import ChromeTrace, Event, PhaseTrace, StepTrace, TraceWindow


class _Life:
    """The phases of an unfinished request: the present one and what came before."""

    __slots__ = ("is_resumed", "num_outputs", "phase", "request", "since")

    def __init__(self, request: Request, phase: str, since: float) -> None:
        self.request = request
        self.phase = phase
        self.since = since
        self.num_outputs = 0
        """Number of output tokens when the phase began."""
        self.is_resumed = False

    @property
    def num_decoded(self) -> int:
        """Tokens generated in this phase; 0 for one that does not decode."""
        return max(0, self.request.num_output_tokens - self.num_outputs) if self.phase == "decode" else 0


class _Chunk(NamedTuple):
    request_id: str
    num_tokens: int
    num_computed: int
    """Tokens computed before the chunk."""
    is_last: bool
    """True if the chunk ends with the request's last token."""


class StepTracer(SchedulerObserver):
    """Calls `emit` with a StepTrace after each step, and with a PhaseTrace when a phase of a request is over."""

    def __init__(self, emit: Callable[[StepTrace | PhaseTrace], None]) -> None:
        self._emit = emit
        self._scheduler: SchedulerInterface | None = None
        self._blocks: Any = None
        self._lives: dict[str, _Life] = {}
        self._computing: set[str] = set()
        """Requests whose prompts are not computed."""
        self._in_flight: deque[tuple[float, float, list[_Chunk]]] = deque()
        self._forwarded = 0.0
        self._last_end = 0.0

    def attach(self, scheduler: SchedulerInterface) -> None:
        self._scheduler = scheduler
        manager = getattr(scheduler, "kv_cache_manager", None)  # another scheduler may have another cache
        self._blocks = getattr(manager, "block_pool", None)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the cache without the null block; 0 if the scheduler has another kind of cache."""
        return self._blocks.num_gpu_blocks - 1 if self._blocks is not None else 0

    def on_add(self, request: Request, is_accepted: bool, now: float) -> None:
        if is_accepted:
            if request.request_id in self._lives:  # the one that had this id has ended; the worker does not know it yet
                self._end(request.request_id, self._last_end or now)
            self._lives[request.request_id] = _Life(request, "queued", now)

    def on_finish(
        self, request_ids: list[str] | None, status: RequestStatus, report: bool, ended: Sequence[str], now: float
    ) -> None:
        for request_id in ended:
            self._end(request_id, now)

    def on_schedule(self, output: SchedulerOutput, start: float, end: float) -> None:
        for request_id in output.finished_req_ids:
            life = self._lives.get(request_id)
            if life is not None and life.request.is_finished:
                self._end(request_id, self._last_end or start)
        for request_id in output.preempted_req_ids:
            life = self._lives.get(request_id)
            if life is not None:
                self._computing.discard(request_id)
                self._turn(life, "preempted", start)
        counts = output.num_scheduled_tokens
        chunks: list[_Chunk] = []
        for new in output.scheduled_new_reqs:
            life = self._lives.get(new.req_id)
            if life is not None:
                life.is_resumed = life.phase == "preempted"
                self._turn(life, "prefill", start)
                self._computing.add(new.req_id)
                chunks.append(_make_chunk(life, counts[new.req_id], new.num_computed_tokens))
        if len(self._computing) > len(chunks):
            cached = output.scheduled_cached_reqs
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in self._computing:
                    chunks.append(_make_chunk(self._lives[request_id], counts[request_id], computed))
        self._in_flight.append((start, end, chunks))
        self._forwarded = 0.0

    def on_forward(self, output: SchedulerOutput, now: float) -> None:
        self._forwarded = now

    def on_abandon(self, now: float) -> None:
        self._in_flight.clear()

    def on_update(
        self,
        output: SchedulerOutput,
        model_output: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        start: float,
        end: float,
    ) -> None:
        began, scheduled, chunks = self._in_flight.popleft()
        if chunks:
            self._note_chunks(chunks, scheduled, start)
        self._last_end = start
        if output.total_num_scheduled_tokens:
            assert self._scheduler is not None
            running, waiting = self._scheduler.get_request_counts()
            used = self.num_blocks - self._blocks.get_num_free_blocks() if self._blocks is not None else 0
            forwarded = self._forwarded if scheduled <= self._forwarded <= start else start
            num_rows = len(output.num_scheduled_tokens)
            tokens = output.total_num_scheduled_tokens
            self._emit(StepTrace(began, scheduled, forwarded, start, end, tokens, num_rows, running, waiting, used))

    def _note_chunks(self, chunks: list[_Chunk], start: float, end: float) -> None:
        for chunk in chunks:
            life = self._lives.get(chunk.request_id)
            if life is None or chunk.request_id not in self._computing:
                continue  # aborted or preempted meanwhile
            num_tokens, num_computed = chunk.num_tokens, chunk.num_computed
            self._emit(PhaseTrace(chunk.request_id, "prefill", start, end, num_tokens, num_computed, life.is_resumed))
            if chunk.is_last:
                self._computing.discard(chunk.request_id)
                life.phase, life.since, life.num_outputs = "decode", end, life.request.num_output_tokens

    def _turn(self, life: _Life, phase: str, now: float) -> None:
        """Ends a phase and begins another one."""
        if life.phase in ("queued", "preempted", "decode"):
            num_tokens = life.num_decoded
            if num_tokens or life.phase != "decode":
                request_id = life.request.request_id
                self._emit(PhaseTrace(request_id, life.phase, life.since, max(now, life.since), num_tokens))
        life.phase, life.since = phase, now

    def _end(self, request_id: str, now: float) -> None:
        life = self._lives.pop(request_id, None)
        self._computing.discard(request_id)
        if life is not None:
            self._turn(life, "ended", now)

    def get_open_phases(self, now: float) -> list[PhaseTrace]:
        """Returns the phases of unfinished requests, up to now."""
        return [
            PhaseTrace(request_id, life.phase, life.since, now, life.num_decoded)
            for request_id, life in self._lives.items()
            if life.phase in ("queued", "preempted", "decode")
        ]


def _make_chunk(life: _Life, num_tokens: int, num_computed: int) -> _Chunk:
    is_last = num_computed + num_tokens >= life.request.num_tokens
    return _Chunk(life.request.request_id, num_tokens, num_computed, is_last)


class TraceBuffer:
    """Keeps the last events of a tracer. Used on the core's thread."""

    def __init__(self, max_events: int) -> None:
        self._events: deque[StepTrace | PhaseTrace] = deque(maxlen=max_events)
        self.tracer = StepTracer(self._events.append)

    def get_window(self, seconds: float, now: float | None = None) -> TraceWindow:
        """Returns the events of the last `seconds`."""
        now = time.monotonic() if now is None else now
        start = now - seconds
        recent = [event for event in self._events if event.end >= start]
        phases = [event for event in recent if isinstance(event, PhaseTrace)]
        return TraceWindow(
            start,
            now,
            [event for event in recent if isinstance(event, StepTrace)],
            phases + self.tracer.get_open_phases(now),
            self.tracer.num_blocks,
        )


WRITE_INTERVAL_S = 0.5
MAX_PENDING = 1 << 17
"""Most events that wait to be written; a disk that is slower than the engine ends the trace, not the engine."""


class TraceFile(StepTracer):
    """Writes a JSON array of trace events, one per line. Perfetto also reads a file whose end is missing."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file exists or cannot be made."""
        super().__init__(self._note)
        self._trace = ChromeTrace()
        self._pending: list[StepTrace | PhaseTrace] = []
        head = b"[\n" + b",\n".join(map(msgspec.json.encode, self._trace.start()))
        self._file = BackgroundFile(path, "--trace-file", WRITE_INTERVAL_S, self._take, head=head, tail=b"\n]\n")

    def _note(self, event: StepTrace | PhaseTrace) -> None:
        if self._file.is_over:
            return
        self._pending.append(event)
        if len(self._pending) > MAX_PENDING:
            self._file.give_up(f"{MAX_PENDING} events wait to be written")

    def close(self) -> None:
        """Writes the remaining events, and the end of the file. May be called twice."""
        self._file.close()

    def _take(self) -> bytes:
        pending, self._pending = self._pending, []
        return b"".join(b",\n" + msgspec.json.encode(event) for event in self._to_events(pending))

    def _to_events(self, noted: Iterable[StepTrace | PhaseTrace]) -> Iterator[Event]:
        for one in noted:
            yield from self._trace.steps([one]) if isinstance(one, StepTrace) else self._trace.phases([one])


def describe_step(output: SchedulerOutput) -> str:
    """Returns one line that describes a step: how many tokens each request computes, and which requests have ended."""
    cached = output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    new_ids = set(starts)
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    parts = [
        f"{request_id}{' (new)' if request_id in new_ids else ''}: {starts.get(request_id)}+{num_tokens}"
        for request_id, num_tokens in output.num_scheduled_tokens.items()
    ]
    return (
        f"{output.total_num_scheduled_tokens} tokens of {len(parts)} requests (computed+scheduled) [{', '.join(parts)}]"
        f", finished {sorted(output.finished_req_ids)}, preempted {sorted(output.preempted_req_ids)}"
    )


def describe_iteration(index: int, output: SchedulerOutput, elapsed_s: float) -> str:
    """Returns the iteration log line. A request that computes one token (and drafts) is generating."""
    num_generating = num_generated = 0
    for request_id in output.scheduled_cached_reqs.req_ids:
        num_tokens = output.num_scheduled_tokens[request_id]
        if num_tokens == 1 + len(output.scheduled_spec_decode_tokens.get(request_id, ())):
            num_generating += 1
            num_generated += num_tokens
    return (
        f"Iteration({index}): {len(output.num_scheduled_tokens) - num_generating} context requests, "
        f"{output.total_num_scheduled_tokens - num_generated} context tokens, {num_generating} generation requests, "
        f"{num_generated} generation tokens, elapsed {elapsed_s * 1e3:.2f} ms"
    )


def log_error_detail(logger: logging.Logger, output: SchedulerOutput, request_counts: tuple[int, int]) -> None:
    """Logs the input of a step that failed. Raises nothing: the reported error must not be hidden."""
    try:
        logger.error("the step that failed: %s; %d running, %d waiting", describe_step(output), *request_counts)
    except Exception:
        logger.exception("the step that failed could not be described")


def make_observers(
    config: EngineConfig, sizes: KVCacheSizes, heartbeat: HeartbeatWriter, max_concurrent_steps: int
) -> tuple[list[SchedulerObserver], TraceBuffer | None]:
    """Returns the observers that the configuration asks for, and the traces that clients can read. Raises ConfigError
    if one cannot work."""
    observability = config.observability_config
    observers: list[SchedulerObserver] = []
    traces = TraceBuffer(observability.trace_events) if observability.trace_events else None
    if traces is not None:
        observers.append(traces.tracer)
    if observability.record is not None:
        observers.append(FileRecorder(config, sizes, max_concurrent_steps))
    if observability.trace_file is not None:
        observers.append(TraceFile(Path(observability.trace_file)))
    if find_source(config) is not None:
        specs = [group.kv_cache_spec for group in sizes.config.kv_cache_groups]
        publisher = KVEventPublisher(
            observability.kv_events,
            specs,
            config.parallel_config.engine_index,
            first_sequence=heartbeat.event_sequence,
            note_sequence=heartbeat.note_event_sequence,
            uses_short_hashes=envs.KV_EVENTS_USE_INT_BLOCK_HASHES.get() != "0",
        )
        observers.append(KVEventsObserver(publisher))
    return observers, traces


def of_incarnation(config: EngineConfig, incarnation: int) -> EngineConfig:
    """Returns the configuration of a core that was started `incarnation` times before.

    It writes files of its own, FILE.1, FILE.2, ..., and leaves those of the cores before it as they are. Engines beside
    the first one write FILE.engine1, FILE.engine1.1, ...
    """
    observability = config.observability_config
    engine_index = config.parallel_config.engine_index
    suffix = (f".engine{engine_index}" if engine_index else "") + (f".{incarnation}" if incarnation else "")
    if not suffix or (observability.record is None and observability.trace_file is None):
        return config
    observability = dataclasses.replace(
        observability,
        record=_add_suffix(observability.record, suffix),
        trace_file=_add_suffix(observability.trace_file, suffix),
    )
    return dataclasses.replace(config, observability_config=observability)


def _add_suffix(path: str | None, suffix: str) -> str | None:
    return None if path is None else f"{path}{suffix}"
