"""One engine under measurement: its driver process, the conversation with it, and its end when it takes too long."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.versus.peers import Peer, Place
from benchmarks.versus.processes import ManagedProcess, machine_cpu_s, read_line
from quire.cli.bench.workloads import BenchRequest


class EngineError(Exception):
    """An engine did not do what it was asked. The text goes into the table."""


@dataclass(frozen=True)
class Repetition:
    """One answer: seconds as in `benchmarks/peers/driver.py`, and the share of the cores that others had meanwhile."""

    wall_s: float
    ttft_s: float | None
    tpot_s: float | None
    neighbours: float


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
        self._log = logs / f"{peer.name}-{model}.log"
        self._process: ManagedProcess | None = None
        self._buffer = bytearray()

    def start(self) -> None:
        """Load, unless that has happened. Raises EngineError."""
        if self._process is not None:
            return
        self._buffer.clear()
        command = self.peer.driver_command(self._place, self._model)
        environment = self.peer.full_environment(self._place)
        self._process = ManagedProcess(command, environment, self._log, piped=True)
        try:
            ready = self._receive(self._load_limit_s)
        except EngineError:
            self.close()
            raise
        self.version, self.load_s = ready["version"], ready["load_s"]
        self._process.pause()

    def run(self, requests: Sequence[BenchRequest], prefix: int, limit_s: float) -> Repetition:
        """One repetition. Raises EngineError; when that was a limit or an end, the process is gone."""
        self.start()
        process = self._process
        assert process is not None
        process.resume()
        task = {"requests": [[r.prompt_token_ids, r.output_len] for r in requests], "prefix": prefix}
        before, own, start = machine_cpu_s(), process.cpu_s(), time.perf_counter()
        try:
            self._send(task)
            answer = self._receive(limit_s)
            busy = machine_cpu_s() - before - (process.cpu_s() - own)
            elapsed = time.perf_counter() - start
        finally:
            if self._process is not None:
                process.pause()
        neighbours = max(0.0, busy / (elapsed * self._place.num_threads))
        return Repetition(answer["wall_s"], answer["ttft_s"], answer["tpot_s"], neighbours)

    def close(self) -> None:
        """End the process, if there is one."""
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
            pass  # it has ended: what it said last is in the answer's error

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
