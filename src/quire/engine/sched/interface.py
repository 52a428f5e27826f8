"""The interfaces of the scheduler: to the engine core, to grammars, and to observers.

`ObservedScheduler` forwards each call to the real scheduler and reports the result to its observers. Recordings and
traces are observers, so neither the scheduler nor the core's loop knows of them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from quire.engine.request import Request, RequestStatus
from quire.wire.engine_core import EngineCoreOutputs
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.stats import EngineSnapshot, SchedulerStats


class PauseState(IntEnum):
    """How much of the scheduler stands still (checklist S3-EC-054)."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Requests in progress, preempted ones among them, go on; new ones wait."""
    PAUSED_ALL = 2
    """Nothing is scheduled."""


class StructuredOutputManager(Protocol):
    """The door for grammars. A scheduler without one schedules every request at once and masks no token."""

    def is_ready(self, request: Request) -> bool:
        """Whether the request's grammar is compiled (True for a request without one). Called often: must be cheap."""
        ...

    def grammar_bitmask(self, requests: Sequence[Request], scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Token masks for those of the step's `requests` that have a grammar and sample, None if there are none."""
        ...


class SchedulerInterface(ABC):
    """Decides what each step computes. Touched by one thread only.

    Steps may overlap: `schedule` may be called again before the result of the last step is known. Results come back
    through `update_from_output` in the order the steps were scheduled, or never (`abandon_steps`).
    """

    pause_state: PauseState = PauseState.UNPAUSED

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValidationError, with nothing changed, if it cannot be accepted."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, status: RequestStatus, *, report: bool = False
    ) -> list[tuple[str, int]]:
        """End requests from outside, wherever they stand; None means all. Unknown ids are ignored.

        Returns (id, client_index) of those it ended. With `report` their clients are told with the next outputs;
        without, the caller knows already (an abort comes from the client).
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Decide the next step: running requests first, then waiting ones, within one token budget."""

    def note_forward(self, scheduler_output: SchedulerOutput) -> None:  # noqa: B027  most have nobody to tell
        """The forward pass of a step is done, its tokens are sampled now. Of interest to whoever traces only."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the result of the oldest step in flight. Outputs by client index."""

    @abstractmethod
    def abandon_steps(self) -> None:
        """The results of all steps in flight are lost: compute again, as if they had never been scheduled."""

    @abstractmethod
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Token masks of a step, None when no request in it has a grammar."""

    @abstractmethod
    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        """Draft tokens for the next step. Ignored for requests that are not running or still compute their prompt."""

    @abstractmethod
    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is unfinished."""

    @abstractmethod
    def get_request_ids(self, client_index: int) -> list[str]:
        """The unfinished requests of one client."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Running and waiting, whatever they wait for."""

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request is running or waiting."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_requests(self) -> bool:
        """Whether a step would do anything: compute, tell the worker of finished requests, or report to a client."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. False if running requests hold blocks and may not lose them for it."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """A snapshot, with what the caches counted since the last one; None if statistics are off."""

    @abstractmethod
    def make_snapshot(self) -> EngineSnapshot:
        """What it holds at this moment, for people who watch. Bounded in size and time, and changes nothing."""

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Stop or go on, from the next `schedule` on."""
        self.pause_state = pause_state

    @abstractmethod
    def shutdown(self) -> None:
        """Release what it holds."""


class SchedulerObserver:
    """What an observer may want to hear. Stamps are of the core's monotonic clock. Nothing it is given may be changed,
    and nothing it does may raise: it is called on the core's loop."""

    def attach(self, scheduler: SchedulerInterface) -> None:
        """This is the scheduler that is observed, to be looked at and not to be touched."""

    def watch_grammars(self, manager: StructuredOutputManager | None) -> StructuredOutputManager | None:
        """Before the scheduler is made: the manager it should be given."""
        return manager

    def on_add(self, request: Request, is_accepted: bool, now: float) -> None:
        """A request was given to the scheduler, which took it in or raised."""

    def on_finish(
        self, request_ids: list[str] | None, status: RequestStatus, report: bool, ended: Sequence[str], now: float
    ) -> None:
        """Requests were ended from outside: `ended` are those that lived."""

    def on_schedule(self, output: SchedulerOutput, start: float, end: float) -> None:
        """A step was decided on."""

    def on_forward(self, output: SchedulerOutput, now: float) -> None:
        """The forward pass of a step is done; its tokens are sampled now."""

    def on_update(
        self,
        output: SchedulerOutput,
        model_output: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        start: float,
        end: float,
    ) -> None:
        """The result of the oldest step was taken in."""

    def on_drafts(self, drafts: DraftTokenIds, now: float) -> None:
        """Drafts were proposed."""

    def on_abandon(self, now: float) -> None:
        """The steps in flight were given up."""

    def on_reset(self, reset_running_requests: bool, done: bool, now: float) -> None:
        """The prefix cache was, or could not be, forgotten."""

    def on_pause(self, state: PauseState, now: float) -> None:
        """Scheduling was stopped, or goes on."""

    def close(self) -> None:
        """The scheduler is gone."""


class ObservedScheduler(SchedulerInterface):
    """Forwards everything to `scheduler`. An error of a call that cannot fail in good order reaches no observer."""

    def __init__(
        self,
        scheduler: SchedulerInterface,
        observers: Sequence[SchedulerObserver],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observed = scheduler
        self.observers = tuple(observers)
        self._clock = clock
        for observer in self.observers:
            observer.attach(scheduler)

    @property
    def pause_state(self) -> PauseState:  # type: ignore[override]  # the one of the scheduler
        """How much stands still."""
        return self.observed.pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.observed.set_pause_state(pause_state)
        now = self._clock()
        for observer in self.observers:
            observer.on_pause(pause_state, now)

    def add_request(self, request: Request) -> None:
        is_accepted = False
        try:
            self.observed.add_request(request)
            is_accepted = True
        finally:
            now = self._clock()
            for observer in self.observers:
                observer.on_add(request, is_accepted, now)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, status: RequestStatus, *, report: bool = False
    ) -> list[tuple[str, int]]:
        ids = None if request_ids is None else [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ended = self.observed.finish_requests(ids, status, report=report)
        now = self._clock()
        for observer in self.observers:
            observer.on_finish(ids, status, report, [request_id for request_id, _ in ended], now)
        return ended

    def schedule(self) -> SchedulerOutput:
        start = self._clock()
        output = self.observed.schedule()
        end = self._clock()
        for observer in self.observers:
            observer.on_schedule(output, start, end)
        return output

    def note_forward(self, scheduler_output: SchedulerOutput) -> None:
        now = self._clock()
        for observer in self.observers:
            observer.on_forward(scheduler_output, now)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        start = self._clock()
        outputs = self.observed.update_from_output(scheduler_output, model_output)
        end = self._clock()
        for observer in self.observers:
            observer.on_update(scheduler_output, model_output, outputs, start, end)
        return outputs

    def abandon_steps(self) -> None:
        self.observed.abandon_steps()
        for observer in self.observers:
            observer.on_abandon(self._clock())

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        return self.observed.get_grammar_bitmask(scheduler_output)

    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        self.observed.update_draft_token_ids(drafts)
        now = self._clock()
        for observer in self.observers:
            observer.on_drafts(drafts, now)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        done = self.observed.reset_prefix_cache(reset_running_requests)
        now = self._clock()
        for observer in self.observers:
            observer.on_reset(reset_running_requests, done, now)
        return done

    def has_request(self, request_id: str) -> bool:
        return self.observed.has_request(request_id)

    def get_request_ids(self, client_index: int) -> list[str]:
        return self.observed.get_request_ids(client_index)

    def get_num_unfinished_requests(self) -> int:
        return self.observed.get_num_unfinished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        return self.observed.get_request_counts()

    def has_requests(self) -> bool:
        return self.observed.has_requests()

    def make_snapshot(self) -> EngineSnapshot:
        return self.observed.make_snapshot()

    def make_stats(self) -> SchedulerStats | None:
        return self.observed.make_stats()

    def shutdown(self) -> None:
        self.observed.shutdown()
        for observer in self.observers:
            observer.close()
