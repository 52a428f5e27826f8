"""Pause, sleep, new weights: what stops an engine core for a while, and how it goes on.

======== ================================================= =====================================================
verb     what stops                                        what is given back
======== ================================================= =====================================================
pause    scheduling: of new requests (abort, wait) or of   nothing
         all (keep)
sleep 0  as pause                                          nothing
sleep 1  as pause                                          the KV cache; weights leave an accelerator for main
                                                           memory (on a CPU they are there already, and stay)
sleep 2  as pause                                          the KV cache, the weights and the adapters
======== ================================================= =====================================================

Requests that arrive meanwhile wait. Requests that were kept (mode "keep") go on afterwards: where their KV is gone or
belongs to other weights, all their tokens are computed again, so from then on every token is what the model in memory
gives for the text so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Any, get_args

import msgspec

from quire.engine.executor.abstract import Executor
from quire.engine.lora.manager import AdapterManager
from quire.engine.request import RequestStatus
from quire.engine.sched.interface import NoExchange, PauseState, SchedulerInterface
from quire.errors import ClientError, ServerError, ValidationError, error_name, nearest
from quire.interrupts import InterruptShield
from quire.logger import init_logger
from quire.wire.engine_core import PauseMode, UtilityOutput
from quire.wire.utility import UTILITIES

logger = init_logger(__name__)

KV_CACHE, WEIGHTS, SCHEDULING = "kv_cache", "weights", "scheduling"
"""The tags of `wake_up`."""


class Lifecycle:
    """Owns the state of pauses, sleep and weights. Knows nothing of tensors, clients or processes.

    A pause is complete when nothing is being computed. Where the caller's thread runs the steps, the verbs complete it
    themselves. A core with a loop of its own sets `can_wait` and calls `notify_idle` whenever it has nothing to do: the
    verbs then return a Future. Everything runs on the core's one thread.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Executor,
        has_work: Callable[[], bool],
        finish_steps: Callable[[], None],
        adapters: AdapterManager,
        exchange: NoExchange,
    ) -> None:
        self._exchange = exchange
        self._adapters = adapters
        self._scheduler = scheduler
        self._executor = executor
        self._has_work = has_work
        self._finish_steps = finish_steps
        self.can_wait = False
        """True if steps continue by themselves while a verb waits for them."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called when a pause begins, before it is checked whether anything runs."""
        self.on_resume: Callable[[], None] = lambda: None
        """Called when scheduling goes on."""
        self._idle_state_callbacks: deque[_Pause] = deque()
        self._is_asleep = False
        self._released: set[str] = set()
        """Which of KV_CACHE and WEIGHTS are released."""
        self._weight_version = "0"
        self.before_update: Callable[[], None] = lambda: None
        """Called before weights are replaced."""
        self.on_update: Callable[[str, str], None] = lambda path, version: None
        """Called with path and version of new weights, once they are in memory."""

    # -- pause -----------------------------------------------------------------------------------------------------

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Stops scheduling. abort: ends all requests first. wait: lets running requests end. keep: freezes them.

        Clients of aborted requests get their end with the next step's outputs. `clear_cache` drops all cached prefixes;
        frozen requests are then computed again. The returned Future ends when nothing runs; None: nothing runs already.
        Raises ValueError for an unknown mode, and for "wait" where the caller's own thread would have to run the steps.
        """
        return self._pause(mode, self._reset_caches if clear_cache else lambda: None)

    def resume_scheduler(self) -> None:
        """Schedules everything again. Cancels a pause that is not complete: its Future fails.

        Raises ClientError for an engine that has released memory: it must `wake_up` first.
        """
        if self._released:
            raise ClientError(f"the engine is asleep ({self._missing()} given back); call wake_up() instead")
        self._is_asleep = False
        self._adapters.wake_up()
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        while self._idle_state_callbacks:
            error = ClientError("the engine was resumed before the pause was complete")
            self._idle_state_callbacks.popleft().future.set_exception(error)
        self.on_resume()

    def is_scheduler_paused(self) -> bool:
        """Returns whether new requests wait."""
        return self._scheduler.pause_state is not PauseState.UNPAUSED

    def notify_idle(self) -> None:
        """Completes what waits for an idle core. Called when there is nothing to do and no step in flight."""
        while self._idle_state_callbacks:
            self._idle_state_callbacks.popleft().complete()

    def _pause(self, mode: PauseMode, then: Callable[[], None]) -> Future[None] | None:
        """Stops scheduling by `mode`; calls `then` when nothing runs."""
        self._validate_mode(mode)
        with InterruptShield():
            if mode == "abort":
                self._scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED, report=True)
            self._scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
            self.on_pause()
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
        """Pauses, then releases memory (see the table above). A sleeping engine can be sent to a deeper level.

        Returns and raises as `pause_scheduler` does; ValueError also for an unknown level.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"sleep level {level!r} is not known; use 0 (pause), 1 (KV cache) or 2 (weights, too)")
        return self._pause(mode, lambda: self._fall_asleep(level))

    def release_kv_cache_memory(self, mode: PauseMode = "abort") -> Future[None] | None:
        """Sleeps like level 1, but weights stay in place, on an accelerator too. `wake_up` allocates the cache
        again."""
        return self._pause(mode, self._release_kv_cache)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Allocates what was released: everything, or "weights" and "kv_cache" by name. Returns True when all is there.

        Then scheduling continues. Raises ValueError for another tag ("scheduling" is accepted and does nothing more),
        and what the workers raise when, say, the checkpoint is missing: the engine then stays asleep.
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
        """Returns whether memory is released."""
        return self._is_asleep

    def _fall_asleep(self, level: int) -> None:
        if level:
            self._reset_caches()
            # marked first: if a worker fails half-way, waking up restores everything
            self._released |= {KV_CACHE, WEIGHTS}
        self._is_asleep = True
        if level == 2:
            self._adapters.sleep()
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

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool | Future[bool]:
        """Drops all cached prefixes. Returns False if running requests hold blocks and may not be preempted.

        `reset_connector` drops what is stored outside the engine, too, and may return a Future, whose result is False
        if a store has not done it; without a connector there is nothing.
        """
        with InterruptShield():
            is_reset = self._scheduler.reset_prefix_cache(reset_running_requests)
            if is_reset and self._executor.config.speculative_config.drafting is not None:
                self._executor.collective_rpc("reset_drafter")  # what it learned comes from the same texts
            if not is_reset or not reset_connector:
                return is_reset
            return self._exchange.reset_store(can_wait=self.can_wait)

    def _reset_caches(self) -> None:
        """Drops all cached prefixes, whatever runs. Raises ServerError if blocks are still in use."""
        if not self.reset_prefix_cache(reset_running_requests=True):
            raise ServerError("the prefix cache cannot be reset: blocks are in use though no request runs")

    # -- weights ---------------------------------------------------------------------------------------------------

    def get_weight_version(self) -> str:
        """Returns the version of the weights in memory: "0" after start-up, then what `update_weights` was given."""
        return self._weight_version

    def update_weights(self, path: str, version: str | None = None) -> str:
        """Replaces the weights in place by those of the checkpoint directory `path`. Returns the new version.

        `version` is a label; without one it is the old one plus 1. Running and frozen requests are computed again with
        the new weights: they keep their tokens, and the next ones are the new model's. The prefix cache is reset, so
        nothing computed from the old weights is left.

        A checkpoint that does not fit (ModelLoadError) is refused on all workers before anything is changed. If reading
        fails later, the old weights are read again, and the error is raised. If that fails too, the engine sleeps until
        `wake_up` can read its weights.
        """
        self._executor.collective_rpc("check_weights", args=(path,))
        with InterruptShield() as shield:
            self._finish_steps()
            self.before_update()
            self._reset_caches()
            was_missing = WEIGHTS in self._released
            self._released.add(WEIGHTS)
            shield.may_break = True
            try:
                self._executor.collective_rpc("load_weights", args=(path,))
            except BaseException:
                shield.may_break = False
                self._restore_weights(reads=not was_missing)
                raise
            shield.may_break = False
            self._exchange.set_weights(path)
            self._released.discard(WEIGHTS)
            self._weight_version = _next_version(self._weight_version) if version is None else version
            self.on_update(path, self._weight_version)
        logger.info("weights of %s, version %s", path, self._weight_version)
        return self._weight_version

    def _restore_weights(self, *, reads: bool) -> None:
        """Takes back an update that failed half-way, or in some workers only. `reads`: reads the old weights again."""
        try:
            self._executor.collective_rpc("undo_weights")
            if reads:
                self._executor.collective_rpc("load_weights")
        except Exception:
            logger.exception("the old weights cannot be read again either: the engine sleeps until wake_up() can")
            self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
            self._is_asleep = True
        else:
            self._released -= {WEIGHTS} if reads else set()


class _Pause:
    """A pause that is not complete: what to call when nothing runs, and the Future that then ends."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.future: Future[None] = Future()
        self._then = then

    def complete(self) -> None:
        """Called when nothing runs."""
        try:
            self._then()
        except Exception as e:
            self.future.set_exception(e)
        else:
            self.future.set_result(None)


def _next_version(version: str) -> str:
    """Returns the next version. It depends on the version alone, so a restarted core counts on: 1, 2; step 7,
    step 7+1."""
    if version.isdigit():
        return str(int(version) + 1)
    base, _, number = version.rpartition("+")
    return f"{base}+{int(number) + 1}" if base and number.isdigit() else f"{version}+1"


def run_utility(core: Any, name: str, args: Sequence[Any]) -> Any:
    """Calls a verb of `wire/utility.py: UTILITIES` on `core` with arguments from the wire, or as Python objects.

    Lists and maps become the Structs and tuples that the verb takes. The result may be a Future: the verb then ends
    later. Raises ValidationError for a name or an argument that is not in the table, and what the verb raises.
    """
    spec = UTILITIES.get(name)
    if spec is None:
        hint = nearest(str(name), UTILITIES, f"there are {', '.join(UTILITIES)}")
        raise ValidationError(f"the engine has no control verb {name!r}; {hint}", param="method", value=name)
    if len(args) > len(spec.arguments):
        raise ValidationError(f"{name} takes {len(spec.arguments)} arguments, {len(args)} were given", param="args")
    converted = [_convert(name, index, arg, spec.arguments[index]) for index, arg in enumerate(args)]
    return attrgetter(spec.method)(core)(*converted)


def answer_utility(
    core: Any, call_id: int, name: str, args: Sequence[Any], send: Callable[[UtilityOutput], None]
) -> None:
    """Calls a verb for a client in another process, and passes the answer to `send`, now or when the verb ends.

    Raises nothing that the verb raises: that becomes the answer's `failure_message`.
    """
    _answer(lambda: run_utility(core, name, args), call_id, name, send)


def _answer(call: Callable[[], Any], call_id: int, name: str, send: Callable[[UtilityOutput], None]) -> None:
    try:
        result = call()
    except Exception as e:
        error_type = error_name(e) or ("ValidationError" if isinstance(e, ValueError | TypeError) else "")
        send(UtilityOutput(call_id, failure_message=f"Call to {name} method failed: {e}", error_type=error_type))
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda future: _answer(future.result, call_id, name, send))
    else:
        send(UtilityOutput(call_id, result=result))


def _convert(name: str, index: int, arg: Any, wanted: Any) -> Any:
    try:
        return msgspec.convert(arg, wanted)
    except msgspec.ValidationError as e:
        raise ValidationError(f"{name}: argument {index + 1} ({arg!r}): {e}", param="args", value=arg) from None
