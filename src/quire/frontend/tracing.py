"""Reports of an engine's start and of finished requests: log line, start-up file, and spans.

A finished request gives one record, however many outputs its prompt has. Time stamps of the core and of this process
are put on the wall clock with one look at both clocks: both processes run on one machine. `otel.py` exports the
records; this module knows no exporter.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec

from quire import envs
from quire.config.observability import ObservabilityConfig
from quire.errors import ConfigError
from quire.frontend.request_state import RequestState
from quire.logger import init_logger
from quire.outputs import RequestStateStats
from quire.resolve import resolve
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.timeline import Stamp, get_stamps, stamp
from quire.wire.engine_core import EngineCoreReadyResponse, FinishReason
from quire.wire.process import peak_memory_bytes

logger = init_logger(__name__)

PREPARE_MODEL = ("KV cache", "warm-up")
"""The stamps of the phase that vLLM calls "Prepare model"."""


@dataclass(slots=True)
class StartPhase:
    """A phase of a start; seconds by the wall clock."""

    name: str
    start_time: float
    end_time: float
    cpu_s: float
    """CPU time that its process used meanwhile, over all threads."""
    phases: list[StartPhase] = field(default_factory=list)


def make_start_phases(frontend: Sequence[Stamp], core: Sequence[Stamp]) -> StartPhase:
    """Returns the phases of a start, one process after the other, each phase from one stamp to the next.

    Both lists begin with the process. `core` is empty where the core lives in the frontend's process, whose list then
    has the core's stamps, too.
    """
    to_wall = time.time() - time.monotonic()
    whole = _make_process("engine start", frontend, to_wall)
    if core:
        whole.phases.append(_make_process("EngineCoreProc init", core, to_wall))
    return whole


def _make_process(name: str, stamps: Sequence[Stamp], to_wall: float) -> StartPhase:
    whole = _make_phase(name, stamps[0], stamps[-1], to_wall)
    prepare: StartPhase | None = None
    for before, after in pairwise(stamps):
        phase = _make_phase(after.name, before, after, to_wall)
        if after.name not in PREPARE_MODEL:
            whole.phases.append(phase)
            continue
        if prepare is None:
            prepare = _make_phase("Prepare model", before, after, to_wall)
            whole.phases.append(prepare)
        prepare.phases.append(phase)
        prepare.end_time = phase.end_time
        prepare.cpu_s = sum(part.cpu_s for part in prepare.phases)
    return whole


def _make_phase(name: str, start: Stamp, end: Stamp, to_wall: float) -> StartPhase:
    return StartPhase(name, start.time_s + to_wall, end.time_s + to_wall, end.cpu_s - start.cpu_s)


MIB = 1 << 20


class Startup(msgspec.Struct):
    """The report, as JSON. `core` is empty where the core lives in the frontend's process: one list has both."""

    frontend: list[Stamp]
    core: list[Stamp]
    frontend_peak_memory_bytes: int
    core_peak_memory_bytes: int


class StartupReport:
    """Made when the engine is ready; `finish` once its first output is there."""

    def __init__(self, ready: EngineCoreReadyResponse) -> None:
        stamp("engine ready")
        self._ready = ready
        logger.info("%s", describe_start(get_stamps(), ready.stamps, peak_memory_bytes(), ready.peak_memory_bytes))

    def finish(self) -> None:
        """Writes the report, where one is wanted. Logs an error for a file that cannot be written."""
        stamp("first output")
        name = envs.STARTUP_REPORT.get()
        if not name:
            return
        startup = Startup(get_stamps(), self._ready.stamps, peak_memory_bytes(), self._ready.peak_memory_bytes)
        part = Path(f"{name}.{os.getpid()}.part")
        try:
            part.write_bytes(msgspec.json.encode(startup))
            part.replace(name)  # a reader that waits for the file finds it whole
        except OSError as e:
            logger.warning("%s=%s cannot be written: %s", envs.STARTUP_REPORT.name, name, e.strerror or e)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def describe_start(frontend: Sequence[Stamp], core: Sequence[Stamp], frontend_memory: int, core_memory: int) -> str:
    """Returns the line for the log. Without a core's stamps the core is in this process."""
    start, end = frontend[0], frontend[-1]
    text = f"engine ready {end.time_s - start.time_s:.2f} s after its process began"
    memory = f"peak memory {frontend_memory // MIB} MiB"
    if core:
        text += f", its core after {core[-1].time_s - core[0].time_s:.2f} s"
        memory += f", core {core_memory // MIB} MiB"
    return f"{text}; {memory}"


@dataclass(slots=True)
class RequestRecord:
    """A finished request. Times are seconds; None for a phase it did not reach, or without statistics."""

    request_id: str
    """The user's id."""
    model: str
    arrival_time: float
    end_time: float
    """Start and end by the wall clock."""
    params: SamplingParams | None
    """None for a pooling request."""
    n: int
    is_stream: bool
    trace_headers: Mapping[str, str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    to_wall: float = field(default_factory=lambda: time.time() - time.monotonic())
    """Offset from monotonic stamps to the wall clock."""
    time_to_first_token: float | None = None
    queue: tuple[float, float] | None = None
    """Times of waiting, prefill and generation: start and end by the wall clock."""
    prefill: tuple[float, float] | None = None
    decode: tuple[float, float] | None = None
    load: tuple[float, float] | None = None
    """Time of a load of KV blocks; a part of the queue's."""


class SpanSender(Protocol):
    """Destination of records."""

    def send(self, record: RequestRecord) -> None:
        """Takes a record. Never blocks."""

    def send_start(self, start: StartPhase) -> None:
        """Takes the phases of the engine's start. Never blocks."""

    def close(self) -> None:
        """Sends what is left, in bounded time."""


def make_span_sender(config: ObservabilityConfig) -> SpanSender | None:
    """Returns the sender that --otlp-traces-endpoint asks for. Raises ConfigError without the extra `otel`, or for an
    invalid endpoint."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        sender_class = resolve("quire.frontend.otel:SpanSender")
    except ImportError as e:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry, which is not installed ({e}); pip install 'quire[otel]'"
        ) from None
    sender: SpanSender = sender_class(
        config.otlp_traces_endpoint, is_detailed=config.collect_detailed_traces is not None
    )
    return sender


class RequestTracer:
    """Makes records of requests as they finish. An error of `send` is logged once and affects no request."""

    def __init__(self, model: str, send: Callable[[RequestRecord], None]) -> None:
        self._model = model
        self._send = send
        self._parts: dict[str, RequestRecord] = {}
        """Finished outputs of requests with unfinished ones, by internal id."""
        self._has_failed = False

    def note_finished(self, state: RequestState, reason: FinishReason, error: str | None = None) -> None:
        """Takes in the end of a request, or of one of its n outputs."""
        try:
            self._note(state, reason, error)
        except Exception:
            if not self._has_failed:
                logger.exception("the trace of a request was lost; further losses are not logged")
            self._has_failed = True

    def _note(self, state: RequestState, reason: FinishReason, error: str | None) -> None:
        parent = state.parent
        if parent is None:
            self._send(self._add(self._make(state, 1), state, reason, error))
            return
        record = self._parts.get(parent.request_id) or self._make(state, parent.n)
        self._parts[parent.request_id] = self._add(record, state, reason, error)
        if not parent.child_requests:
            self._send(self._parts.pop(parent.request_id))

    def _make(self, state: RequestState, n: int) -> RequestRecord:
        request = state.request
        return RequestRecord(
            request_id=state.external_req_id,
            model=self._model,
            arrival_time=request.arrival_time,
            end_time=0.0,
            params=request.sampling_params,
            n=n,
            is_stream=state.output_kind is RequestOutputKind.DELTA,
            trace_headers=request.trace_headers or {},
            num_prompt_tokens=state.num_prompt_tokens,
            num_cached_tokens=state.num_cached_tokens or 0,
        )

    def _add(
        self, record: RequestRecord, state: RequestState, reason: FinishReason, error: str | None
    ) -> RequestRecord:
        record.end_time = time.time()
        if state.load_span is not None:
            record.load = _span(record.load, record.to_wall, *state.load_span)
        record.finish_reasons.append(str(reason))
        if reason is FinishReason.ERROR:
            record.error = error or record.error or "GenerationError"
        if (stats := state.stats) is not None:
            record.num_output_tokens += stats.num_generation_tokens
            _add_times(record, stats)
        return record


def _add_times(record: RequestRecord, stats: RequestStateStats) -> None:
    to_wall = record.to_wall
    if stats.first_token_ts:
        latency = stats.first_token_latency
        record.time_to_first_token = min(latency, record.time_to_first_token or latency)
    record.queue = _span(record.queue, to_wall, stats.queued_ts, stats.scheduled_ts)
    record.prefill = _span(record.prefill, to_wall, stats.scheduled_ts, stats.first_token_ts)
    record.decode = _span(record.decode, to_wall, stats.first_token_ts, stats.last_token_ts)


def _span(before: tuple[float, float] | None, to_wall: float, start: float, end: float) -> tuple[float, float] | None:
    """Returns (earliest start, latest end) over the outputs of a request."""
    if not start or not end:
        return before
    start, end = start + to_wall, max(start, end) + to_wall
    return (start, end) if before is None else (min(before[0], start), max(before[1], end))
