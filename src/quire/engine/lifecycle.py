"""Pause, sleep, new weights: what stops an engine core for a while, and how it goes on.

======== ================================================= =====================================================
verb     what stops                                        what is given back
======== ================================================= =====================================================
pause    scheduling: of new requests (abort, wait) or of   nothing
         all (keep)
sleep 0  as pause                                          nothing
sleep 1  as pause                                          the KV cache; weights leave an accelerator for main
                                                           memory (on a CPU they are there already, and stay)
sleep 2  as pause                                          the KV cache and the weights
======== ================================================= =====================================================

Requests that arrive meanwhile wait. Requests that were kept (mode "keep") go on afterwards: where their KV is gone or
belongs to other weights, all their tokens are computed again, so from then on every token is what the model in memory
gives for the text so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import get_args

from quire.engine.executor.abstract import Executor
from quire.engine.request import RequestStatus
from quire.engine.sched.interface import PauseState, SchedulerInterface
from quire.errors import ClientError, ServerError
from quire.interrupts import InterruptShield
from quire.logger import init_logger
from quire.wire.engine_core import PauseMode

logger = init_logger(__name__)

KV_CACHE, WEIGHTS, SCHEDULING = "kv_cache", "weights", "scheduling"
"""The tags of `wake_up`."""


class Lifecycle:
    """Owns what is paused, asleep and loaded. Knows nothing of tensors, clients or processes.

    A pause is complete when nothing is being computed any more. Where the caller's thread runs the steps, the verbs
    complete it themselves. A core that has a loop of its own sets `can_wait` and calls `notify_idle` whenever it finds
    nothing to do: then they return a Future. All of it happens on the core's one thread.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Executor,
        has_work: Callable[[], bool],
        finish_steps: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._has_work = has_work
        self._finish_steps = finish_steps
        self.can_wait = False
        """Steps go on by themselves while a verb waits for them."""
        self._idle_state_callbacks: deque[_Pause] = deque()
        self._is_asleep = False
        self._released: set[str] = set()
        """Of KV_CACHE and WEIGHTS, what is not in its place."""
        self._weight_version = "0"

    # -- pause -----------------------------------------------------------------------------------------------------

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Stop scheduling. abort: end all requests first. wait: let the running ones end. keep: freeze them.

        Clients of aborted requests are told with the next step's outputs. `clear_cache` forgets all cached prefixes;
        frozen requests are then computed again. The Future ends when nothing runs any more; None: that is so already.
        Raises ValueError for an unknown mode, and for "wait" where the caller's own thread would have to run the steps.
        """
        return self._pause(mode, self._reset_caches if clear_cache else _nothing)

    def resume_scheduler(self) -> None:
        """Schedule everything again. A pause that is not complete yet is called off: its Future fails.

        Raises ClientError for an engine whose memory is given back: it must `wake_up` first.
        """
        if self._released:
            raise ClientError(f"the engine is asleep ({self._missing()} given back); call wake_up() instead")
        self._is_asleep = False
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        while self._idle_state_callbacks:
            self._idle_state_callbacks.popleft().call_off()

    def is_scheduler_paused(self) -> bool:
        """Whether new requests wait."""
        return self._scheduler.pause_state is not PauseState.UNPAUSED

    def notify_idle(self) -> None:
        """The core has nothing to do, not even a step in flight: what waits for that happens now."""
        while self._idle_state_callbacks:
            self._idle_state_callbacks.popleft().complete()

    def _pause(self, mode: PauseMode, then: Callable[[], None]) -> Future[None] | None:
        """Stop scheduling by `mode`; once nothing runs, call `then`."""
        self._validate_mode(mode)
        with InterruptShield():
            if mode == "abort":
                self._scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED, report=True)
            self._scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
            if mode != "wait":
                self._finish_steps()
            if not self.can_wait or not self._has_work():
                then()
                return None
        pause = _Pause(then)
        self._idle_state_callbacks.append(pause)
        return pause.future

    def _validate_mode(self, mode: str) -> None:
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r} is not known; use {', '.join(map(repr, get_args(PauseMode)))}")
        if mode == "wait" and not self.can_wait:
            raise ValueError(
                "pause mode 'wait' is not possible for an engine in this process, whose steps the caller runs; run "
                "steps until none is left, then pause by 'abort' or 'keep'"
            )
        if mode == "wait" and self._released:
            raise ClientError(f"pause mode 'wait' needs an engine that runs; this one has {self._missing()} given back")

    # -- sleep -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None] | None:
        """Pause, then give memory back: see the table above. An engine asleep can be sent deeper.

        Returns and raises as `pause_scheduler` does; ValueError also for a level that is none.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"sleep level {level!r} is not known; use 0 (pause), 1 (KV cache) or 2 (weights, too)")
        return self._pause(mode, lambda: self._fall_asleep(level))

    def release_kv_cache_memory(self, mode: PauseMode = "abort") -> Future[None] | None:
        """As `sleep(1)`, but weights stay where they are, on an accelerator too. `wake_up` takes the cache again."""
        return self._pause(mode, self._release_kv_cache)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Take back what was given away: everything, or "weights" and "kv_cache" by name; True once all is there.

        Then scheduling goes on. Raises ValueError for another tag ("scheduling" is accepted and asks for nothing
        more), and what the workers raise when, say, the checkpoint is gone: the engine then sleeps on.
        """
        wanted = {KV_CACHE, WEIGHTS} if tags is None else set(tags)
        unknown = wanted - {KV_CACHE, WEIGHTS, SCHEDULING}
        if unknown:
            raise ValueError(f"wake_up tags {sorted(unknown)} are not known; use weights, kv_cache, scheduling")
        with InterruptShield() as shield:
            for part in [tag for tag in (WEIGHTS, KV_CACHE) if tag in wanted & self._released]:
                shield.may_break = True
                self._executor.collective_rpc("wake_up", args=([part],))
                shield.may_break = False
                self._released.discard(part)
            if self._released:
                return False
            self.resume_scheduler()
        return True

    def is_sleeping(self) -> bool:
        """Between a `sleep` and the `wake_up` that ends it."""
        return self._is_asleep

    def _fall_asleep(self, level: int) -> None:
        if level:
            self._reset_caches()
            # Marked first: should a worker fail half-way, waking up puts everything in its place.
            self._released |= {KV_CACHE, WEIGHTS}
        self._is_asleep = True
        if level:
            self._executor.collective_rpc("sleep", args=(level,))
        logger.info("asleep at level %d", level)

    def _release_kv_cache(self) -> None:
        self._reset_caches()
        self._released.add(KV_CACHE)
        self._is_asleep = True
        self._executor.collective_rpc("release_kv_cache_memory")

    def _missing(self) -> str:
        return " and ".join(sorted(self._released))

    # -- caches ----------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False if running requests are in the way and may not be preempted.

        `reset_connector` has nothing to do: there is no cache outside the engine.
        """
        with InterruptShield():
            return self._scheduler.reset_prefix_cache(reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Forget processed images and sounds: no model here takes any, so there is nothing to forget."""

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs: no model here has an encoder, so there is nothing to forget."""

    def _reset_caches(self) -> None:
        """All of them, whatever runs. Raises ServerError if blocks are still in use."""
        if not self.reset_prefix_cache(reset_running_requests=True):
            raise ServerError("the prefix cache cannot be reset: blocks are in use though no request runs")
        self.reset_mm_cache()
        self.reset_encoder_cache()

    # -- weights ---------------------------------------------------------------------------------------------------

    def get_weight_version(self) -> str:
        """Of the weights in memory: "0" for those of start-up, then what `update_weights` was given."""
        return self._weight_version

    def update_weights(self, path: str, version: str | None = None) -> str:
        """Replace the weights in place by those of checkpoint directory `path`; the new version.

        `version` is a label; without one it is the old one plus 1. Requests that run or were kept are computed again
        under the new weights: the tokens they have stay, the next ones are the new model's. The prefix cache is reset,
        so nothing of the old weights is left.

        A checkpoint that does not fit (ModelLoadError) is refused on all workers before anything is touched. If
        reading fails later, the old weights are read again, and the error is raised. Should even that fail, the engine
        sleeps until `wake_up` finds its weights.
        """
        self._executor.collective_rpc("check_weights", args=(path,))
        with InterruptShield() as shield:
            self._finish_steps()
            self._reset_caches()
            was_missing = WEIGHTS in self._released
            self._released.add(WEIGHTS)
            shield.may_break = True
            try:
                self._executor.collective_rpc("load_weights", args=(path,))
            except BaseException:
                shield.may_break = False
                if not was_missing:
                    self._restore_weights()
                raise
            shield.may_break = False
            self._released.discard(WEIGHTS)
            self._weight_version = _next_version(self._weight_version) if version is None else version
        logger.info("weights of %s, version %s", path, self._weight_version)
        return self._weight_version

    def _restore_weights(self) -> None:
        """After an update that failed half-way."""
        try:
            self._executor.collective_rpc("load_weights")
        except Exception:
            logger.exception("the old weights cannot be read again either: the engine sleeps until wake_up() can")
            self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
            self._is_asleep = True
        else:
            self._released.discard(WEIGHTS)


class _Pause:
    """A pause on its way: what is to be done once nothing runs, and the Future that tells of it."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.future: Future[None] = Future()
        self._then = then

    def complete(self) -> None:
        """Nothing runs any more."""
        try:
            self._then()
        except Exception as e:
            self.future.set_exception(e)
        else:
            self.future.set_result(None)

    def call_off(self) -> None:
        """The engine goes on, before everything had stopped."""
        self.future.set_exception(ClientError("the engine was resumed before the pause was complete"))


def _nothing() -> None:
    """What a pause does at its end where caches are to be kept."""


def _next_version(version: str) -> str:
    """A function of the version alone, so that a core which was started again counts on: 1, 2; step 7, step 7+1."""
    if version.isdigit():
        return str(int(version) + 1)
    base, _, number = version.rpartition("+")
    return f"{base}+{int(number) + 1}" if base and number.isdigit() else f"{version}+1"
