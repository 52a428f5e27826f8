"""`quire serve` as a child of a benchmark: on a free port of the loopback interface, with a key of its own."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from quire import envs
from quire.errors import EngineDeadError

START_LIMIT_S = 1800.0
END_LIMIT_S = 15.0
_PROGRAM = """\
import sys
from quire.wire.process import die_with_parent
die_with_parent(int(sys.argv[1]))
from quire.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""`quire`, which ends with the process that started it, whatever ends that."""
_SERVING = re.compile(r"serving .+ on (http://\S+)")


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(URL, API key) of a server with these flags, ended with the context. Raises EngineDeadError."""
    key = secrets.token_hex(16)
    command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    environment = {**os.environ, envs.API_KEY.name: key, envs.LOGGING_LEVEL.name: "INFO"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C ends the load, and the load ends the server
    )
    log = _ServerLog(process)
    try:
        yield log.wait_for_url(), key
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


class _ServerLog:
    """Reads what a server writes, for its URL, and for its last words."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=20)
        self._url: str | None = None
        self._knows = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_url(self) -> str:
        """Once it serves. Raises EngineDeadError."""
        if not self._knows.wait(START_LIMIT_S):
            raise EngineDeadError(f"the server has not started within {START_LIMIT_S:.0f} s")
        if self._url is None:
            words = next((line for line in reversed(self._lines) if line.strip()), "it said nothing").strip()
            raise EngineDeadError(f"the server ended before it served: {words.removeprefix('quire: error: ')}")
        return self._url

    def close(self) -> None:
        """After the process has ended."""
        self._thread.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            found = None if self._url else _SERVING.search(line)
            if found:
                self._url = found[1]
                self._knows.set()
        self._knows.set()
