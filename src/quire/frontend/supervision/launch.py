"""Starts one engine core process, and ends it.

The child is a plain command, `python -m quire.engine.proc`: no fork of this process, no `__main__` guard in anyone's
script, nothing inherited but the environment, standard error, and a pipe whose end shows that this process is gone;
and the file of experts, where engines share them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire import envs
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, EngineDeadError, make_error
from quire.frontend.supervision.quarantine import describe_exit
from quire.logger import child_level, init_logger
from quire.wire.group import GroupNetwork
from quire.wire.handshake import (
    EngineHandshakeMetadata,
    EngineStatus,
    EngineZmqAddresses,
    check_protocol_version,
    engine_identity,
)
from quire.wire.process import search_path
from quire.wire.sockets import CurveKeys, bound_address

logger = init_logger(__name__)

CORE_MODULE = "quire.engine.proc"
KILL_TIMEOUT_S = 10.0
"""Longest time the system may take to end a process that was sent SIGKILL."""
LAST_WORDS_MS = 200
"""Time in which the last message of a process that has ended may still arrive: on a busy machine it comes later than
the end."""
START_LOOK_S = 0.1
"""Interval at which the progress of a start is checked."""


class StalledStartError(EngineDeadError):
    """A core that starts has made no progress for too long."""


@dataclass(frozen=True)
class CoreLaunch:
    """Values that an incarnation of a core is started with."""

    addresses: EngineZmqAddresses
    engine_config: bytes
    log_stats: bool
    ready_timeout_s: float
    core_curve: CurveKeys | None = None
    """The core's side of the keys, for addresses of the network."""
    engine_index: int = 0
    is_one_of_several: bool = False
    """True: the server has other engines, too."""
    without_drafts: bool = False
    """True: the core does not speculate, whatever its configuration says."""
    event_sequence: int = 0
    """Sequence number of its first batch of KV cache events."""
    preload: tuple[str, ...] = ()
    """Dotted names the core resolves while it shakes hands."""
    group_file: str | None = None
    """Page of the engines that step together; None for independent ones."""
    experts_file: int = -1
    """Descriptor of the file of engines that share experts, which the core inherits; -1: they share none."""
    experts_generation: int = 0
    """Number of their group."""
    is_scale_up_launch: bool = False
    """True for an engine that is started for a group which does not compute yet."""
    group_network: GroupNetwork | None = None
    """The hub of the engines that share experts on several machines; None: they are on one, or share none."""
    working_dir: str = field(default_factory=os.getcwd)
    """Directory in which relative paths of the configuration begin, wherever this process may go later."""
    search_path: str = field(default_factory=search_path)
    """Search path of modules: every core finds the same Quire, and the same plug-ins."""


class CoreProcess:
    """One incarnation. Belongs to one thread, which must live as long as the process (PR_SET_PDEATHSIG)."""

    def __init__(self, launch: CoreLaunch, handshake: zmq.Socket[Any], incarnation: int, heartbeat_path: Path) -> None:
        """Raises EngineDeadError if the system refuses to start it."""
        self._launch = launch
        self._handshake = handshake
        self.incarnation = incarnation
        self._heartbeat_path = heartbeat_path
        self._process = _spawn(launch, bound_address(handshake))
        self._pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def queued_s(self) -> float:
        """Seconds for which its threads have waited for a processor that others had (Linux; elsewhere 0)."""
        total_ns = 0
        for path in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has just ended
                total_ns += int(path.read_text(encoding="ascii").split()[1])
        return total_ns / 1e9

    # -- start ----------------------------------------------------------------------------------------------------

    def wait_ready(self, stop_fd: int, get_stall: Callable[[], float | None]) -> bool:
        """Answers the core until it is ready; returns False if `stop_fd` became readable first.

        `get_stall` returns for how many seconds the start has made no progress, once that is too long.

        Raises the error that the core reports; StalledStartError if the start makes no progress; EngineDeadError if the
        core dies or takes longer than the ready timeout.
        """
        deadline = time.monotonic() + self._launch.ready_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if (stalled_s := get_stall()) is not None:
                raise StalledStartError(f"made no progress for {stalled_s:.1f} s while it was starting")
            ready = self._poll([self._handshake, stop_fd], min(left, START_LOOK_S))
            if stop_fd in ready:
                return False
            if self._handshake in ready and self._take_status(self._handshake.recv_multipart()):
                return True
            if self.returncode is not None and not self._handshake.poll(LAST_WORDS_MS):
                raise EngineDeadError(
                    f"the engine core {describe_exit(self.returncode)} before it was ready; its last words are above, "
                    "on standard error"
                )
        raise EngineDeadError(
            f"the engine core was not ready within {self._launch.ready_timeout_s:g} s; "
            "QUIRE_ENGINE_READY_TIMEOUT_S gives it longer"
        )

    def _take_status(self, frames: list[bytes]) -> bool:
        """Answers a message on the handshake socket. Returns True for READY."""
        try:
            identity, data = frames
            status = msgspec.msgpack.decode(data, type=EngineStatus)
        except ValueError as e:
            logger.warning("a message on the handshake socket was dropped: %s", e)
            return False
        if identity != engine_identity(self._launch.engine_index) or status.pid != self.pid:
            logger.warning("a message of process %d, not of the engine core %d, was dropped", status.pid, self.pid)
            return False
        check_protocol_version(status.protocol_version, "the engine core")
        if status.status == "HELLO":
            self._handshake.send_multipart([identity, msgspec.msgpack.encode(self._make_metadata())])
        elif status.status == "FAILED":
            message = status.message if status.error_type else f"the engine core could not start: {status.message}"
            raise make_error(status.error_type, message, EngineDeadError)
        return status.status == "READY"

    def _make_metadata(self) -> EngineHandshakeMetadata:
        return EngineHandshakeMetadata(
            addresses=self._launch.addresses,
            engine_config=self._launch.engine_config,
            incarnation=self.incarnation,
            log_stats=self._launch.log_stats,
            heartbeat_path=str(self._heartbeat_path),
            without_drafts=self._launch.without_drafts,
            group_file=self._launch.group_file,
            experts_file=self._launch.experts_file,
            experts_generation=self._launch.experts_generation,
            is_scale_up_launch=self._launch.is_scale_up_launch,
            group_network=self._launch.group_network,
            curve=self._launch.core_curve,
        )

    # -- life and death -------------------------------------------------------------------------------------------

    @property
    def returncode(self) -> int | None:
        """Exit status as subprocess has it: negative for a signal; None while the process lives."""
        return self._process.poll()

    def wait(self, timeout_s: float, stop_fd: int | None = None) -> bool:
        """Waits until the process has ended or `stop_fd` is readable. Returns whether it has ended."""
        deadline = time.monotonic() + timeout_s
        while self.returncode is None:
            left = deadline - time.monotonic()
            if left <= 0 or (self._poll([stop_fd] if stop_fd is not None else [], left) - {self._pidfd}):
                return self.returncode is not None
        return True

    def _poll(self, sources: list[Any], timeout_s: float) -> set[Any]:
        """Returns the readable ones among `sources` and the process's own descriptor; at the latest after
        `timeout_s`."""
        poller = zmq.Poller()
        if self._pidfd is not None:
            sources = [*sources, self._pidfd]
        else:
            timeout_s = min(timeout_s, 0.05)  # a system without pidfd: look now and then
        for source in sources:
            poller.register(source, zmq.POLLIN)
        return {source for source, _ in poller.poll(math.ceil(max(0.0, timeout_s) * 1000))}

    def terminate(self) -> None:
        """Asks the process to end in good order."""
        self._process.terminate()

    def kill(self) -> None:
        """Kills the process. Returns when it has ended, or the system cannot end it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)

    def close(self) -> None:
        """Closes the descriptors; kills a process that still lives."""
        if self.returncode is None:
            self.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _spawn(launch: CoreLaunch, handshake_address: str) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise ConfigError(
            "this Python does not know its own executable, so no engine core can be started; "
            "QUIRE_ENABLE_MULTIPROCESSING=0 runs the core in this process"
        )
    # -P: unlike in a plain "python -m", a file json.py in the working directory must not stand in for a module.
    command = [sys.executable, "-P", "-m", CORE_MODULE, "--handshake-address", handshake_address]
    command += ["--engine-index", str(launch.engine_index), "--parent-pid", str(os.getpid())]
    command += ["--preload", ",".join(launch.preload)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": launch.search_path, envs.LOGGING_LEVEL.name: child_level()},
            cwd=launch.working_dir,
            pass_fds=(launch.experts_file,) if launch.experts_file >= 0 else (),
            start_new_session=True,  # Ctrl-C in the user's terminal is for this process to decide on
        )
    except OSError as e:
        raise EngineDeadError(f"no engine core process can be started: {e}") from e
    if launch.core_curve is not None and handshake_address.startswith("tcp://"):
        assert process.stdin is not None  # asked for above
        with contextlib.suppress(BrokenPipeError):  # it has died already, which will be noticed
            process.stdin.write(msgspec.msgpack.encode(launch.core_curve))
            process.stdin.flush()
    return process


def pin_config(config: EngineConfig, max_model_len: int, num_gpu_blocks: int | None) -> EngineConfig:
    """Returns the configuration of later cores: live requests were promised the context. `num_gpu_blocks` is the size
    of the KV cache where the free memory no longer shows it, because the machine has other engines; else None."""
    model, cache = config.model_config, config.cache_config
    if max_model_len != model.model_len:
        model = dataclasses.replace(model, max_model_len=max_model_len)
    if num_gpu_blocks is not None:
        cache = dataclasses.replace(cache, num_gpu_blocks_override=num_gpu_blocks)
    return dataclasses.replace(config, model_config=model, cache_config=cache)
