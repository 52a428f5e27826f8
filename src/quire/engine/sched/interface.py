"""What the engine core needs of a scheduler, and what a scheduler needs of a structured-output manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from quire.engine.request import Request, RequestStatus
from quire.wire.engine_core import EngineCoreOutputs
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.snapshot import EngineSnapshot
from quire.wire.stats import SchedulerStats


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
