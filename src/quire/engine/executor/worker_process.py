"""The worker processes of an engine on one machine: started, spoken with, and ended."""

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
from quire.config.server import encode_config
from quire.errors import ConfigError, ServerError
from quire.logger import child_level
from quire.wire.heartbeat import WorkerEnd
from quire.wire.process import search_path
from quire.wire.ring import (
    NO_BELL,
    NUM_SLOTS,
    SLOT_BYTES,
    RingReader,
    RingWriter,
    count_slots,
    make_bell,
    make_ring_file,
)
from quire.wire.shared_memory import make_workers_file
from quire.wire.topology import Topology
from quire.wire.worker_link import WorkerNetwork, encode_network

WORKER_MODULE = "quire.worker.proc"
END_S = 5.0
"""Seconds that a worker gets to end by itself, and again after SIGTERM."""


class WorkerProcess:
    """A worker. Belongs to the thread that made it, which must live as long (PR_SET_PDEATHSIG)."""

    def __init__(
        self,
        rank: int,
        start: Sequence[bytes],
        shared: Mapping[str, Sequence[int]],
        options: Mapping[str, str],
        bell: int = NO_BELL,
    ) -> None:
        """`start` is what it reads first, `shared` are descriptors that others have, too, by options; `bell` wakes the
        reader of its answers. Raises ServerError if the system refuses to start it."""
        self.rank = rank
        self.waker, theirs = socket.socketpair()
        answers = make_ring_file(1)
        self.answers = RingReader(answers, self.waker, bell=bell)
        fds = {**shared, "--answers": [answers], "--waker": [theirs.fileno()]}
        if bell != NO_BELL:
            fds["--answers-bell"] = [bell]
        command = [sys.executable, "-P", "-m", WORKER_MODULE, "--rank", str(rank), "--parent-pid", str(os.getpid())]
        command += [word for name, own in fds.items() for word in (name, ",".join(map(str, own)))]
        command += chain.from_iterable(options.items())
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
            for part in start:
                self._process.stdin.write(len(part).to_bytes(8, "little") + part)
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

    def __init__(self, topology: Topology, step_bytes: int, stages: range | None = None) -> None:
        """`step_bytes`: most bytes of a message. A ring has room for two: a stage need not wait for the next one.
        `stages`: those on this machine; None: all. There are rings to the stages before and after them, too."""
        self._topology = topology
        self._stages = stages = range(topology.pp) if stages is None else stages
        slots = max(NUM_SLOTS, 2 * -(-step_bytes // (SLOT_BYTES - 64)))
        self._rings, self._sockets = dict[int, int](), dict[int, list[tuple[socket.socket, socket.socket]]]()
        """Rings and sockets by the stage that reads. A stage on another machine has one reader here."""
        for stage in range(max(1, stages.start), min(topology.pp, stages.stop + 1)) if stages else ():
            num_readers = topology.tp if stage in stages else 1
            self._rings[stage] = make_ring_file(num_readers, num_slots=slots)
            self._sockets[stage] = [socket.socketpair() for _ in range(num_readers)]

    def ends_of(self, rank: int) -> dict[str, list[int]]:
        """Returns the descriptors of a worker, by the option that names them. The first of a stage sends."""
        place, ends = self._topology.place_of(rank), dict[str, list[int]]()
        if place.pp in self._rings:
            ends["--inlet"] = [self._rings[place.pp], self._sockets[place.pp][place.tp][1].fileno()]
        if place.pp + 1 in self._rings and place.tp == 0:
            sockets = self._sockets[place.pp + 1]
            ends["--outlet"] = [self._rings[place.pp + 1], *(pair[0].fileno() for pair in sockets)]
        return ends

    def make_inlet(self) -> RingWriter | None:
        """Returns the end that brings results of a stage on another machine; None: there is none before these."""
        stage = self._stages.start
        if stage not in self._rings:
            return None
        fd = self._rings[stage]
        wakers = [pair[0].dup() for pair in self._sockets[stage]]
        return RingWriter(fd, wakers, num_slots=count_slots(fd, len(wakers)))

    def make_outlet(self) -> RingReader | None:
        """Returns the end that takes results to a stage on another machine; None: there is none after these."""
        stage = self._stages.stop
        if stage not in self._rings:
            return None
        fd = self._rings[stage]
        return RingReader(fd, self._sockets[stage][0][1].dup(), num_slots=count_slots(fd, 1))

    def __enter__(self) -> StagePipes:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._rings.values():
            os.close(fd)
        for end in chain.from_iterable(chain.from_iterable(self._sockets.values())):
            end.close()


class WorkerGroup:
    """The workers of an engine on one machine, and what they share. `close` ends them."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: range,
        late: socket.socket,
        network: WorkerNetwork | None = None,
        bell: int = NO_BELL,
    ) -> None:
        """Starts them. `late`: where they answer beside the steps. `network`: leads to workers on other machines; on
        the first one the calls can be read here then. `bell`: wakes the reader of the answers. Raises ServerError or
        ConfigError."""
        parallel = config.parallel_config
        topology = Topology(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
        self.stages = range(0)
        if ranks:
            self.stages = range(topology.place_of(ranks[0]).pp, topology.place_of(ranks[-1]).pp + 1)
        self.workers = list[WorkerProcess]()
        self.inlet: RingWriter | None = None
        """The ring of results of a stage on another machine; None: there is none before these."""
        self.outlet: RingReader | None = None
        """The ring of results for a stage on another machine."""
        self.calls_reader: RingReader | None = None
        """Brings the calls to what passes them on to other machines; None: nothing does."""
        self._relay_waker: socket.socket | None = None
        self.shared_file = make_workers_file(topology.pp)
        passes_on = network is not None and network.share == 0
        num_readers = len(ranks) + passes_on
        calls, self._calls_bell = make_ring_file(num_readers), make_bell()
        try:
            start = encode_config(config), encode_network(network)
            options = {"--ranks": f"{ranks.start},{ranks.stop - 1}", "--num-readers": str(num_readers)}
            with StagePipes(topology, max_hidden_bytes(config), self.stages) as pipes:
                for rank, cpus in zip(ranks, bind_cpus(parallel, num_workers=len(ranks)), strict=True):
                    fds = {"--shared-file": [self.shared_file], "--calls": [calls], **pipes.ends_of(rank)}
                    fds["--late"] = [late.fileno()]
                    if self._calls_bell != NO_BELL:
                        fds["--calls-bell"] = [self._calls_bell]
                    own = {**options, "--cpus": ",".join(map(str, cpus))}
                    self.workers.append(WorkerProcess(rank, start, fds, own, bell))
                self.inlet, self.outlet = pipes.make_inlet(), pipes.make_outlet()
            wakers = [worker.waker for worker in self.workers]
            if passes_on:
                self._relay_waker, theirs = socket.socketpair()
                wakers.append(self._relay_waker)
                self.calls_reader = RingReader(calls, theirs, len(ranks), num_readers)
            self.calls = RingWriter(calls, wakers, bell=self._calls_bell)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(calls)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self.workers:
            worker.end()
        os.close(self.shared_file)
        if self._calls_bell != NO_BELL:
            os.close(self._calls_bell)
        for ring in (self.inlet, self.outlet, self.calls_reader):
            if ring is not None:
                ring.end()
        if self._relay_waker is not None:
            self._relay_waker.close()


def max_hidden_bytes(config: EngineConfig) -> int:
    """Returns the most bytes of the hidden states of a step; 0 with a single stage."""
    rows = config.scheduler_config.max_num_batched_tokens
    if config.parallel_config.pipeline_parallel_size == 1 or rows is None:
        return 0
    return rows * config.model_config.hf_config.hidden_size * 4


def bind_cpus(config: ParallelConfig, root: Path = Path("/"), *, num_workers: int | None = None) -> list[list[int]]:
    """Returns the processors of each worker of this engine by --cpu-bind; empty lists: all. Raises ConfigError.

    `num_workers`: those on this machine; None: as the configuration says.

    The processors are divided among the workers of all engines on this machine. An engine that was added later shares
    those of another.
    """
    size = len(config.local_ranks) if num_workers is None else num_workers
    engines, text = config.machine_engines, config.cpu_bind
    if not size or text == "none" or not hasattr(os, "sched_getaffinity"):
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
