"""Starts the coordinator of engines that step together (`quire.coordinator`), and another when it dies.

The next one takes its addresses: engines and clients connect and subscribe anew by themselves, and each engine reports
its wave then. No request waits for more than that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any

import msgspec
import zmq

from quire import envs
from quire.config.engine import LifecycleConfig
from quire.errors import EngineDeadError, QuireError
from quire.frontend.supervision.quarantine import describe_exit
from quire.frontend.supervision.supervisor import RestartBudget
from quire.interrupts import Wakeup
from quire.logger import child_level, init_logger
from quire.wire.group import HubLaunch
from quire.wire.handshake import CoordinatorAddresses, CoordinatorLaunch
from quire.wire.process import search_path
from quire.wire.sockets import CurveKeys

logger = init_logger(__name__)

COORDINATOR_MODULE = "quire.coordinator"
READY_TIMEOUT_S = 120.0
MAX_REPORT_BYTES = 4096
END_S = 5.0


@dataclasses.dataclass(frozen=True)
class CoordinatorPlan:
    """Sockets and keys of a coordinator, and the number of engines that it waits for first."""

    addresses: CoordinatorAddresses
    num_engines: int
    curve: CurveKeys | None = None
    group: HubLaunch | None = None
    """The hub of engines on several machines that share experts."""


class CoordinatorSupervisor(threading.Thread):
    """Runs one coordinator after the other until it is stopped, or the restart budget is used up (`on_gone`).

    The system ends a coordinator together with this thread, which started it.
    """

    def __init__(self, plan: CoordinatorPlan, config: LifecycleConfig, on_gone: Callable[[QuireError], None]) -> None:
        super().__init__(name="CoordinatorSupervisor", daemon=True)
        self._plan, self._on_gone = plan, on_gone
        self._budget = RestartBudget(config.core_restart_limit, config.core_restart_window_s)
        self._wakeup = Wakeup()
        self._is_stopping = False
        self.addresses: Future[CoordinatorAddresses] = Future()
        """Addresses that it is bound to, or the error of its first start."""
        self.pid: int | None = None
        """Process id of the coordinator that lives now."""
        self.num_restarts = 0

    def stop(self) -> None:
        """Ends the coordinator and this thread. From any thread."""
        self._is_stopping = True
        self._wakeup.set()

    def run(self) -> None:
        """The thread's body."""
        try:
            self._supervise()
        except QuireError as e:
            if not self.addresses.done():
                self.addresses.set_exception(e)
            else:
                self._on_gone(e)
        finally:
            self._wakeup.close()

    def _supervise(self) -> None:
        num_expected = self._plan.num_engines
        while True:
            returncode = self._run_one(num_expected)
            if self._is_stopping:
                return
            num_expected = 1
            how = describe_exit(returncode)
            backoff_s = self._budget.take(time.monotonic())
            if backoff_s is None:
                raise EngineDeadError(
                    f"the coordinator of the engines {how}, and its budget of {self._budget} is used up; restart the "
                    "server, or raise --core-restart-limit"
                )
            logger.error("the coordinator of the engines %s; starting another", how)
            self.num_restarts += 1
            if self._wait([self._wakeup.fd], backoff_s):
                return

    def _run_one(self, num_expected: int) -> int:
        """Runs one coordinator to its end. Returns its exit code."""
        launch = CoordinatorLaunch(self._plan.addresses, num_expected, os.getpid(), self._plan.curve, self._plan.group)
        process = _spawn(launch)
        self.pid = process.pid
        try:
            assert process.stdout is not None  # requested
            if self._read_report(process.stdout):
                self._wait([self._wakeup.fd, process.stdout], math.inf)  # its end closes its standard output
        finally:
            self.pid = None
            _end(process)
        return process.returncode

    def _read_report(self, stdout: IO[bytes]) -> bool:
        """Takes over the addresses of the first coordinator: the next ones are bound to the same. Returns False if it
        reports none. Raises EngineDeadError if that is the first."""
        is_readable = stdout in self._wait([self._wakeup.fd, stdout], READY_TIMEOUT_S)
        report = os.read(stdout.fileno(), MAX_REPORT_BYTES) if is_readable else b""
        if not report:
            if self._is_stopping or self.addresses.done():
                return False
            raise EngineDeadError(
                "the coordinator of the engines ended before it was ready; its last words are on standard error"
                if is_readable
                else f"the coordinator of the engines was not ready within {READY_TIMEOUT_S:g} s"
            )
        addresses = msgspec.msgpack.decode(report, type=CoordinatorAddresses)
        if not self.addresses.done():
            self._plan = dataclasses.replace(self._plan, addresses=addresses)
            self.addresses.set_result(addresses)
        return True

    def _wait(self, sources: list[Any], timeout_s: float) -> set[Any]:
        """Returns the readable ones of the sources; after `timeout_s` at the latest."""
        poller = zmq.Poller()
        for source in sources:
            poller.register(source, zmq.POLLIN)
        by_fd = {source if isinstance(source, int) else source.fileno(): source for source in sources}
        timeout_ms = None if timeout_s == math.inf else math.ceil(timeout_s * 1000)
        return {by_fd.get(fd, fd) for fd, _ in poller.poll(timeout_ms)}


def _spawn(launch: CoordinatorLaunch) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", COORDINATOR_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search_path(), envs.LOGGING_LEVEL.name: child_level()},
            start_new_session=True,
        )
    except OSError as e:
        raise EngineDeadError(f"no coordinator of the engines can be started: {e}") from e
    assert process.stdin is not None  # requested
    with contextlib.suppress(BrokenPipeError):  # it has died already, which will be noticed
        process.stdin.write(msgspec.msgpack.encode(launch))
        process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it has nothing to save
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
