"""One engine under measurement: its driver process, the conversation with it, and its end when it takes too long."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.versus.peers import Peer, Place
from quire.cli.bench.workloads import BenchRequest

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")
_LIBC = ctypes.CDLL(None)
_MARK = "VERSUS_PROCESS"


class ManagedProcess:
    """One process in a group of its own (Ctrl-C does not reach it) and all that come of it.

    `log` takes its standard error, and its standard output unless that is piped. It is killed when this process dies.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, piped: bool = False) -> None:
        self.log = log
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.popen: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                env={**env, _MARK: self._mark.partition("=")[2]},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else file,
                stderr=file,
                process_group=0,
                preexec_fn=_die_with_parent,
            )
        self._seen: dict[int, str] = {}

    def __enter__(self) -> ManagedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def pause(self) -> None:
        """Freezes the tree: an idle engine whose threads spin would take the cores from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets the tree run."""
        self._signal(signal.SIGCONT)

    def close(self, patience_s: float = 10.0) -> None:
        """Ends the tree: first the process started here, which may end the others itself, then all, then by force."""
        self.resume()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self.popen.stdin is None:  # otherwise it ends by itself at the end of its input
            self.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience_s)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self.tree():
                self._signal(sign)
                self._wait(patience_s)

    def tree(self) -> list[int]:
        """Returns the ids of this process and of its living descendants."""
        self.popen.poll()
        table = _process_table()
        found = {self.popen.pid} | {pid for pid in table if self._mark.encode() in _environment(pid)}
        grew = True
        while grew:
            children = {pid for pid, (parent, _) in table.items() if parent in found} - found
            found |= children
            grew = bool(children)
        self._seen.update((pid, table[pid][1]) for pid in found if pid in table and pid not in self._seen)
        return [pid for pid, start in self._seen.items() if pid in table and table[pid][1] == start]

    def cpu_s(self) -> float:
        """Returns the CPU seconds of the living tree."""
        return sum(_cpu_ticks(pid) for pid in self.tree()) / os.sysconf("SC_CLK_TCK")

    def peak_memory_bytes(self) -> int:
        """Returns the peak resident memory, summed over the tree; pages that two processes share count twice."""
        return sum(_peak_kib(pid) for pid in self.tree()) * 1024

    def last_words(self, limit: int = 200) -> str:
        """Returns the last non-empty line of the log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4096))
            lines = [line.strip() for line in file.read(4096).decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")[:limit]

    def _wait(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self.tree() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _signal(self, sign: signal.Signals) -> None:
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)


def read_line(process: ManagedProcess, buffer: bytearray, limit_s: float) -> bytes:
    """Returns the next line of a piped process. Raises TimeoutError after `limit_s`, EOFError when it ends before."""
    stream: IO[bytes] | None = process.popen.stdout
    assert stream is not None
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while b"\n" not in buffer:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no answer in {limit_s:.0f} s")
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                raise EOFError(f"it ended: {process.last_words()}")
            buffer += piece
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return line


def machine_cpu_s() -> float:
    """Returns the CPU seconds of the whole machine since its start; 0 where they are unknown."""
    try:
        fields = (_PROC / "stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _process_table() -> dict[int, tuple[int, str]]:
    """Returns process id -> (parent's id, start time) of everything that is neither gone nor a zombie."""
    table = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and fields[0] != "Z":
                table[int(entry.name)] = (int(fields[1]), fields[19])
    return table


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name, which may hold spaces: state, parent, ..."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    """Returns the environment of a process; empty if it may not be read."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _cpu_ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _peak_kib(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


class EngineError(Exception):
    """An engine did not do what it was asked. The text goes into the table."""


@dataclass(frozen=True)
class Repetition:
    """One answer: seconds as in `benchmarks/peers/driver.py`, the share of the cores that others had meanwhile, and the
    processor seconds of the engine."""

    wall_s: float
    ttft_s: float | None
    tpot_s: float | None
    neighbours: float
    cpu_s: float = 0.0


class Engine:
    """A peer with a model: started when it is first used, frozen in between, closed when it breaks a limit.

    After a failure the next use starts it anew.
    """

    def __init__(self, peer: Peer, place: Place, model: str, logs: Path, load_limit_s: float = 600.0) -> None:
        self.peer = peer
        self.version: str | None = None
        self.load_s: float | None = None
        self.peak_memory_bytes = 0
        self._place, self._model, self._load_limit_s = place, model, load_limit_s
        self.log = logs / f"{peer.name}-{model}.log"
        self._process: ManagedProcess | None = None
        self._buffer = bytearray()

    def tree(self) -> list[int]:
        """Returns the ids of the engine's processes."""
        return self._process.tree() if self._process is not None else []

    def start(self) -> None:
        """Loads the engine, unless it is loaded. Raises EngineError."""
        if self._process is not None:
            return
        self._buffer.clear()
        command = self.peer.driver_command(self._place, self._model)
        environment = self.peer.full_environment(self._place)
        self._process = ManagedProcess(command, environment, self.log, piped=True)
        try:
            ready = self._receive(self._load_limit_s)
        except EngineError:
            self.close()
            raise
        self.version, self.load_s = ready["version"], ready["load_s"]
        self._process.pause()

    def run(self, requests: Sequence[BenchRequest], prefix: int, limit_s: float, **more: Any) -> Repetition:
        """Runs one repetition. `more` goes to the driver as well. Raises EngineError; after a time-out or an end the
        process is gone."""
        self.start()
        process = self._process
        assert process is not None
        process.resume()
        task = {"requests": [[r.prompt_token_ids, r.output_len] for r in requests], "prefix": prefix, **more}
        before, own, start = machine_cpu_s(), process.cpu_s(), time.perf_counter()
        try:
            self._send(task)
            answer = self._receive(limit_s)
            own = process.cpu_s() - own
            busy = machine_cpu_s() - before - own
            elapsed = time.perf_counter() - start
        finally:
            if self._process is not None:
                process.pause()
        neighbours = max(0.0, busy / (elapsed * self._place.num_threads))
        return Repetition(answer["wall_s"], answer["ttft_s"], answer["tpot_s"], neighbours, own)

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.resume()
            self.peak_memory_bytes = max(self.peak_memory_bytes, process.peak_memory_bytes())
            process.close()

    def _send(self, task: dict[str, Any]) -> None:
        assert self._process is not None
        stream = self._process.popen.stdin
        assert stream is not None
        try:
            stream.write(json.dumps(task).encode() + b"\n")
            stream.flush()
        except OSError:
            pass  # it has ended: its last line is in the answer's error

    def _receive(self, limit_s: float) -> dict[str, Any]:
        assert self._process is not None
        try:
            answer: dict[str, Any] = json.loads(read_line(self._process, self._buffer, limit_s))
        except TimeoutError:
            self.close()
            raise EngineError(f"> {limit_s:.0f} s") from None
        except (EOFError, ValueError) as e:
            self.close()
            raise EngineError(f"failed: {e}") from None
        if "error" in answer:
            raise EngineError(f"failed: {answer['error']}")
        return answer
