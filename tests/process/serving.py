"""A real `quire serve` on a free port of the loopback interface."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .background import BackgroundProgram, running

START_TIMEOUT_S = 120
SRC = Path(__file__).resolve().parents[2] / "src"
_LOADING = re.compile(r"loading \S+ for (https?://\S+)")
_URL = re.compile(r"serving \S+ on ((?:https?://|unix:)\S+?)(?:; admin routes on (http://\S+))? \(")


class ServerProcess:
    """The process, and where it listens."""

    def __init__(self, program: BackgroundProgram, url: str, admin_url: str | None) -> None:
        self.program = program
        self.process = program.process
        self.url = url
        self.admin_url = admin_url

    def core_pid(self) -> int:
        """Of the engine core."""
        (core,) = self._children("quire.engine.proc")
        return core

    def api_pids(self) -> list[int]:
        """Of the API processes of a server that has several, oldest first."""
        return sorted(self._children("quire.frontend.openai.fleet.proc"))

    def _children(self, module: str) -> list[int]:
        """Children that run this module. Each hangs below the thread that has started it."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        children = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        return [pid for pid in children if module in _command_line(pid)]


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:  # it has just ended
        return []


def serve_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "quire", "serve", "--host", "127.0.0.1", *flags]


def environment() -> dict[str, str]:
    """Without the variables of the tests, which a server would not start with: it knows all that begin with QUIRE_."""
    path = os.pathsep.join([str(SRC), str(SRC.parent)])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_TEST_")}
    return {**inherited, "PYTHONPATH": path, "QUIRE_LOGGING_LEVEL": "INFO"}


@contextmanager
def serving(
    *flags: str, executor: str | None = None, while_loading: Callable[[ServerProcess], None] | None = None
) -> Iterator[ServerProcess]:
    """A server with these flags, ended with SIGKILL if it has not ended by itself. `while_loading` meets it before."""
    command = serve_command("--port", "0", *flags)
    if executor is not None:
        command += ["--distributed-executor-backend", f"tests.process.executors:{executor}"]
    with running(command, cwd=SRC.parent, env=environment()) as program:

        def is_ready(line: str) -> bool:
            loading = _LOADING.search(line)
            if loading is not None and while_loading is not None:
                while_loading(ServerProcess(program, loading[1], None))
            return _URL.search(line) is not None

        found = _URL.search(program.wait_for(is_ready, START_TIMEOUT_S))
        assert found is not None
        yield ServerProcess(program, found[1], found[2])
