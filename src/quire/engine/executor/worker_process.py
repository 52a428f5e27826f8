"""One worker process of an executor: started, spoken with, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.parallel import ParallelConfig
from quire.errors import ConfigError, ServerError
from quire.logger import child_level
from quire.wire.heartbeat import WorkerEnd
from quire.wire.process import search_path
from quire.wire.ring import NUM_SLOTS, SLOT_BYTES, RingReader, make_ring_file
from quire.wire.topology import Topology

WORKER_MODULE = "quire.worker.proc"
END_S = 5.0
"""Seconds that a worker gets to end by itself, and again after SIGTERM."""


class WorkerProcess:
    """A worker. Belongs to the thread that made it, which must live as long (PR_SET_PDEATHSIG)."""

    def __init__(self, rank: int, config: bytes, shared: Mapping[str, Sequence[int]], cpus: Sequence[int]) -> None:
        """`shared` are descriptors that others have, too, by options. Raises ServerError if the system refuses to start
        it."""
        self.rank = rank
        self.waker, theirs = socket.socketpair()
        answers = make_ring_file(1)
        self.answers = RingReader(answers, self.waker)
        fds = {**shared, "--answers": [answers], "--waker": [theirs.fileno()]}
        command = [sys.executable, "-P", "-m", WORKER_MODULE, "--rank", str(rank), "--parent-pid", str(os.getpid())]
        command += [word for name, own in fds.items() for word in (name, ",".join(map(str, own)))]
        command += ["--cpus", ",".join(map(str, cpus))]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=tuple(chain.from_iterable(fds.values())),
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

    @property
    def end_kind(self) -> WorkerEnd:
        """Kind of its end."""
        code = self._process.poll()
        if code is None:
            return WorkerEnd.NONE
        return WorkerEnd.EXITED if code >= 0 else WorkerEnd.KILLED

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


class StagePipes:
    """Rings between the stages of a pipeline, and the sockets that wake their readers. Leaving the block closes them
    here: workers have theirs by then."""

    def __init__(self, topology: Topology, step_bytes: int) -> None:
        """`step_bytes`: most bytes of a message. A ring has room for two: a stage need not wait for the next one."""
        self._topology = topology
        slots = max(NUM_SLOTS, 2 * -(-step_bytes // (SLOT_BYTES - 64)))
        self._rings = [make_ring_file(topology.tp, num_slots=slots) for _ in range(topology.pp - 1)]
        self._sockets = [[socket.socketpair() for _ in range(topology.tp)] for _ in self._rings]

    def ends_of(self, rank: int) -> dict[str, list[int]]:
        """Returns the descriptors of a worker, by the option that names them. The first of a stage sends."""
        stage, ends = self._topology.place_of(rank), dict[str, list[int]]()
        if stage.pp > 0:
            ends["--inlet"] = [self._rings[stage.pp - 1], self._sockets[stage.pp - 1][stage.tp][1].fileno()]
        if stage.pp < len(self._rings) and stage.tp == 0:
            ends["--outlet"] = [self._rings[stage.pp], *(pair[0].fileno() for pair in self._sockets[stage.pp])]
        return ends

    def __enter__(self) -> StagePipes:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._rings:
            os.close(fd)
        for end in chain.from_iterable(chain.from_iterable(self._sockets)):
            end.close()


def max_hidden_bytes(config: EngineConfig) -> int:
    """Returns the most bytes of the hidden states of a step; 0 with a single stage."""
    rows = config.scheduler_config.max_num_batched_tokens
    if config.parallel_config.pipeline_parallel_size == 1 or rows is None:
        return 0
    return rows * config.model_config.hf_config.hidden_size * 4


def bind_cpus(config: ParallelConfig, root: Path = Path("/")) -> list[list[int]]:
    """Returns the processors of each worker of this engine by --cpu-bind; empty lists: all. Raises ConfigError.

    The processors are divided among the workers of all engines on this machine. An engine that was added later shares
    those of another.
    """
    size, engines, text = config.world_size, config.machine_engines, config.cpu_bind
    if text == "none" or not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(size)]
    first = (config.engine_index - engines.start) % len(engines) * size
    count = len(engines) * size
    here = os.sched_getaffinity(0)
    if text != "auto":
        lists = [_read_cpus(part) for part in text.split("|")]
        if len(lists) != count:
            raise ConfigError(f"--cpu-bind {text}: {len(lists)} lists for {count} workers; separate one for each by |")
        if missing := set().union(*lists) - here:
            raise ConfigError(f"--cpu-bind {text}: this process may not use processor {min(missing)}")
        return lists[first : first + size]
    if len(here) < count:
        return [[] for _ in range(size)]
    nodes = {cpu: number for number, cpus in _memory_nodes(root) for cpu in cpus}
    ordered = sorted(here, key=lambda cpu: (nodes.get(cpu, 0), cpu))
    places = range(first, first + size)
    return [ordered[i * len(here) // count : (i + 1) * len(here) // count] for i in places]


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
