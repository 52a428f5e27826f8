"""A program that runs beside a test, and what it writes to standard error."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

MAX_LOG_LINES = 2000


class BackgroundProgram:
    """The process, and the last lines it has written."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str] | None) -> None:
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, cwd=cwd)
        assert self.process.stderr is not None
        self._stderr = self.process.stderr
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._reader = threading.Thread(target=self._lines.extend, args=(self._stderr,), daemon=True)

    def wait_for(self, is_ready: Callable[[str], bool], timeout_s: float) -> str:
        """Returns the output up to a line that says it is ready. Kills a program that takes longer: AssertionError."""
        killer = threading.Timer(timeout_s, self.process.kill)
        killer.start()
        try:
            for line in self._stderr:
                self._lines.append(line)
                if is_ready(line):
                    return "".join(self._lines)
            raise AssertionError(f"{self.process.args} did not start")
        finally:
            killer.cancel()
            self._begin_reading()

    def read_log(self) -> str:
        """All it has written, once it has ended, for which this waits."""
        self.process.wait()
        self._begin_reading()
        self._reader.join()
        return "".join(self._lines)

    def close(self) -> None:
        """End it with SIGKILL if it has not ended by itself."""
        if self.process.poll() is None:
            self.process.kill()
        self.read_log()
        self._stderr.close()

    def _begin_reading(self) -> None:
        if self._reader.ident is None:
            self._reader.start()


@contextmanager
def running(command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[BackgroundProgram]:
    """A program that has just been started. A test that fails shows what it has written."""
    program = BackgroundProgram(command, cwd, env)
    try:
        yield program
    except BaseException:
        program.process.kill()
        sys.stderr.write(program.read_log())
        raise
    finally:
        program.close()
