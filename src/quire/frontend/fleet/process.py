"""One API process as its parent sees it.

The child is a plain command, `python -m quire.frontend.fleet.proc`. It inherits the listening sockets, the environment
without keys, standard error, and as its standard input one end of a socket pair: when the pair is closed, it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

from quire import envs
from quire.errors import ConfigError, ServerError
from quire.logger import child_level
from quire.wire.peers import ApiLaunch, encode_peer
from quire.wire.process import search_path

API_MODULE = "quire.frontend.fleet.proc"
KILL_TIMEOUT_S = 10.0
"""Time for a process to end once its connection has ended, and again after SIGKILL."""
_LOOK_S = 0.02


class ApiProcess:
    """A running API process. Belongs to the thread that makes it: when that thread ends, the system kills it."""

    def __init__(self, launch: ApiLaunch) -> None:
        """Raises ServerError if the system refuses to start it."""
        self.index = launch.index
        self.connection, theirs = socket.socketpair()
        """Connection to the process. Its user closes it."""
        try:
            self._process = _spawn(launch, theirs)
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # it has died already, which will be noticed
            self.connection.sendall(encode_peer(launch))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Sends a signal. Does nothing if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> int:
        """Kills the process. Returns its exit code, negative for a signal."""
        self._process.kill()
        return self._process.wait(KILL_TIMEOUT_S)

    async def wait_end(self, timeout_s: float) -> int:
        """Waits for the process to end, and kills it after `timeout_s`. Returns its exit code."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (code := self._process.poll()) is None:
            if asyncio.get_running_loop().time() > deadline:
                return self.kill()
            await asyncio.sleep(_LOOK_S)
        return code


def _spawn(launch: ApiLaunch, standard_input: socket.socket) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise ConfigError("this Python does not know its own executable, so no API process can be started")
    keys = (envs.API_KEY.name, envs.API_KEY.vllm_name)
    environment = {name: value for name, value in os.environ.items() if name not in keys}
    environment["PYTHONPATH"] = search_path()
    environment[envs.LOGGING_LEVEL.name] = child_level()
    listeners = [fd for fd in (launch.listener, launch.admin_listener) if fd is not None]
    try:
        # -P: a file json.py in the working directory must not stand in for a module.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", API_MODULE],
            stdin=standard_input.fileno(),
            pass_fds=listeners,
            env=environment,
            start_new_session=True,  # the parent handles Ctrl-C in the user's terminal
        )
    except OSError as e:
        raise ServerError(f"no API process can be started: {e}") from e
