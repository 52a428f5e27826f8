"""Traces: what an engine core records of its steps and requests, and the JSON that Perfetto and chrome://tracing read.

The JSON is the Trace Event Format with three processes: the engine's steps, with a track for each of their parts and
counters; the requests, with a track for each; the frontend. Only complete ("X"), counter ("C") and metadata ("M")
events are used: what JSON importers agree on. Slices of one track never overlap: where they would (steps in flight
together), the later one begins later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

ENGINE, REQUESTS, FRONTEND = 1, 2, 3
SCHEDULE, FORWARD, SAMPLE, UPDATE, BETWEEN = 1, 2, 3, 4, 5
IPC, OUTPUTS = 1, 2
_TRACKS = {
    (ENGINE, SCHEDULE): "schedule",
    (ENGINE, FORWARD): "forward",
    (ENGINE, SAMPLE): "sample",
    (ENGINE, UPDATE): "update",
    (ENGINE, BETWEEN): "between steps: requests in, outputs out",
    (FRONTEND, IPC): "IPC: from the core's stamp to the frontend",
    (FRONTEND, OUTPUTS): "outputs: text, statistics, queues",
}
_PROCESSES = {ENGINE: "engine core: steps", REQUESTS: "requests", FRONTEND: "frontend"}
_IDLE_S = 0.05
"""Longest time between two steps that counts as work; a longer one is idle time."""

Event = dict[str, Any]
BatchTimes = tuple[float, float, float]
"""Times of a step's outputs in the frontend: the core's, the beginning of their processing, its end."""


class ChromeTrace:
    """Turns records into events, in any number of portions, each of which continues where the last one ended."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], float] = {}
        """End of the last slice of each track, in microseconds."""
        self._tracks: dict[str, int] = {}
        self._last_step_end = 0.0

    def start(self) -> Iterator[Event]:
        """Returns the events that name processes and tracks."""
        for pid, name in _PROCESSES.items():
            yield _metadata("process_name", pid, 0, name=name)
            yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        for (pid, tid), name in _TRACKS.items():
            yield _metadata("thread_name", pid, tid, name=name)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)

    def steps(self, steps: Iterable[StepTrace]) -> Iterator[Event]:
        """Yields slices and counters of steps, in their order."""
        for step in steps:
            if 0 < step.start - self._last_step_end < _IDLE_S and self._last_step_end:
                yield from self._slice(ENGINE, BETWEEN, "between", self._last_step_end, step.start)
            self._last_step_end = step.end
            work = {"tokens": step.num_tokens, "requests": step.num_requests}
            yield from self._slice(ENGINE, SCHEDULE, "schedule", step.start, step.scheduled, work)
            yield from self._slice(ENGINE, FORWARD, f"{step.num_tokens} tokens", step.scheduled, step.forwarded, work)
            if step.forwarded < step.updating:
                yield from self._slice(ENGINE, SAMPLE, "sample", step.forwarded, step.updating)
            yield from self._slice(ENGINE, UPDATE, "update", step.updating, step.end)
            yield _counter("requests", step.end, running=step.running, waiting=step.waiting)
            yield _counter("KV blocks in use", step.end, blocks=step.used_blocks)
            yield _counter("tokens in step", step.start, tokens=step.num_tokens)

    def phases(self, phases: Iterable[PhaseTrace]) -> Iterator[Event]:
        """Yields slices of requests, those of one request in their order."""
        for phase in phases:
            tid = self._tracks.get(phase.request_id)
            if tid is None:
                tid = self._tracks[phase.request_id] = len(self._tracks) + 1
                yield _metadata("thread_name", REQUESTS, tid, name=phase.request_id)
            args: dict[str, Any] = {"request_id": phase.request_id}
            name = phase.phase
            if phase.phase == "prefill":
                name = f"{'resumed: ' if phase.is_resumed else ''}prefill {phase.num_tokens}"
                args |= {"tokens": phase.num_tokens, "computed before": phase.num_computed}
            elif phase.phase == "decode":
                args["output tokens"] = phase.num_tokens
            yield from self._slice(REQUESTS, tid, name, phase.start, phase.end, args)

    def batches(self, batches: Iterable[BatchTimes]) -> Iterator[Event]:
        """Yields slices of the frontend's processing of outputs."""
        for stamped, taken, done in batches:
            yield from self._slice(FRONTEND, IPC, "IPC", stamped, taken)
            yield from self._slice(FRONTEND, OUTPUTS, "outputs", taken, done)

    def _slice(
        self, pid: int, tid: int, name: str, start: float, end: float, args: dict[str, Any] | None = None
    ) -> Iterator[Event]:
        begin = max(_microseconds(start), self._ends.get((pid, tid), 0.0))
        stop = max(begin, _microseconds(end))
        self._ends[pid, tid] = stop
        event: Event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": round(stop - begin, 3)}
        if args:
            event["args"] = args
        yield event


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _counter(name: str, at: float, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": _microseconds(at), "args": values}


def encode_window(window: TraceWindow, batches: Sequence[BatchTimes] = (), **facts: Any) -> bytes:
    """Returns a whole trace as one JSON object. `facts` are shown among its metadata."""
    trace = ChromeTrace()
    events = [
        *trace.start(),
        *trace.steps(window.steps),
        *trace.phases(window.phases),
        *trace.batches(batches),
    ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


class StepTrace(msgspec.Struct, array_like=True, gc=False):
    """Times of one step, from scheduling to its result."""

    start: float
    scheduled: float
    """End of scheduling; the forward pass begins."""
    forwarded: float
    """End of the forward pass, and start of sampling; equals `updating` where the two are one."""
    updating: float
    """Arrival of the result."""
    end: float
    num_tokens: int
    num_requests: int
    running: int
    waiting: int
    used_blocks: int


class PhaseTrace(msgspec.Struct, array_like=True, gc=False):
    """A phase of one request: queued, prefill of a chunk, decode, preempted."""

    request_id: str
    phase: str
    """"queued", "prefill", "decode", "preempted"."""
    start: float
    end: float
    num_tokens: int = 0
    """Tokens computed in a chunk, or generated."""
    num_computed: int = 0
    """Tokens computed before a chunk."""
    is_resumed: bool = False
    """True for a chunk that computes again what a preemption lost."""


class TraceWindow(msgspec.Struct, array_like=True, gc=False):
    """Records between `start` and `end`, as far as they are kept."""

    start: float
    end: float
    steps: list[StepTrace]
    phases: list[PhaseTrace]
    num_blocks: int = 0
