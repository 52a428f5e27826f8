"""Writes the progress of an engine, and the expected duration of each step, to its heartbeat page.

Without a page (an engine in its user's process, or without a supervisor) every call does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from quire.timeline import listen
from quire.wire.heartbeat import IDLE_STAMP_INTERVAL_S, HeartbeatPage, Phase, WorkerEnd

UNKNOWN_TOKEN_S = 0.25
"""Seconds per token before any step was measured: a large model on a slow machine."""
UTILITY_S = 120.0
"""Seconds that a control call may take: one that loads weights has no better estimate."""
_FORGET = 0.9
"""Share of a longer earlier duration that is kept when a shorter one is measured."""


class StepTimes:
    """Durations of steps, by their size to the next power of two: recent maxima that decay slowly."""

    def __init__(self) -> None:
        self._recent: dict[int, float] = {}

    def record(self, num_tokens: int, duration_s: float) -> None:
        """Records that a step of `num_tokens` took `duration_s`."""
        size = num_tokens.bit_length()
        self._recent[size] = max(duration_s, _FORGET * self._recent.get(size, 0.0))

    def predict(self, num_tokens: int) -> float:
        """Returns a generous estimate: at most linear in the tokens from the nearest smaller size, at most that of a
        larger size."""
        size = num_tokens.bit_length()
        recent = self._recent.get(size)
        if recent is not None:
            return recent
        smaller = max((s for s in self._recent if s < size), default=None)
        larger = min((s for s in self._recent if s > size), default=None)
        guesses = [] if smaller is None else [self._recent[smaller] * 2.0 ** (size - smaller + 1)]
        guesses += [UNKNOWN_TOKEN_S * num_tokens] if larger is None else [self._recent[larger]]
        return min(guesses)


class HeartbeatWriter:
    """Writes the heartbeat page of one engine. Called on the thread that runs its steps, except where noted."""

    def __init__(self, page: HeartbeatPage | None = None) -> None:
        self._page = page
        self._times = StepTimes()
        self._started: tuple[int, float] | None = None
        """Tokens and start of the step being executed."""
        self._num_tokens = 1
        """Tokens of the last step."""
        self._draft_s = 0.0
        """Duration of drafting, as `StepTimes` has those of steps."""
        self.least_tokens = 0
        """Tokens that every step is taken to have at least, where it may wait for the steps of other engines."""
        self.least_s = 0.0
        """Seconds that every step is expected to take at least, where it may wait for the end of a connection."""
        self._stop_listening: Callable[[], None] | None = None

    def starting(self) -> None:
        """Begins start-up (loading, allocating, warming up): each stamp of the timeline begins another stage on the
        page."""
        if self._page is not None:
            self._page.note_worker_end(WorkerEnd.NONE)
            self._stop_listening = listen(self._page.begin_stage)

    def started(self) -> None:
        """Ends start-up: later stamps are no stages."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    def calibrate(self, run_one_token: Callable[[], None]) -> None:
        """Measures a step of one token, before any real one: otherwise a hang in the first steps would not be noticed
        for long. The durations of other sizes are estimated from it until they are measured."""
        if self._page is not None:
            start = time.monotonic()
            run_one_token()
            self._times.record(1, time.monotonic() - start)

    def idle(self) -> None:
        """Marks the engine as idle; to be repeated every IDLE_STAMP_INTERVAL_S."""
        if self._page is not None:
            self._page.begin_phase(Phase.IDLE, IDLE_STAMP_INTERVAL_S)

    def input(self, expected_s: float = 0.0) -> None:
        """Marks the intake of a request or a control call."""
        if self._page is not None:
            self._page.begin_phase(Phase.INPUT, expected_s)

    def begin_intake(self, request_id: str) -> None:
        """Marks the preparation of a request, on the input thread."""
        if self._page is not None:
            self._page.begin_intake(request_id)

    def end_intake(self) -> None:
        """Marks the end of the preparation, on the input thread."""
        if self._page is not None:
            self._page.end_intake()

    def note_worker_end(self, end: WorkerEnd) -> None:
        """Writes how a worker has ended, before the engine ends for it."""
        if self._page is not None:
            self._page.note_worker_end(end)

    def schedule(self) -> None:
        """Marks the beginning of a step."""
        if self._page is not None:
            self._page.begin_phase(Phase.SCHEDULE)

    def execute(self, request_ids: Iterable[str], num_tokens: int) -> None:
        """Marks the execution of steps of `num_tokens` tokens in all."""
        if self._page is not None:
            self._started = num_tokens, time.monotonic()
            self._num_tokens = max(num_tokens, 1)
            expected_s = self._times.predict(max(num_tokens, self.least_tokens))
            self._page.begin_step(request_ids, max(expected_s, self.least_s))

    def update(self) -> None:
        """Marks the arrival of the executor's result, and records how long it took."""
        if self._page is not None:
            if self._started is not None:
                num_tokens, start = self._started
                self._times.record(num_tokens, time.monotonic() - start)
                self._started = None
            self._page.begin_phase(Phase.UPDATE)

    def draft(self) -> None:
        """Marks the beginning of drafting, which may take as long as it did lately, or as a step of the last size."""
        if self._page is not None:
            expected_s = max(self._draft_s, self._times.predict(self._num_tokens))
            self._page.begin_phase(Phase.DRAFT, expected_s)

    def drafted(self, duration_s: float) -> None:
        """Marks the end of drafting."""
        if self._page is not None:
            self._draft_s = max(duration_s, _FORGET * self._draft_s)
            self._page.begin_phase(Phase.UPDATE)

    @property
    def event_sequence(self) -> int:
        """Sequence number of the next batch of KV cache events: that of the core before, after a restart."""
        return 0 if self._page is None else self._page.event_sequence

    def note_event_sequence(self, sequence: int) -> None:
        """Records that number for the next core, on the thread that sends events."""
        if self._page is not None:
            self._page.event_sequence = sequence

    def stopped(self) -> None:
        """Marks an intended end. An engine that fails does not mark it, so the page shows what it was doing."""
        if self._page is not None:
            self._page.begin_phase(Phase.STOPPED)
