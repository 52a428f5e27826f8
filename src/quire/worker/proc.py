"""A worker as a process: `python -m quire.worker.proc`, started by `MultiprocExecutor`.

It reads calls from a ring, runs them one after the other, and writes answers into a ring of its own. It ends when the
executor closes its pipe, or ends itself.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn

from quire.config.engine import EngineConfig
from quire.config.server import decode_config
from quire.errors import QuireError, error_name
from quire.failpoints import arm_failpoints, failpoint
from quire.logger import init_logger
from quire.resolve import resolve
from quire.timeline import release_garbage
from quire.wire.kv_transfer import KVConnectorOutput
from quire.wire.process import die_with_parent, leave_terminal, set_process_title
from quire.wire.ring import NO_BELL, RingReader, RingWriter, WorkerLinks, count_slots
from quire.wire.serial import MsgpackEncoder
from quire.wire.shared_memory import set_abort_word
from quire.wire.topology import Topology
from quire.wire.worker_calls import (
    WORKER_VERBS,
    WorkerCall,
    WorkerReply,
    decode_call,
    encode_late_answer,
    encode_reply,
    encode_transfer_report,
)
from quire.wire.worker_link import WorkerNetwork, decode_network
from quire.worker.host import cpu_quota

logger = init_logger("quire.worker.proc")  # as a process this module is __main__

PARENT_PIPE = 0
"""Standard input: the configuration, then nothing; its end means that the executor has ended."""


class WorkerOptions(NamedTuple):
    """The command line of a worker."""

    rank: int
    parent_pid: int
    shared_file: int
    """Descriptors from here on."""
    calls: int
    answers: int
    waker: int
    late: int
    """The socket for answers that come beside the steps."""
    cpus: tuple[int, ...] = ()
    inlet: tuple[int, ...] = ()
    """The ring that brings hidden states from the stage before, and this worker's end of its sockets."""
    outlet: tuple[int, ...] = ()
    """The ring to the stage after, and the ends of its sockets."""
    ranks: tuple[int, ...] = ()
    """Workers on this machine; empty: all of the engine."""
    calls_bell: int = NO_BELL
    answers_bell: int = NO_BELL
    """Descriptors of the bells of both rings."""
    num_readers: int = 0
    """Readers of `calls`, of which this machine's workers are the first; 0: there are no others."""


def parse_command_line(argv: Sequence[str]) -> WorkerOptions:
    """Parses the command line. Exits with a usage message if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m quire.worker.proc", description="A worker; started by Quire.")
    for name in ("rank", "parent-pid", "shared-file", "calls", "answers", "waker", "late"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--num-readers", type=int, default=0)
    for name in ("calls-bell", "answers-bell"):
        parser.add_argument(f"--{name}", type=int, default=NO_BELL)
    for name in ("cpus", "inlet", "outlet", "ranks"):
        parser.add_argument(f"--{name}", type=lambda text: tuple(int(n) for n in text.split(",") if n), default=())
    return WorkerOptions(**vars(parser.parse_args(argv)))


def read_start(pipe: int) -> tuple[EngineConfig, WorkerNetwork | None]:
    """Returns what the executor writes first, the length of each in 8 bytes and then itself: the configuration, and
    what leads to other machines, or nothing."""
    with os.fdopen(os.dup(pipe), "rb", closefd=True, buffering=0) as file:
        parts = [_read_exactly(file.read, int.from_bytes(_read_exactly(file.read, 8), "little")) for _ in range(2)]
    return decode_config(parts[0]), decode_network(parts[1])


def _read_exactly(read: Callable[[int], bytes | None], size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = read(size - len(data))
        if not more:
            raise SystemExit("the process that started this worker is gone")
        data += more
    return data


def topology_of(config: EngineConfig) -> Topology:
    """Returns the sizes of the engine that a worker belongs to."""
    parallel = config.parallel_config
    return Topology(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)


def join_stages(options: WorkerOptions, topology: Topology, network: WorkerNetwork | None = None) -> WorkerLinks:
    """Returns the worker's ends of what the workers share."""
    inlet: RingReader | None = None
    outlet: RingWriter | None = None
    if options.inlet:
        fd, waker = options.inlet
        place, slots = topology.place_of(options.rank), count_slots(fd, topology.tp)
        inlet = RingReader(fd, socket.socket(fileno=waker), place.tp, topology.tp, num_slots=slots)
    if options.outlet:
        fd, *wakers = options.outlet
        sockets = [socket.socket(fileno=waker) for waker in wakers]
        outlet = RingWriter(fd, sockets, num_slots=count_slots(fd, len(sockets)))
    ranks = range(options.ranks[0], options.ranks[-1] + 1) if options.ranks else range(topology.world_size)
    return WorkerLinks(options.shared_file, inlet, outlet, ranks, network)


class WorkerProc:
    """Serves the calls of one worker."""

    def __init__(self, options: WorkerOptions, config: EngineConfig, network: WorkerNetwork | None = None) -> None:
        topology = topology_of(config)
        waker = socket.socket(fileno=options.waker)
        links = join_stages(options, topology, network)
        num_readers = options.num_readers or topology.world_size
        index = links.ranks.index(options.rank)
        self._calls = RingReader(options.calls, waker, index, num_readers, bell=options.calls_bell)
        self._answers = RingWriter(options.answers, [waker], bell=options.answers_bell)
        self._late, self._rank = socket.socket(fileno=options.late), options.rank
        self._encoder = MsgpackEncoder()
        self._shared_file = options.shared_file
        self._answers_steps = options.rank == topology.output_rank
        self.worker: Any = resolve(config.parallel_config.worker_cls)(config, options.rank, links)
        if config.kv_transfer_config.connector is not None:
            self.worker.register_transfer_callback(self._report)

    def run(self) -> None:
        """Serves until the executor asks for the end, or is gone."""
        while (frames := self._calls.receive()) is not None:
            call, arguments = decode_call(frames)
            if WORKER_VERBS[call.verb].is_late:
                self._begin(call, arguments)
            else:
                self._serve(call, arguments)
            if call.verb == "shutdown":
                return

    def _serve(self, call: WorkerCall, arguments: tuple[Any, ...]) -> None:
        is_step, is_silent = WORKER_VERBS[call.verb].is_step, WORKER_VERBS[call.verb].is_silent
        try:
            if is_step:
                failpoint("worker.step", call.verb)
            result = self._run(call.verb, arguments)
        except Exception as e:
            is_echo = type(e).__name__ == "BarrierError"
            if is_step and not is_echo:
                set_abort_word(self._shared_file)  # the others wait for this one
            reply, result = _error_reply(call, e, is_fatal=is_step or is_silent, is_echo=is_echo), None
        else:
            if is_silent or (is_step and not self._answers_steps):
                return
            reply = WorkerReply(call.call_id)
        self._answers.send(encode_reply(reply, result, self._encoder))

    def _begin(self, call: WorkerCall, arguments: tuple[Any, ...]) -> None:
        """Begins a call that is answered late, by the thread that has the result."""

        def answer(future: Future[Any]) -> None:
            error = future.exception()
            reply = WorkerReply(call.call_id) if error is None else _error_reply(call, error)
            result = future.result() if error is None else None
            self._late.send(encode_late_answer(self._rank, reply, result))

        future: Future[Any] = Future()
        try:
            future = self._run(call.verb, arguments)
        except Exception as e:
            future.set_exception(e)
        future.add_done_callback(answer)

    def _report(self, output: KVConnectorOutput) -> None:
        """Sends a report of transfers, on the thread that has it."""
        with contextlib.suppress(ConnectionError):  # the executor ends, and with it all transfers
            self._late.send(encode_transfer_report(self._rank, output))

    def _run(self, verb: str, arguments: tuple[Any, ...]) -> Any:
        worker = self.worker
        if verb == "call_method":
            name, args, kwargs = arguments
            return getattr(worker, name)(*args, **kwargs)
        if verb == "call_function":
            name, args, kwargs = arguments
            return resolve(name)(worker, *args, **kwargs)
        if verb == "initialize_from_config":
            (configs,) = arguments
            return worker.initialize_from_config(configs[worker.rank])
        return getattr(worker, verb)(*arguments)


def _error_reply(
    call: WorkerCall, error: BaseException, *, is_fatal: bool = False, is_echo: bool = False
) -> WorkerReply:
    """Returns an answer with an error. Logs one that is ours."""
    if not isinstance(error, QuireError):
        logger.error("%s has failed", call.verb, exc_info=error)
    name = error_name(error)
    message = str(error) if name else f"{type(error).__name__}: {error}"
    return WorkerReply(call.call_id, name, message, is_fatal, is_echo)


def _watch_parent() -> None:
    """Ends the process when the executor's end of the pipe is closed. Runs in a thread."""
    while os.read(PARENT_PIPE, 1 << 10):
        pass
    os._exit(0)


def main() -> NoReturn:
    """Runs the process. Skips Python's clean-up, which a thread could block."""
    options = parse_command_line(sys.argv[1:])
    leave_terminal()
    die_with_parent(options.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the core decides
    if options.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, options.cpus)
        num_cpus = min(len(options.cpus), max(1, (cpu_quota() or len(options.cpus))))
        os.environ.setdefault("OMP_NUM_THREADS", str(num_cpus))
    exit_code = 0
    try:
        arm_failpoints()
        config, network = read_start(PARENT_PIPE)
        parallel = config.parallel_config
        set_process_title(topology_of(config).worker_title(options.rank))
        threading.Thread(target=_watch_parent, name="Parent", daemon=True).start()
        for name in parallel.worker_names(config.model_config.implementation.name):
            resolve(name)
        proc = WorkerProc(options, config, network)
        release_garbage()
        proc.run()
    except BaseException:
        logger.exception("worker %d has failed", options.rank)
        exit_code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
