"""What an engine tells of its progress while it works, and how long it expects each step to take.

Without a heartbeat page (an engine in its user's process, or one nobody supervises) every call does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from quire.timeline import listen
from quire.wire.heartbeat import IDLE_STAMP_INTERVAL_S, HeartbeatPage, Phase

UNKNOWN_TOKEN_S = 0.25
"""Seconds per token where not even one step was measured: a large model on a slow machine."""
UTILITY_S = 120.0
"""What a control call may take: one that loads weights has no better estimate."""
_FORGET = 0.9
"""Share of a longer earlier duration that is kept when a shorter one is measured."""


class StepTimes:
    """How long steps took, by their size to the next power of two: recent maxima, slowly forgotten."""

    def __init__(self) -> None:
        self._recent: dict[int, float] = {}

    def record(self, num_tokens: int, duration_s: float) -> None:
        """A step of `num_tokens` took `duration_s`."""
        size = num_tokens.bit_length()
        self._recent[size] = max(duration_s, _FORGET * self._recent.get(size, 0.0))

    def predict(self, num_tokens: int) -> float:
        """A generous guess: at most linear in the tokens from the nearest smaller size, at most a larger size's."""
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
    """Writes the heartbeat page of one engine, from the thread that runs its steps but where it says otherwise."""

    def __init__(self, page: HeartbeatPage | None = None) -> None:
        self._page = page
        self._times = StepTimes()
        self._started: tuple[int, float] | None = None
        """Tokens and start of the step being executed."""
        self._stop_listening: Callable[[], None] | None = None

    @property
    def is_watched(self) -> bool:
        """Whether there is a page."""
        return self._page is not None

    def learn(self, num_tokens: int, duration_s: float) -> None:
        """A step of `num_tokens` took `duration_s`: what others take is guessed from it until they are measured."""
        self._times.record(num_tokens, duration_s)

    def starting(self) -> None:
        """Loading, allocating, warming up: each stamp of the timeline begins another stage on the page."""
        if self._page is not None:
            self._stop_listening = listen(self._page.begin_stage)

    def started(self) -> None:
        """The start is over: later stamps are no stages."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    def calibrate(self, run_one_token: Callable[[], None]) -> None:
        """Time a step of one token, before any real one: else the first steps could take for ever unnoticed."""
        if self._page is not None:
            start = time.monotonic()
            run_one_token()
            self._times.record(1, time.monotonic() - start)

    def idle(self) -> None:
        """Nothing to do; to be repeated every IDLE_STAMP_INTERVAL_S."""
        if self._page is not None:
            self._page.begin_phase(Phase.IDLE, IDLE_STAMP_INTERVAL_S)

    def input(self, expected_s: float = 0.0) -> None:
        """Taking in a request or a control call."""
        if self._page is not None:
            self._page.begin_phase(Phase.INPUT, expected_s)

    def begin_intake(self, request_id: str) -> None:
        """A request is being prepared, on the input thread."""
        if self._page is not None:
            self._page.begin_intake(request_id)

    def end_intake(self) -> None:
        """It is ready, or refused. On the input thread."""
        if self._page is not None:
            self._page.end_intake()

    def schedule(self) -> None:
        """A step begins."""
        if self._page is not None:
            self._page.begin_phase(Phase.SCHEDULE)

    def execute(self, request_ids: Iterable[str], num_tokens: int) -> None:
        """The executor gets a step of `num_tokens` in all, or is waited for."""
        if self._page is not None:
            self._started = num_tokens, time.monotonic()
            self._page.begin_step(request_ids, self._times.predict(num_tokens))

    def update(self) -> None:
        """The executor's result is there."""
        if self._page is not None:
            if self._started is not None:
                num_tokens, start = self._started
                self._times.record(num_tokens, time.monotonic() - start)
                self._started = None
            self._page.begin_phase(Phase.UPDATE)

    def stopped(self) -> None:
        """The engine has ended on purpose. One that fails does not say so: the page tells what it was doing."""
        if self._page is not None:
            self._page.begin_phase(Phase.STOPPED)
