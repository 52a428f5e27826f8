"""One worker process of an executor: started, spoken with, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from quire import envs
from quire.config.parallel import ParallelConfig
from quire.errors import ConfigError, ServerError
from quire.logger import child_level
from quire.wire.process import search_path
from quire.wire.ring import RingReader, make_ring_file
from quire.wire.serial import Frame

WORKER_MODULE = "quire.worker.proc"
END_S = 5.0
"""Seconds that a worker gets to end by itself, and again after SIGTERM."""


class WorkerProcess:
    """A worker. Belongs to the thread that made it, which must live as long (PR_SET_PDEATHSIG)."""

    def __init__(self, rank: int, config: bytes, shared_file: int, calls: int, cpus: Sequence[int]) -> None:
        """`calls` is the ring that all workers read. Raises ServerError if the system refuses to start it."""
        self.rank = rank
        self.waker, theirs = socket.socketpair()
        answers = make_ring_file(1)
        self.answers = RingReader(answers, self.waker)
        fds = {"--shared-file": shared_file, "--calls": calls, "--answers": answers, "--waker": theirs.fileno()}
        command = [sys.executable, "-P", "-m", WORKER_MODULE, "--rank", str(rank), "--parent-pid", str(os.getpid())]
        command += [word for name, fd in fds.items() for word in (name, str(fd))]
        command += ["--cpus", ",".join(map(str, cpus))]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=tuple(fds.values()),
                env={**os.environ, "PYTHONPATH": search_path(), envs.LOGGING_LEVEL.name: child_level()},
                start_new_session=True,  # Ctrl-C in the user's terminal is for the frontend to decide on
            )
        except OSError as e:
            raise ServerError(f"worker {rank} cannot be started: {e}") from e
        finally:
            theirs.close()
            os.close(answers)
        self.pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already, which will be noticed
            self._process.stdin.write(len(config).to_bytes(8, "little") + config)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def describe_end(self) -> str | None:
        """Returns how the worker has ended; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def end(self) -> None:
        """Closes the worker's pipe and waits; kills it if it does not end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        for stop in (self._process.terminate, self._process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                break
            stop()
        self._process.wait()
        self.waker.close()
        self.answers.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


Send = Callable[[Sequence[Frame]], None]


def bind_cpus(config: ParallelConfig, root: Path = Path("/")) -> list[list[int]]:
    """Returns the processors of each worker by --cpu-bind; empty lists: all. Raises ConfigError."""
    size, text = config.world_size, config.cpu_bind
    if text == "none" or not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(size)]
    here = os.sched_getaffinity(0)
    if text != "auto":
        lists = [_read_cpus(part) for part in text.split("|")]
        if len(lists) != size:
            raise ConfigError(f"--cpu-bind {text}: {len(lists)} lists for {size} workers; separate one for each by |")
        if missing := set().union(*lists) - here:
            raise ConfigError(f"--cpu-bind {text}: this process may not use processor {min(missing)}")
        return lists
    if len(here) < size:
        return [[] for _ in range(size)]
    nodes = {cpu: number for number, cpus in _memory_nodes(root) for cpu in cpus}
    ordered = sorted(here, key=lambda cpu: (nodes.get(cpu, 0), cpu))
    return [ordered[i * len(here) // size : (i + 1) * len(here) // size] for i in range(size)]


def _read_cpus(text: str) -> list[int]:
    """Returns the processors of "0-3,8"."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
        return [cpu for own in ends for cpu in range(own[0], own[-1] + 1)]
    except ValueError:
        raise ConfigError(f"--cpu-bind: {text!r} is not a list of processors, as 0-3,8") from None


def _memory_nodes(root: Path) -> list[tuple[int, list[int]]]:
    """Returns the number and the processors of each memory node."""
    found = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ConfigError):
            found.append((int(path.name[4:]), _read_cpus((path / "cpulist").read_text().strip())))
    return found
