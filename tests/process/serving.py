"""A real `quire serve` on a free port of the loopback interface."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .background import BackgroundProgram, running
from .pace import Pace

START_TIMEOUT_S = 300
SRC = Path(__file__).resolve().parents[2] / "src"
_LOADING = re.compile(r"loading \S+ for (https?://\S+)")
_URL = re.compile(r"serving \S+ on ((?:https?://|unix:)\S+?)(?:; admin routes on (http://\S+))? \(")


class ServerProcess:
    """The process, and where it listens."""

    def __init__(self, program: BackgroundProgram, pace: Pace, url: str, admin_url: str | None) -> None:
        self.program = program
        self.process = program.process
        self.pace = pace
        """Pace of the model, where its executor is `Leisurely`."""
        self.url = url
        self.admin_url = admin_url

    def core_pid(self) -> int:
        """Returns the process id of the engine core. Raises ValueError where there is none at the moment."""
        (core,) = self.core_pids()
        return core

    def core_pids(self) -> list[int]:
        """Returns the process id of the engine core; between two there is none."""
        return self._children("quire.engine.proc")

    def api_pids(self) -> list[int]:
        """Returns the process ids of the API processes of a server that has several, oldest first."""
        return sorted(self._children("quire.frontend.fleet.proc"))

    def _children(self, module: str) -> list[int]:
        """Children that run this module. Each hangs below the thread that has started it."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        children = [int(pid) for task in tasks.iterdir() for pid in _read(task / "children").split()]
        return [pid for pid in children if module in _read(Path(f"/proc/{pid}/cmdline")).split("\0")]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process or thread has just ended
        return ""


def serve_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "quire", "serve", "--host", "127.0.0.1", *flags]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(SRC), str(SRC.parent)])
    return {**os.environ, "PYTHONPATH": path, "QUIRE_LOGGING_LEVEL": "INFO"}


@contextmanager
def serving(
    *flags: str,
    executor: str | None = None,
    while_loading: Callable[[ServerProcess], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """A server with these flags, ended with SIGKILL if it has not ended by itself. `while_loading` meets it before."""
    command = serve_command("--port", "0", *flags)
    if executor is not None:
        command += ["--distributed-executor-backend", f"tests.process.executors:{executor}"]
    with tempfile.TemporaryDirectory(prefix="quire-test-") as directory:
        pace = Pace(Path(directory) / "pace")
        variables = {**environment(), **pace.environment, **(env or {})}
        with running(command, cwd=SRC.parent, env=variables) as program:
            yield _wait_for(program, pace, while_loading)


def _wait_for(
    program: BackgroundProgram, pace: Pace, while_loading: Callable[[ServerProcess], None] | None
) -> ServerProcess:
    """Waits until it serves."""

    def is_ready(line: str) -> bool:
        loading = _LOADING.search(line)
        if loading is not None and while_loading is not None:
            while_loading(ServerProcess(program, pace, loading[1], None))
        return _URL.search(line) is not None

    found = _URL.search(program.wait_for(is_ready, START_TIMEOUT_S))
    assert found is not None
    return ServerProcess(program, pace, found[1], found[2])
