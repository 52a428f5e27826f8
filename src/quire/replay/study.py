"""Reads from a recording when requests came, what each got when, and what every step cost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.engine.recording.format import (
    Abandon,
    Add,
    AnyEvent,
    Drafts,
    End,
    Header,
    Pause,
    Reset,
    Step,
    Transfers,
    Update,
)
from quire.engine.request import RequestStatus
from quire.replay.replay import Difference, ReplayedRequest, Replayer
from quire.replay.step_times import StepWork
from quire.wire.engine_core import FinishReason

LONGEST_LAG_S = 30.0
"""Longest delay between arrival and core: a longer one is due to a restart, or to another clock."""


@dataclass
class RecordedRequest:
    """One request of a recording. Times are seconds after the recording's start."""

    add: Add
    arrival_s: float
    reached_s: float
    """Latest or earliest time at which the core could have taken it in: at the latest when it did; at the earliest when
    it last took others in."""
    num_outputs: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    reason: FinishReason | None = None
    blocks: bytes = b""
    """The digests of its blocks."""
    aborted_s: float | None = None
    failed: RequestStatus | None = None
    """Status of a request that ended while it was to be admitted."""
    num_cached_tokens: int | None = None

    def note_tokens(self, num_tokens: int, now: float) -> None:
        """Adds tokens that it got at `now`."""
        if self.first_token_s is None:
            self.first_token_s = now
        self.last_token_s = now
        self.num_outputs += num_tokens


@dataclass
class Study:
    """A recording, read and replayed."""

    header: Header
    difference: Difference | None = None
    """Where the replay differed from the recording; what follows is then not known."""
    num_events: int = 0
    num_steps: int = 0
    end_s: float = 0.0
    num_preemptions: int = 0
    requests: list[RecordedRequest] = field(default_factory=list)
    steps: list[tuple[StepWork, float]] = field(default_factory=list)
    """Work and seconds of each completed step."""
    step_ends_s: list[float] = field(default_factory=list)
    """End time of each of them."""
    gaps_s: list[float] = field(default_factory=list)
    """Seconds from the end of a step to the start of the next, while there was work."""
    controls: list[tuple[float, Pause | Reset]] = field(default_factory=list)
    has_drafts: bool = False
    loads: Counter[str] = field(default_factory=Counter)
    """Loads from stores and other engines, by outcome."""
    num_loaded_tokens: int = 0


def study(header: Header, events: Iterable[AnyEvent]) -> Study:
    """Replays a recording, and collects its facts."""
    builder = _StudyBuilder(header)
    for event in events:
        builder.study.difference = builder.take(event)
        if builder.study.difference is not None:
            break
    builder.finish()
    return builder.study


class _StudyBuilder:
    """Reads a recording once."""

    def __init__(self, header: Header) -> None:
        self.study = Study(header)
        self._replayer = Replayer(header)
        self._now = 0.0
        self._in_flight: deque[tuple[StepWork, float]] = deque()
        """Work and start of each step in flight."""
        self._last_end: float | None = None
        """End of the last step, if there was more to do."""
        self._last_update = 0.0
        self._last_look = 0.0
        """Time at which the core last took in requests: before it began a step."""

    def take(self, event: AnyEvent) -> Difference | None:
        """Applies the next event."""
        started = self._now + event.at / 1e6
        self._now = started + getattr(event, "took", 0) / 1e6
        study = self.study
        difference = self._replayer.apply(event)
        study.num_events, study.end_s = self._replayer.num_events, self._now
        if difference is not None:
            return difference
        match event:
            case Add() if event.is_accepted:
                self._add(event)
            case Step():
                self._step(event, started)
            case Update():
                self._update(event)
            case Pause() | Reset():
                study.controls.append((self._now, event))
                self._last_end = None
            case Abandon():
                self._in_flight.clear()
                self._last_end = None
            case Drafts():
                study.has_drafts = True
            case Transfers():
                ends = [end for call in event.calls for end in call.loaded]
                study.loads.update(outcome for _, outcome, _ in ends)
                study.num_loaded_tokens += sum(num_tokens for _, _, num_tokens in ends)
            case _:
                pass
        if isinstance(event, End | Update | Step):
            for number, request in self._replayer.take_ended():
                self._note_end(event, study.requests[number], request)
        return None

    def finish(self) -> None:
        """Completes the requests that were unfinished at the end of the recording."""
        for index, request in self._replayer.live.items():
            self.study.requests[index].blocks = b"".join(request.blocks)

    def _add(self, event: Add) -> None:
        lag = self._now - (event.arrival_time - self.study.header.created_at)
        arrival_s = self._now - lag if 0 <= lag <= LONGEST_LAG_S and not event.num_output_tokens else self._now
        # An idle core takes a request in at once. What came while it worked came after its last intake.
        reached_s = self._now if self._last_end is None else max(arrival_s, self._last_look)
        self.study.requests.append(RecordedRequest(event, arrival_s, reached_s))

    def _note_end(self, event: AnyEvent, recorded: RecordedRequest, request: ReplayedRequest) -> None:
        recorded.blocks = b"".join(request.blocks)
        if isinstance(event, End):
            recorded.aborted_s = self._now
        elif isinstance(event, Step):
            recorded.failed = request.status

    def _step(self, event: Step, started: float) -> None:
        study = self.study
        self._last_look = started
        output = self._replayer.in_flight[-1]
        self._in_flight.append((StepWork.of(output), started))
        study.num_steps += event.num_tokens > 0
        if self._last_end is not None and event.num_tokens:
            study.gaps_s.append(started - self._last_end)
        self._last_end = None
        if event.details is not None:
            study.num_preemptions += len(event.details.preempted)
            for index, num_computed, _ in event.details.new:
                request = study.requests[index]
                if request.num_cached_tokens is None:
                    request.num_cached_tokens = num_computed

    def _update(self, event: Update) -> None:
        work, began = self._in_flight.popleft()
        self.study.steps.append((work, self._now - max(began, self._last_update)))
        self.study.step_ends_s.append(self._now)
        self._last_update = self._now
        scheduler = self._replayer.scheduler
        has_work = scheduler.has_requests() and not scheduler.is_blocked()  # while all wait for loads, there is none
        self._last_end = self._now if has_work else None
        for index, num_new in self._replayer.num_new_tokens.items():
            self.study.requests[index].note_tokens(num_new, self._now)
        for index, reason, _ in event.ends:
            self.study.requests[index].reason = FinishReason(reason)
