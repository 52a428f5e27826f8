"""A real `quire serve` on a free port of the loopback interface."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 120
SRC = Path(__file__).resolve().parents[2] / "src"
_URL = re.compile(r"serving \S+ on ((?:https?://|unix:)\S+?)(?:; admin routes on (http://\S+))? \(")


class ServerProcess:
    """The process, what it has written, and where it listens."""

    def __init__(self, process: subprocess.Popen[str], url: str, admin_url: str | None) -> None:
        self.process = process
        self.url = url
        self.admin_url = admin_url

    def core_pid(self) -> int:
        """Of the engine core: the server's only child."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self._spawner()}/children").read_text().split()
        return int(child)

    def _spawner(self) -> str:
        """The thread that started the core."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return next(task.name for task in tasks.iterdir() if (task / "children").read_text().strip())


def serve_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "quire", "serve", "--host", "127.0.0.1", *flags]


def environment() -> dict[str, str]:
    """Without the variables of the tests, which a server would not start with: it knows all that begin with QUIRE_."""
    path = os.pathsep.join([str(SRC), str(SRC.parent)])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_TEST_")}
    return {**inherited, "PYTHONPATH": path, "QUIRE_LOGGING_LEVEL": "INFO"}


@contextmanager
def serving(*flags: str, executor: str | None = None) -> Iterator[ServerProcess]:
    """A server with these flags, ended with SIGKILL if it has not ended by itself."""
    command = serve_command("--port", "0", *flags)
    if executor is not None:
        command += ["--distributed-executor-backend", f"tests.process.executors:{executor}"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, cwd=SRC.parent)
    killer = threading.Timer(START_TIMEOUT_S, process.kill)
    killer.start()
    assert process.stderr is not None
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        log: list[str] = []
        for line in process.stderr:
            log.append(line)
            found = _URL.search(line)
            if found is not None:
                break
        else:
            raise AssertionError("the server did not start:\n" + "".join(log))
        killer.cancel()
        drain.start()
        yield ServerProcess(process, found[1], found[2])
    finally:
        killer.cancel()
        if process.poll() is None:
            process.kill()
        process.wait()
        if drain.is_alive():
            drain.join()
        process.stderr.close()
