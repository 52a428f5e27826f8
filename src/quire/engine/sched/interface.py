"""The interfaces of the scheduler: to the engine core, to grammars, to stores outside the engine, and to observers.

`ObservedScheduler` forwards each call to the real scheduler and reports the result to its observers. Recordings and
traces are observers, so neither the scheduler nor the core's loop knows of them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import Protocol

from quire.engine.kv_cache.block import KVCacheBlocks
from quire.engine.kv_cache.manager import KVCacheManager
from quire.engine.request import Request, RequestStatus
from quire.errors import ConfigError, QuireError
from quire.kv_transfer_params import FIELD as TRANSFER_PARAMS
from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreOutputs
from quire.wire.execution import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from quire.wire.stats import EngineSnapshot, SchedulerStats

logger = init_logger(__name__)


class PauseState(IntEnum):
    """State of a pause."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Requests in progress, including preempted ones, continue; new ones wait."""
    PAUSED_ALL = 2
    """Nothing is scheduled."""


class AdmissionGate(Protocol):
    """Something besides capacity that a waiting request may have to wait for.

    A request starts when it is the next in order of those that are ready at all gates: one that is not is passed over.
    All methods but `is_ready` do nothing unless they are overridden.
    """

    def is_ready(self, request: Request) -> bool:
        """Returns whether a waiting request need not wait any longer, be it to start or to end with an error. Called
        often: must be cheap."""
        ...

    def get_error(self, request: Request) -> QuireError | None:
        """Returns the error that a ready request ends with instead of starting."""
        return None

    def note_admitted(self, request: Request) -> None:
        """Notes that a request has started, for the first time or after a preemption."""
        return

    def note_left(self, request: Request) -> None:
        """Notes that a request was preempted, or has ended, wherever it was: its status says which."""
        return

    def add_stats(self, stats: SchedulerStats) -> None:
        """Adds what the gate has counted since the last call."""
        return


class NoExchange:
    """Nothing is stored outside the engine. Base of the exchange that a connector has."""

    gates: Sequence[AdmissionGate] = ()
    """Gates that a waiting request must pass, besides capacity."""

    @property
    def has_news(self) -> bool:
        """Returns whether the next `schedule` has something to take in or to send."""
        return False

    def begin_round(self) -> None:
        """Takes in what has ended, and gives up what takes too long. Called before each step is scheduled."""

    def on_new_request(self, request: Request) -> None:
        """Notes that a request was added."""
        params = request.sampling_params
        if params is not None and params.extra_args is not None and params.extra_args.get(TRANSFER_PARAMS):
            logger.warning(
                "request %s has kv_transfer_params and there is no connector: it is computed here; PeerConnector takes "
                "blocks from other engines",
                request.request_id,
            )

    def begins_load(
        self, request: Request, hits: KVCacheBlocks, num_hits: int, running: Sequence[Request], reserved_blocks: int
    ) -> bool:
        """Returns whether the request is blocked from now on: by a load of its own, which begins, or by another's of a
        block that it needs. A load leaves free what `running` requests need for their prompts, and `reserved_blocks`.
        """
        return False

    def make_room(self, request: Request) -> bool:
        """Gives back blocks that are kept only to save time, those for `request` last. Returns whether there were
        any."""
        return False

    def await_room(self, request: Request) -> bool:
        """Blocks the request until a transfer ends. Returns False, with nothing done, if none will give back blocks."""
        return False

    def count_external(self, request: Request, num_hits: int) -> int:
        """Returns how many of the tokens that an admission hits were loaded for it."""
        return 0

    def note_started(self, request: Request, num_hits: int, num_external: int) -> None:
        """Notes that a request was admitted."""

    def on_sent(self, output: SchedulerOutput) -> None:
        """Adds orders to a step that is about to be sent."""

    def on_received(self, output: SchedulerOutput) -> None:
        """Notes that the result of the oldest step is in."""

    def on_abandoned(self) -> None:
        """Notes that all steps in flight were given up."""

    def let_go(self, *, loads_too: bool) -> bool:
        """Ends all transfers, so that the cache can be dropped. Returns False, with nothing done, if requests wait for
        loads and `loads_too` is False."""
        return True

    def set_weights(self, path: str) -> None:
        """Notes that the weights were replaced by those of `path`."""

    def reset_store(self, *, can_wait: bool) -> bool | Future[bool]:
        """Drops what is stored outside. Returns False if that failed, and may return a Future if `can_wait`."""
        return True

    def shutdown(self) -> None:
        """Gives saves a moment to end, and releases everything."""


MakeExchange = Callable[[KVCacheManager], NoExchange]


class StructuredOutputManager(AdmissionGate, Protocol):
    """The interface to grammars: a request waits until its own is compiled.

    A scheduler without a manager schedules every request at once and masks no token.
    """

    def grammar_bitmask(self, requests: Sequence[Request], scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Returns token masks for those of the step's `requests` that have a grammar and sample; None if there are
        none."""
        ...


class SchedulerInterface(ABC):
    """Decides what each step computes. Used by one thread only.

    Steps may overlap: `schedule` may be called again before the result of the last step is known. Results come back
    through `update_from_output` in the order the steps were scheduled, or never (`abandon_steps`).
    """

    pause_state: PauseState = PauseState.UNPAUSED

    def connect(self, make_exchange: MakeExchange) -> NoExchange:
        """Makes the exchange with stores outside the engine, before the first request, and returns it. Raises
        ConfigError if this scheduler has no use for one."""
        raise ConfigError(f"{type(self).__name__} cannot load blocks; leave the connector or --scheduler-cls out")

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queues a request. Raises ValidationError, with nothing changed, if it cannot be accepted."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, status: RequestStatus, *, report: bool = False
    ) -> list[tuple[str, int]]:
        """Ends requests in any state, on request of a client or the core; None means all. Ignores unknown ids.

        Returns (id, client_index) of those it ended. With `report` their clients get an end with the next outputs;
        without, the caller knows already (an abort comes from the client).
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Decides the next step: running requests first, then waiting ones, within one token budget."""

    def note_forward(self, scheduler_output: SchedulerOutput) -> None:  # noqa: B027  only an observed scheduler reports it
        """Notes that the forward pass of a step is done and its tokens are being sampled. Only traces use it."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes in the result of the oldest step in flight. Returns outputs by client index."""

    @abstractmethod
    def abandon_steps(self) -> None:
        """Gives up all steps in flight, whose results are lost: their tokens are computed again."""

    @abstractmethod
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Returns token masks of a step; None if no request in it has a grammar."""

    @abstractmethod
    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        """Sets draft tokens for the next step. Ignores requests that are not running or still compute their prompt."""

    @abstractmethod
    def has_request(self, request_id: str) -> bool:
        """Returns whether a request of this id is unfinished."""

    @abstractmethod
    def get_request_ids(self, client_index: int) -> list[str]:
        """Returns the ids of one client's unfinished requests."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Returns the number of running and waiting requests."""

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """Returns the numbers of running and of waiting requests."""

    def has_unfinished_requests(self) -> bool:
        """Returns whether any request is running or waiting."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_requests(self) -> bool:
        """Returns whether a step would do anything: compute, send ended requests to the worker, or report to a
        client."""

    def is_blocked(self) -> bool:
        """Returns whether all unfinished requests wait at gates: a step would compute nothing."""
        return False

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drops all cached prefixes. Returns False if running requests hold blocks and may not be preempted."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """Returns statistics, with what the caches counted since the last call; None if statistics are off."""

    @abstractmethod
    def make_snapshot(self) -> EngineSnapshot:
        """Returns the present state, for dashboards. Bounded in size and time; changes nothing."""

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pauses or resumes scheduling, from the next `schedule` on."""
        self.pause_state = pause_state

    @abstractmethod
    def shutdown(self) -> None:
        """Releases its resources."""


class SchedulerObserver:
    """Base of observers; each method is called after the scheduler's.

    Times are of the core's monotonic clock. An observer must not change its arguments, and must not raise: it is called
    on the core's loop.
    """

    def attach(self, scheduler: SchedulerInterface) -> None:
        """Sets the observed scheduler, which may be read and not changed."""

    def watch_grammars(self, manager: StructuredOutputManager | None) -> StructuredOutputManager | None:
        """Returns the manager that the scheduler is given. Called before the scheduler is made."""
        return manager

    def watch_adapters(self, gate: AdmissionGate) -> AdmissionGate:
        """Returns the gate of adapters that the scheduler is given. Called before the scheduler is made."""
        return gate

    def watch_exchange(self, make_exchange: MakeExchange) -> MakeExchange:
        """Returns what makes the exchange with stores that the scheduler is given."""
        return make_exchange

    def on_add(self, request: Request, is_accepted: bool, now: float) -> None:
        """A request was given to the scheduler, which accepted it or raised."""

    def on_finish(
        self, request_ids: list[str] | None, status: RequestStatus, report: bool, ended: Sequence[str], now: float
    ) -> None:
        """Requests were ended by `finish_requests`: `ended` are those that were live."""

    def on_schedule(self, output: SchedulerOutput, start: float, end: float) -> None:
        """A step was scheduled."""

    def on_forward(self, output: SchedulerOutput, now: float) -> None:
        """The forward pass of a step is done; its tokens are being sampled."""

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
        """Draft tokens were set."""

    def on_abandon(self, now: float) -> None:
        """The steps in flight were given up."""

    def on_reset(self, reset_running_requests: bool, done: bool, now: float) -> None:
        """The prefix cache was dropped, or could not be."""

    def on_pause(self, state: PauseState, now: float) -> None:
        """Scheduling was paused or resumed."""

    def close(self) -> None:
        """The scheduler was shut down."""


class ObservedScheduler(SchedulerInterface):
    """Forwards every call to `scheduler`. A call that raises is not reported to observers, except `add_request`."""

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
        """State of a pause."""
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

    def is_blocked(self) -> bool:
        return self.observed.is_blocked()

    def make_snapshot(self) -> EngineSnapshot:
        return self.observed.make_snapshot()

    def make_stats(self) -> SchedulerStats | None:
        return self.observed.make_stats()

    def shutdown(self) -> None:
        self.observed.shutdown()
        for observer in self.observers:
            observer.close()
