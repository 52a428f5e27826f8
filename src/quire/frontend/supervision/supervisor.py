"""Keeping an engine core alive: a thread that starts it, watches it, and starts it again (promises P1, P3).

Death is seen at once, through the process's own descriptor; a hang through the heartbeat page, which the core writes
at each turn of its loop. The thread lives as long as the engine: the system ends a core together with the thread that
started it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import zmq

from quire.config.engine import LifecycleConfig
from quire.errors import EngineDeadError, NodesMissingError, QuireError
from quire.frontend.supervision.launch import (
    KILL_TIMEOUT_S,
    START_LOOK_S,
    CoreLaunch,
    CoreProcess,
    StalledStartError,
)
from quire.frontend.supervision.quarantine import CoreDeath, DeathCause, cause_of_exit, describe_exit, was_asked_to_end
from quire.interrupts import Wakeup
from quire.logger import init_logger
from quire.wire.heartbeat import Heartbeat, HeartbeatPage, Phase

logger = init_logger(__name__)

WATCH_INTERVAL_S = 0.5
"""Interval at which the heartbeat page is read."""
MAX_DEATHS_IN_DRAFT = 2
"""After so many deaths of cores that were drafting there is no speculation."""
NEED_INTERVAL_S = 0.02
"""Interval at which the supervisor checks whether a core that has died must be followed by another."""
HANG_FACTOR = 5.0
"""Longest time of a phase, as a multiple of what the core expects."""
FIRST_BACKOFF_S = 0.05
"""Wait before the second restart within the window; doubled for each further one. The first has no wait."""
MAX_BACKOFF_S = 5.0
MIN_STAGE_S = 5.0
"""Least time allowed for a stage of a start, however short it was before."""
STAGE_FACTOR = 10.0
"""Allowance of a stage of a start, as a multiple of its longest duration so far."""
TERMINATE_TIMEOUT_S = 5.0
"""Longest time a core that was asked to stop may take, beyond the time it has for its requests."""


class RestartBudget:
    """Restarts that are left, and the wait before the next one."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._restarts: deque[float] = deque()

    def take(self, now: float) -> float | None:
        """Uses one restart. Returns the seconds to wait before it; None if there is none left."""
        while self._restarts and now - self._restarts[0] >= self._window_s:
            self._restarts.popleft()
        num_recent = len(self._restarts)
        if num_recent >= self._limit:
            return None
        self._restarts.append(now)
        return 0.0 if num_recent == 0 else min(FIRST_BACKOFF_S * 2.0 ** (num_recent - 1), MAX_BACKOFF_S)

    def __str__(self) -> str:
        return f"{self._limit} restarts in {self._window_s:g} s"


class HangWatch:
    """Decides from its heartbeat whether a core hangs. Time in which this process did not run does not count."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._start = self._last_look = now
        self._phase_start = 0.0
        self._lost_s = 0.0
        """Time by which looks came too late in this phase: then, perhaps, the core did not run either."""

    def check_hang(self, beat: Heartbeat, now: float) -> float | None:
        """Returns the seconds without progress, if they are too many; None otherwise."""
        if beat.phase_start != self._phase_start:
            self._phase_start, self._lost_s = beat.phase_start, 0.0
        self._lost_s += max(0.0, now - self._last_look - WATCH_INTERVAL_S)
        self._last_look = now
        age = now - max(beat.phase_start, self._start) - self._lost_s
        return age if age > max(self._timeout_s, HANG_FACTOR * beat.expected_s) else None


class StartWatch:
    """Judges whether a core that is started again makes progress, by how long each stage of earlier starts took.

    The core numbers the stages of its start on the heartbeat page (`HeartbeatPage.begin_stage`); stage 0 lasts from the
    start of the process to its first entry there. A stage may take STAGE_FACTOR times its longest duration in a start
    that succeeded, and MIN_STAGE_S in any case; one that no start has shown, as long as the longest of all. A stage
    that was found too long may take twice as long in the next start: a slow disk is no hang. Nothing is judged in the
    first start. Time in which this process did not run itself does not count, nor does time in which the core waited
    for a processor: the machine may be more crowded than it was at the first start.
    """

    def __init__(self) -> None:
        self._durations: dict[int, float] = {}
        """Longest duration in seconds of each stage, in a start that succeeded, or the allowance after an extension."""
        self.has_succeeded = False
        self._begun: dict[int, float] = {}
        """Beginning of each stage of this start, CLOCK_MONOTONIC, moved by the time in which this process did not
        run."""
        self._last_look = 0.0
        self._queued_s = 0.0

    def begin(self, now: float) -> None:
        """Records that a process was started."""
        self._begun = {0: now}
        self._last_look = now
        self._queued_s = 0.0

    def check_stall(self, beat: Heartbeat, now: float, queued_s: float) -> float | None:
        """Returns the seconds without progress if they are too many, else None. To be called every START_LOOK_S.

        `queued_s` is for how long the threads of the core have waited for a processor so far.
        """
        stage = max(self._begun)
        if beat.step > stage:
            stage = beat.step
            self._begun[stage] = beat.phase_start
        since_s = now - self._last_look
        self._begun[stage] += max(0.0, since_s - 2 * START_LOOK_S, min(since_s, queued_s - self._queued_s))
        self._last_look, self._queued_s = now, queued_s
        age = now - self._begun[stage]
        known = self._durations.get(stage, max(self._durations.values(), default=0.0))
        limit = max(MIN_STAGE_S, STAGE_FACTOR * known, beat.expected_s)
        if not self.has_succeeded or age <= limit:
            return None
        self._durations[stage] = 2 * limit / STAGE_FACTOR
        return age

    def succeed(self, now: float) -> None:
        """Records that the core is ready: its stages are the measure for later starts."""
        ends = [*sorted(self._begun.values())[1:], now]
        for stage, end in zip(sorted(self._begun), ends, strict=True):
            self._durations[stage] = max(end - self._begun[stage], self._durations.get(stage, 0.0))
        self.has_succeeded = True


class CoreSupervisor(threading.Thread):
    """Runs one core after the other until it is stopped or the restart budget is used up.

    `on_death` is called with each death, `on_gone` with the reason why there will be no core any more; both on this
    thread. `on_gone` gets an error of the first start as it is: a start that has never worked is not repeated.
    `was_connected` returns whether the client has seen an incarnation ready, `has_live_requests` whether any request
    waits for a core.
    """

    def __init__(
        self,
        launch: CoreLaunch,
        config: LifecycleConfig,
        handshake: zmq.Socket[Any],
        directory: Path,
        *,
        on_death: Callable[[CoreDeath], None],
        on_gone: Callable[[QuireError], None],
        was_connected: Callable[[int], bool],
        has_live_requests: Callable[[], bool],
        first_incarnation: int = 0,
    ) -> None:
        """`first_incarnation` is above 0 where an engine of this index was removed before."""
        super().__init__(name="EngineCoreSupervisor", daemon=True)
        self.incarnation = first_incarnation
        self._launch = launch
        self._config = config
        self._handshake = handshake
        self._directory = directory
        self._on_death = on_death
        self._on_gone = on_gone
        self._was_connected = was_connected
        self._has_live_requests = has_live_requests
        self._budget = RestartBudget(config.core_restart_limit, config.core_restart_window_s)
        self._wakeup = Wakeup()
        self._start_watch = StartWatch()
        self._orders: set[Literal["stop", "expect_stop", "expect_leave", "restart"]] = set()
        """Orders of other threads."""
        self._has_spawned = threading.Event()
        self.restarts: dict[str, int] = {}
        """Number of restarts by cause of the death before."""
        self.core_pid: int | None = None
        """Process id of the core that lives now."""

    @property
    def _is_stopping(self) -> bool:
        return "stop" in self._orders

    @property
    def end_timeout_s(self) -> float:
        """The longest the thread may live after `stop`."""
        return self._config.shutdown_timeout + TERMINATE_TIMEOUT_S + 2 * KILL_TIMEOUT_S

    def set_engine_config(self, engine_config: bytes) -> None:
        """Sets the configuration of the next core. From any thread."""
        self._launch = dataclasses.replace(self._launch, engine_config=engine_config)

    def set_group(self, engine_config: bytes, page: str, generation: int) -> None:
        """Sets the group of engines that share experts which the next core belongs to. From any thread."""
        self._launch = dataclasses.replace(
            self._launch,
            engine_config=engine_config,
            group_file=page,
            experts_generation=generation,
            is_scale_up_launch=False,
        )

    def expect_stop(self) -> None:
        """Announces `stop`: a core that dies from now on is followed by another only while requests live. From any
        thread."""
        self._orders.add("expect_stop")

    def expect_leave(self) -> None:
        """Announces that the core will end by itself, in good order, and is not followed by another. From any
        thread."""
        self._orders |= {"expect_stop", "expect_leave"}

    def stop(self) -> None:
        """Asks the core to end, and this thread with it. From any thread, and from a finalizer."""
        self._orders.add("stop")
        self._wakeup.set()

    def ask_restart(self) -> None:
        """Makes a core that is ready end, and another start in its place, which the budget does not count. A core that
        is being started is left alone. From any thread."""
        self._orders.add("restart")

    def wait_spawned(self) -> None:
        """Waits until the first core's process runs, or there will be none: work that holds the GIL would delay it."""
        self._has_spawned.wait()

    def run(self) -> None:
        """The thread's body."""
        try:
            self._supervise()
        except QuireError as e:
            self._on_gone(e)
        except Exception as e:
            logger.exception("the supervisor of the engine core has failed")
            self._on_gone(EngineDeadError(f"the supervisor of the engine core has failed: {e}"))
        finally:
            self._has_spawned.set()
            self._handshake.close(linger=0)
            self._wakeup.close()

    def _supervise(self) -> None:
        incarnation, num_deaths_in_draft = self.incarnation, 0
        while (death := self._run_core(incarnation)) is not None:
            logger.log(
                logging.WARNING if death.was_asked else logging.ERROR,
                "engine core %s %s",
                self._name_core(incarnation),
                death.description,
            )
            self._on_death(death)
            if death.cause == "draft":
                num_deaths_in_draft += 1
                without_drafts = num_deaths_in_draft >= MAX_DEATHS_IN_DRAFT
                self._launch = dataclasses.replace(self._launch, without_drafts=without_drafts)
            if death.is_planned:
                incarnation += 1
                logger.info("starting engine core %s in its place", self._name_core(incarnation))
                continue
            if not self._wait_for_need(death):
                return
            backoff_s = self._budget.take(time.monotonic())
            if backoff_s is None:
                raise EngineDeadError(
                    f"the engine core {death.description}, and its budget of {self._budget} is used up; restart the "
                    "engine, or raise --core-restart-limit"
                )
            if self._sleep(backoff_s):
                return
            self.restarts[death.cause] = self.restarts.get(death.cause, 0) + 1
            incarnation += 1
            without = ", without speculation: others died while they drafted; no token changes"
            how = without if self._launch.without_drafts else ""
            logger.warning("starting engine core %s%s", self._name_core(incarnation), how)

    def _run_core(self, incarnation: int) -> CoreDeath | None:
        """Runs one core until its death, which it returns; None if the supervisor was stopped."""
        path = self._directory / f"heartbeat-{self._launch.engine_index}-{incarnation}"
        page = HeartbeatPage.create(path, self._launch.event_sequence)
        self.incarnation = incarnation
        try:
            core = CoreProcess(self._launch, self._handshake, incarnation, path)
            self.core_pid = core.pid
            self._has_spawned.set()
            try:
                return self._follow(core, page)
            finally:
                self.core_pid = None
                core.close()
        except QuireError as e:
            if not self._start_watch.has_succeeded or isinstance(e, NodesMissingError):
                raise
            return CoreDeath("start", f"could not be started again: {e}")
        finally:
            self._launch = dataclasses.replace(self._launch, event_sequence=page.event_sequence)
            page.close()
            path.unlink(missing_ok=True)

    def _follow(self, core: CoreProcess, page: HeartbeatPage) -> CoreDeath | None:
        self._start_watch.begin(time.monotonic())
        self._orders.discard("restart")  # it has just been started
        try:
            if not core.wait_ready(
                self._wakeup.fd,
                lambda: self._start_watch.check_stall(page.get_heartbeat(), time.monotonic(), core.queued_s),
            ):
                core.kill()
                return None
        except StalledStartError as e:
            core.kill()
            return CoreDeath("hang", f"{e} and was killed")
        except EngineDeadError:
            if core.returncode is None or not self._was_connected(core.incarnation):
                raise
            return _read_death(core, page.get_heartbeat())  # it did serve; only its word of it has not arrived
        self._start_watch.succeed(time.monotonic())
        watch = HangWatch(self._config.core_hang_timeout_s, time.monotonic())
        while not core.wait(WATCH_INTERVAL_S, self._wakeup.fd):
            if self._is_stopping:
                self._end(core)
                return None
            if "restart" in self._orders:
                self._end(core)
                return CoreDeath("killed", "has ended for a restart", was_asked=True, is_planned=True)
            beat = page.get_heartbeat()
            age = watch.check_hang(beat, time.monotonic())
            if age is not None:
                core.kill()
                description = f"made no progress for {age:.1f} s in phase {beat.phase.name} and was killed"
                return CoreDeath(_cause_in("hang", beat), description, beat.suspects)
        has_left = "expect_leave" in self._orders and core.returncode == 0
        return None if self._is_stopping or has_left else _read_death(core, page.get_heartbeat())

    def _end(self, core: CoreProcess) -> None:
        core.terminate()
        if not core.wait(self._config.shutdown_timeout + TERMINATE_TIMEOUT_S):
            name = self._name_core(core.incarnation)
            logger.warning("engine core %s did not end when it was asked to, and is killed", name)
            core.kill()

    def _name_core(self, incarnation: int) -> str:
        """Returns the name of a core in the log."""
        launch = self._launch
        return f"{launch.engine_index}.{incarnation}" if launch.is_one_of_several else str(incarnation)

    def _wait_for_need(self, death: CoreDeath) -> bool:
        """Waits until another core is needed. Returns False if this supervisor is stopped first."""
        start = time.monotonic()

        def is_needed() -> bool:
            is_draining, has_live_requests = "expect_stop" in self._orders, self._has_live_requests()
            age_s = time.monotonic() - start
            return death.calls_for_successor(age_s, is_draining=is_draining, has_live_requests=has_live_requests)

        while not is_needed():
            if self._sleep(NEED_INTERVAL_S):
                return False
        return True

    def _sleep(self, duration_s: float) -> bool:
        """Waits. Returns True if the supervisor was stopped."""
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        return bool(poller.poll(int(duration_s * 1000))) or self._is_stopping


def _read_death(core: CoreProcess, beat: Heartbeat) -> CoreDeath:
    returncode = core.returncode
    assert returncode is not None  # it has ended
    description = f"{describe_exit(returncode)} in phase {beat.phase.name}"
    was_asked = was_asked_to_end(returncode)
    cause = cause_of_exit(returncode)
    cause = cause if was_asked else _cause_in(cause, beat)
    return CoreDeath(cause, description, beat.suspects, was_asked, worker_end=beat.worker_end)


def _cause_in(cause: DeathCause, beat: Heartbeat) -> DeathCause:
    """Returns the cause of a death, as it is if the core was not drafting."""
    return "draft" if beat.phase is Phase.DRAFT else cause
